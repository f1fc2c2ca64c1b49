"""Plans: which problems to search on which targets, for how long and in which order, as a TOML file.

    minutes = 600                     # of the whole plan

    [defaults]                        # of every entry
    targets = ["cuda:sm_90a"]
    trials = 400
    patience = 150
    export = "out/plan"               # bundles and report

    [[work]]
    problem = "tutorial"              # a preset, several ("oneflow-*"), or an operator
    set = { n = 128 }                 # its fields
    priority = 10                     # higher ones come first

An entry may also have a name, targets, trials, minutes, patience, seed, search, space, schedules, and export = false.
Without minutes of its own it gets an equal share of what is left of the plan's.  A name is that of a folder in
`export`, so it has no `/`, and no other entry has it on the same target.
"""

from __future__ import annotations

import fnmatch
import math
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from schedules.build.builder import operator_of
from schedules.core.arch import Arch, parse_arch
from schedules.core.bounds import excess
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.presets import operator_named, presets, resolve
from schedules.core.problem import Problem
from schedules.measure.records import STRATEGIES
from schedules.tune.session import Work
from schedules.tune.tuner import Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRIALS = 256  # of an entry of a plan that has no limits at all
BYTES = 2**20  # of a plan's file, at most
ENTRIES = 10000  # of a plan, at most
SHOWN = 80  # letters of a value in an error
NAME = 150  # bytes of a name, at most: a folder's has the target behind it


@dataclass(frozen=True)
class Entry:
    """One problem of a plan and how it is searched; `name` is for people and folders."""

    name: str
    problem: Problem
    targets: tuple[Arch, ...]
    limits: Limits
    search: str = "template"
    space: str = ""
    schedules: tuple[str, ...] = ()
    seed: int = 0
    priority: float = 0.0
    export: bool = True

    def folder(self, arch: Arch) -> str:
        """The name of what comes of it on one of the targets."""
        return f"{self.name}-{arch.kind if arch.name == 'host' else arch.name}"

    def work(self, arch: Arch, until: float | None = None) -> Work:
        """The search on one of the targets, until a time of the monotonic clock."""
        limits = Limits(self.limits.trials, self.limits.minutes, self.limits.patience, until)
        return Work(self.problem, arch, limits, self.search, self.schedules, self.seed, self.space)


@dataclass(frozen=True)
class Plan:
    """The entries in the order in which they are searched; `minutes` for all of them; `out` for what they give."""

    file: Path
    entries: tuple[Entry, ...]
    out: Path
    minutes: float | None = None


