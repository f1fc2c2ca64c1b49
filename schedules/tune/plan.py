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
Without minutes of its own it gets an equal share of what is left of the plan's.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from schedules.build.builder import operator_of
from schedules.core.arch import Arch, parse_arch
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
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the plan {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from None
    top = _fields(table, {"minutes": _positive, "defaults": _table, "work": _tables}, str(file))
    defaults = _fields(top.get("defaults", {}), {**_SHARED, "export": _text}, f"{file}, defaults")
    work = top.get("work", [])
    if not work:
        raise UsageError(f"{file} has no [[work]]; add one with problem = ...")
    total = top.get("minutes")
    entries = [
        _entry(words, defaults, f"{file}, work {number}", total is None)
        for number, several in enumerate(work, 1)
        for words in _each(several, f"{file}, work {number}")
    ]
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
        raise UsageError(f"{where}: problem = {pattern!r} fits no preset; `schedules list` shows them")
    return [{**words, "problem": name} for name in names]


def _entry(words: Mapping[str, Any], defaults: Mapping[str, Any], where: str, unlimited: bool) -> Entry:
    if "problem" in words:
        where = f"{where} ({words['problem']})"
    own = _fields(
        words, {**_SHARED, "problem": _text, "name": _text, "set": _table, "priority": _number, "export": _flag}, where
    )
    if "problem" not in own:
        raise UsageError(f"{where}: problem is missing; name a preset or an operator")
    given = {**{name: value for name, value in defaults.items() if name != "export"}, **own}
    name, override = given["problem"], given.get("set", {})
    problem = _named(where, "problem", lambda: (operator_named(name), resolve(name, override))[1][1])
    if not given.get("targets"):
        raise UsageError(f'{where}: targets is missing; write targets = ["llvm"], here or in [defaults]')
    targets = tuple(_named(where, "targets", partial(parse_arch, text)) for text in given["targets"])
    for schedule in given.get("schedules", ()):
        spec = _named(where, "schedules", partial(operator_of(problem).schedule, schedule))
        for arch in targets:
            _named(where, "schedules", partial(spec.require_kind, arch))
    limits = Limits(given.get("trials"), given.get("minutes"), given.get("patience"))
    if limits == Limits() and unlimited:
        limits = Limits(trials=TRIALS)
    if given.get("space") and given.get("search") != "auto":
        raise UsageError(f'{where}: space is for search = "auto"')
    return Entry(
        name=given.get("name") or "-".join([name, *(f"{field}{_short(value)}" for field, value in override.items())]),
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
    return "x".join(map(str, value)) if isinstance(value, list) else str(value).replace(",", "x").replace("/", "")


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
            raise UsageError(f"{where}: {UnknownNameError('field', name, checks)}")
        if wanted := checks[name](value):
            raise UsageError(f"{where}: {name} = {value!r} is not {wanted}")
    return dict(table)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(value: Any) -> str:
    return "" if _is_whole(value) and value > 0 else "a whole number over 0"


def _seed(value: Any) -> str:
    return "" if _is_whole(value) and value >= 0 else "a whole number that is not negative"


def _number(value: Any) -> str:
    return "" if _is_whole(value) or isinstance(value, float) else "a number"


def _positive(value: Any) -> str:
    return "" if not _number(value) and value > 0 else "a number over 0"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and value else "a text"


def _texts(value: Any) -> str:
    good = isinstance(value, list) and value and all(isinstance(item, str) and item for item in value)
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