def read_plan(file: str | Path) -> Plan:
    """The plan in `file`.  Raises UsageError that names the file, the entry and the field."""
    file = Path(file)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise UsageError(f"cannot read the plan {file}: it is not a regular file")
        with file.open("rb") as stream:
            content = stream.read(BYTES + 1)
        if len(content) > BYTES:
            raise UsageError(f"the plan {file} is longer than {BYTES} bytes; cut it into several")
        table = tomllib.loads(content.decode())
        if _is_beyond(table):
            raise ValueError("a whole number has more than 64 bits")
    except OSError as error:
        raise UsageError(f"cannot read the plan {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: of TOML, of its letters, of numbers too long to read
        raise UsageError(f"{file} is not TOML: {error}") from None
    top = _fields(table, {"minutes": _positive, "defaults": _table, "work": _tables}, str(file))
    defaults = _fields(top.get("defaults", {}), {**_SHARED, "export": _text}, f"{file}, defaults")
    work = top.get("work", [])
    if not work:
        raise UsageError(f"{file} has no [[work]]; add one with problem = ...")
    total = top.get("minutes")
    found = [
        (where, words)
        for number, several in enumerate(work, 1)
        for where in (f"{file}, work {number}",)
        for words in _each(several, where)
    ]
    if len(found) > ENTRIES:
        raise UsageError(f"{file} has {len(found)} entries; cut it into plans of at most {ENTRIES}")
    entries = _apart(
        [(where, "name" in words, _entry(words, defaults, where, total is None)) for where, words in found]
    )
    # stable: equal priorities keep the order of the file
    entries.sort(key=lambda entry: -entry.priority)
    return Plan(file, tuple(entries), Path(defaults.get("export") or Path("out") / file.stem), total)


def _each(words: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The entry for each preset that a pattern fits; one that is no pattern alone."""
    pattern = words.get("problem")
    if not isinstance(pattern, str) or not set(pattern) & set("*?["):
        return [words]
    names = [name for name in presets() if fnmatch.fnmatchcase(name, pattern)]
    if not names:
        raise UsageError(f"{where}: problem = {_shown(pattern)} fits no preset; `schedules list` shows them")
    if "name" in words and len(names) > 1:
        raise UsageError(f"{where}: name is for one problem, and {pattern!r} fits {len(names)}; leave it out")
    return [{**words, "problem": name} for name in names]


def _entry(words: Mapping[str, Any], defaults: Mapping[str, Any], where: str, unlimited: bool) -> Entry:
    if "problem" in words:
        where = f"{where} ({str(words['problem'])[:SHOWN]})"
    own = _fields(
        words, {**_SHARED, "problem": _text, "name": _name, "set": _table, "priority": _number, "export": _flag}, where
    )
    if "problem" not in own:
        raise UsageError(f"{where}: problem is missing; name a preset or an operator")
    given = {**{name: value for name, value in defaults.items() if name != "export"}, **own}
    name, override = given["problem"], given.get("set", {})
    problem = _named(where, "problem", lambda: (operator_named(name), resolve(name, override))[1][1])
    if not given.get("targets"):
        raise UsageError(f'{where}: targets is missing; write targets = ["llvm"], here or in [defaults]')
    targets = tuple(_named(where, "targets", partial(parse_arch, text)) for text in given["targets"])
    if len(set(targets)) < len(targets):
        raise UsageError(f"{where}: targets = {_shown(given['targets'])} has one twice")
    for schedule in given.get("schedules", ()):
        spec = _named(where, "schedules", partial(operator_of(problem).schedule, schedule))
        for arch in targets:
            _named(where, "schedules", partial(spec.require_kind, arch))
    limits = Limits(given.get("trials"), given.get("minutes"), given.get("patience"))
    if limits == Limits() and unlimited:
        limits = Limits(trials=TRIALS)
    if given.get("space") and given.get("search") != "auto":
        raise UsageError(f'{where}: space is for search = "auto"')
    title = given.get("name") or "-".join([name, *(f"{field}{_short(value)}" for field, value in override.items())])
    if wanted := _name(title):
        raise UsageError(f"{where}: {_shown(title)}, made of its fields, is not {wanted}; give it a name")
    return Entry(
        name=title,
        problem=problem,
        targets=targets,
        limits=limits,
        search=given.get("search", "template"),
        space=given.get("space", ""),
        schedules=tuple(given.get("schedules", ())),
        seed=given.get("seed", 0),
        priority=given.get("priority", 0.0),
        export=given.get("export", True),
    )


def _short(value: Any) -> str:
    text = "x".join(map(str, value)) if isinstance(value, list) else str(value).replace(",", "x")
    return re.sub(r"[^\w.+-]", "", text)


def _apart(entries: Sequence[tuple[str, bool, Entry]]) -> list[Entry]:
    """The entries of (where, whether it was given its name, entry), with a number behind names that are not given and
    taken.  Raises UsageError for names that are given twice."""
    taken: dict[str, str] = {}

    def places(entry: Entry) -> list[str]:
        return [entry.folder(arch).casefold() for arch in entry.targets]  # one folder where case does not count

    for where, given, entry in entries:
        for place in places(entry) if given else ():
            if place in taken:
                raise UsageError(f"{where}: name = {entry.name!r} is that of {taken[place]}, too; give it another")
            taken[place] = where
    apart = []
    for where, given, entry in entries:
        name, number = entry.name, 1
        while not given and any(place in taken for place in places(entry)):
            number += 1
            entry = replace(entry, name=f"{name}-{number}")
        taken |= dict.fromkeys(places(entry), where)
        apart.append(entry)
    return apart


def _named(where: str, field: str, find: Callable[[], Any]) -> Any:
    """What `find` returns; its UsageError with the place in front."""
    try:
        return find()
    except UsageError as error:
        raise UsageError(f"{where}: {field}: {error}") from None


Check = Callable[[Any], str]  # what a value must be, "" if it is


def _fields(table: Mapping[str, Any], checks: Mapping[str, Check], where: str) -> dict[str, Any]:
    """The table, every field known and of its kind.  Raises UsageError."""
    for name, value in table.items():
        if name not in checks:
            raise UsageError(f"{where}: {UnknownNameError('field', name[:SHOWN], checks)}")
        if wanted := checks[name](value):
            raise UsageError(f"{where}: {name} = {_shown(value)} is not {wanted}")
        if isinstance(value, int | float) and (wanted := excess(name, value)):
            raise UsageError(f"{where}: {name} = {_shown(value)} {wanted}")
    return dict(table)


def _shown(value: Any) -> str:
    """`value` as it is quoted in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _is_beyond(value: Any) -> bool:
    """Whether there is a whole number of more than 64 bits in it: other readers of TOML have none, and Python cannot
    write very long ones."""
    if isinstance(value, dict | list):
        return any(map(_is_beyond, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> str:
    return "" if _is_whole(value) and value > 0 else "a whole number over 0"


def _seed(value: Any) -> str:
    return "" if _is_whole(value) and value >= 0 else "a whole number that is not negative"


def _number(value: Any) -> str:
    return "" if _is_whole(value) or isinstance(value, float) and math.isfinite(value) else "a number"


def _positive(value: Any) -> str:
    return "" if not _number(value) and value > 0 else "a number over 0"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and value and value.isprintable() else "a text"


def _name(value: Any) -> str:
    good = isinstance(value, str) and re.fullmatch(r"\w[\w.+ -]*", value) and len(value.encode()) <= NAME
    return "" if good else f"a name of letters, digits, _ . + and -, of at most {NAME} bytes"


def _texts(value: Any) -> str:
    good = isinstance(value, list) and value and not any(map(_text, value))
    return "" if good else 'a list of texts, like ["a", "b"]'


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _table(value: Any) -> str:
    return "" if isinstance(value, dict) else "a table, like { n = 1 }"


def _tables(value: Any) -> str:
    good = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return "" if good else "a list of tables; write [[work]] above each"


def _search(value: Any) -> str:
    return "" if value in STRATEGIES else f"one of {', '.join(STRATEGIES)}"


_SHARED: dict[str, Check] = {
    "targets": _texts,
    "trials": _count,
    "minutes": _positive,
    "patience": _count,
    "seed": _seed,
    "search": _search,
    "space": _text,
    "schedules": _texts,
}
