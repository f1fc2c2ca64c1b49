"""Which schedule and config a problem is built with: the best that was measured, for the problem or for the same with
another epilogue; else what is predicted to be the fastest, or the config of a near problem that is predicted to be as
fast; else, where nothing is known of such problems, what the operator's rule chooses.

A record is used only if it was measured on the device the build is for, with the same TVM and compiler.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from schedules.build.present import device_name
from schedules.build.toolchain.devices import on_local, on_named
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.device import slug
from schedules.core.errors import ConfigError, ToolchainError
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_of
from schedules.core.versions import versions
from schedules.measure.journal import DEFAULT_FOLDER, BadLine, Located, read_journals, read_numbered, told
from schedules.measure.records import Record
from schedules.predict.rank import Ranked, predicted_us, ranked
from schedules.predict.start import started

VARIABLE = "SCHEDULES_LOGS"
AS_FAST = 1.02  # times the predicted time of the default, which a near problem's config may take
NEAR = 1.0  # how many doublings of its extents away a problem may be for its config to be taken over


@dataclass(frozen=True)
class Choice:
    """A schedule and a legal config for a problem; `record` is what they come from, None for the default.

    `passed_over` says in a line what else is known and was not used; `given` that the caller chose; `unused` are lines
    of the journals that no choice can use: damaged ones, and illegal configs that would be the best.
    """

    problem: Problem
    schedule: str
    config: Config
    record: Record | None
    passed_over: str = ""
    given: bool = False
    unused: tuple[BadLine, ...] = dataclasses.field(default=(), repr=False)
    predicted: Ranked | None = None  # what a default was chosen by; None for an operator's rule

    @property
    def warnings(self) -> tuple[str, ...]:
        """What it says of journals that it could not use."""
        return tuple(text for text in (told(self.unused), self.passed_over) if text)

    @property
    def source(self) -> str:
        """record, nearest, default or given."""
        if self.record is None:
            return "given" if self.given else "default"
        return "record" if self.record.problem == self.problem else "nearest"

    def __str__(self) -> str:
        if self.given:
            return "as given"
        if self.record is None:
            told = f", predicted {self.predicted.us:.1f} us" if self.predicted else ""
            return f"default config{told}" + (f" ({self.passed_over})" if self.passed_over else "")
        where = f"{self.record.us:.2f} us on {self.record.device}, {self.record.date[:10]}"
        if self.record.problem == self.problem:
            return f"best record: {where}"
        if self.record.problem.bare() == self.problem.bare():
            return f"record of another epilogue, {self.record.problem}: {where}"
        return f"record of the nearest problem, {self.record.problem}: {where}"


def log_folders() -> list[Path]:
    """Where journals are looked for: the folders that SCHEDULES_LOGS names, else ``tuning_logs`` here, beside the
    package (a checkout's), and inside it (an installed wheel's)."""
    if named := os.environ.get(VARIABLE):
        return [Path(part) for part in named.split(os.pathsep) if part]
    package = Path(__file__).resolve().parents[1]
    places = (DEFAULT_FOLDER, package.parent / DEFAULT_FOLDER, package / DEFAULT_FOLDER)
    return list({path.resolve(): path for path in places if path.is_dir()}.values())


def for_device(arch: Arch, device: str | None, operator: str, folders: Sequence[str | Path] | None = None) -> Arch:
    """`arch` for the device that is called `device`, of those that are here, have a row or were measured for
    `arch`; by default for the one that is here, else as it is.  Raises UnknownNameError, UsageError."""
    if device is None:
        return on_local(arch)
    known = (item.record for item in _records(operator, folders)[0])
    return on_named(arch, device, {record.device for record in known if record.target == str(arch)})


def choose(
    problem: Problem,
    arch: Arch,
    schedule: str | None = None,
    *,
    folders: Sequence[str | Path] | None = None,
    device: str | None = None,
) -> Choice:
    """The schedule (or only `schedule`) and config for `problem` on `arch`.

    `device` is the name of the device that the build is for: by default the one that is here, or, where none is, the
    one device whose records are for `arch`.  Defaults are for the device of `arch`, if no other is named.
    Raises ConfigError, UnknownNameError, UsageError.
    """
    op = operator_of(problem)
    if (fixed := problem.representative()) != problem:
        return _for_range(problem, choose(fixed, arch, schedule, folders=folders, device=device), arch, schedule)
    if device:
        arch = for_device(arch, device, op.name, folders)
    if schedule:
        op.schedule(schedule).require_kind(arch)
    everything, unread = _records(op.name, folders)
    asked = (schedule,) if schedule else ()
    found = [item for item in everything if item.record.target == str(arch) and item.record.correct]
    found = [item for item in found if may_use(item.record, asked) and schedule in (None, item.record.schedule)]
    known = [item.record for item in found]
    device = device or device_name(arch) or _only_device(known)
    here = [record for record in known if device and slug(record.device) == slug(device)]
    usable = [record for record in here if _same_versions(record, arch)]
    note = _passed_over(known, here, usable, device, folders)
    used = set(map(id, usable))
    exact, refused = legal_best(
        [item for item in found if id(item.record) in used and item.record.problem == problem], asked
    )
    unused = (*unread, *refused)
    if exact:
        return Choice(problem, exact.schedule, exact.config, exact, unused=unused)
    for record in same_but_finish(problem, usable, asked):
        if record.config.check(problem, arch) is None:
            return Choice(problem, record.schedule, record.config, record, unused=unused)
    default = replace(default_choice(problem, arch, schedule, note), unused=unused)
    # a neighbour has a better config, not a better rule: schedules change their order between problems, and one that is
    # best there may be far behind here
    for record in nearest(problem, usable, asked):
        if record.schedule == default.schedule and record.config.check(problem, arch) is None:
            us = predicted_us(problem, record.schedule, record.config, arch) if default.predicted else None
            if us is None or default.predicted is None or us <= AS_FAST * default.predicted.us:
                return Choice(problem, record.schedule, record.config, record, unused=unused)
    return default


def default_choice(problem: Problem, arch: Arch, schedule: str | None = None, note: str = "") -> Choice:
    """What is predicted to be the fastest, or else what the operator's rule chooses, whatever was measured.

    Raises ConfigError, UnknownNameError.
    """
    if (fixed := problem.representative()) != problem:
        return _for_range(problem, default_choice(fixed, arch, schedule, note), arch, schedule)
    spec, config = started(problem, arch, schedule)
    best = ranked(problem, arch, schedule)[:1]
    return Choice(problem, spec.name, config, None, note, predicted=best[0] if best else None)


def choose_widened(problem: Problem, arch: Arch, *, device: str | None = None) -> Choice:
    """What to build so that it serves `problem` and its like (`Problem.widened`): for the range, if what is chosen for
    its representative takes one, else for the problem alone.  Raises as `choose`."""
    wide = problem.widened()
    if wide != problem and any(spec.takes_range(wide) for spec in operator_of(problem).offered(arch)):
        chosen = choose(wide.representative(), arch, device=device)
        if _takes(chosen, wide, arch):
            return replace(chosen, problem=wide)
    return choose(problem, arch, device=device)


def _takes(chosen: Choice, problem: Problem, arch: Arch) -> bool:
    """Whether what is chosen can be built for a range of extents."""
    spec = operator_of(problem).schedule(chosen.schedule)
    return spec.takes_range(problem) and chosen.config.check(problem, arch) is None


def _for_range(problem: Problem, fixed: Choice, arch: Arch, schedule: str | None) -> Choice:
    """For a range of extents, what is chosen for its representative; where that takes no range, the default of the
    first schedule that does.  Raises ConfigError if none does."""
    if schedule:
        operator_of(problem).schedule(schedule).require_shape(problem)
        fixed.config.require(problem, arch)
    if _takes(fixed, problem, arch):
        return replace(fixed, problem=problem)
    for spec in operator_of(problem).offered(arch):
        if spec.serves(problem, arch):
            return Choice(problem, spec.name, spec.default(problem, arch), None)
    raise ConfigError(f"no schedule for {arch} takes a range of extents for {problem}; leave out the range")


def may_use(record: Record, asked: Collection[str] = ()) -> bool:
    """Whether the schedule of `record` is one that is used unasked, or `asked` for by name."""
    spec = operator_of(record.problem).schedule(record.schedule)
    return record.schedule in asked or spec.arithmetic_of(record.problem, record.config) == FLOAT32


def best_of(records: Iterable[Record], asked: Collection[str] = ()) -> Record | None:
    """The record to use, of records of one problem on one device; `asked` are schedules that the user has named.

    The winner of the last finals, unless something was faster later.  A config's latest time is its time, since a
    search's times are each the luckiest of many.  Those whose config is illegal are passed over.
    """
    return _best_and_refused(records, asked)[0]


def legal_best(found: Sequence[Located], asked: Collection[str] = ()) -> tuple[Record | None, list[BadLine]]:
    """As `best_of`, and the lines that were passed over since their config is illegal."""
    best, refused = _best_and_refused((item.record for item in found), asked)
    places = {id(item.record): item for item in found}
    return best, [places[id(record)].unused(f"illegal config: {reason}") for record, reason in refused]


def _best_and_refused(
    records: Iterable[Record], asked: Collection[str]
) -> tuple[Record | None, list[tuple[Record, str]]]:
    latest: dict[tuple[str, str], Record] = {}
    winners: list[Record] = []
    places: dict[int, int] = {}
    for place, record in enumerate(records):
        if not record.correct or not may_use(record, asked):
            continue
        latest[record.key], places[id(record)] = record, place
        if record.more.get("winner"):
            winners.append(record)
    ranked = deque(sorted(latest.items(), key=lambda item: item[1].us))
    refused: dict[tuple[str, str], tuple[Record, str]] = {}
    while ranked:
        key, best = ranked[0]
        if key in refused:
            ranked.popleft()
            continue
        while winners and winners[-1].key in refused:
            winners.pop()
        winner = winners[-1] if winners else None
        if winner and best.search == winner.search:  # one file, whose order no step of the clock changes
            later = best.stage != "final" and places[id(best)] > places[id(winner)]
        else:
            later = winner is None or best.date > winner.date
        if winner and not (later and best.us < winner.us):
            best = winner
        reason = best.config.check(best.problem, parse_arch(best.target))
        if reason is None:
            return best, list(refused.values())
        refused[best.key] = best, reason
    return None, list(refused.values())


def nearest(problem: Problem, records: Sequence[Record], asked: Collection[str] = ()) -> list[Record]:
    """The best record of each problem near enough, the nearest first."""
    by_problem: dict[Problem, list[Record]] = {}
    for record in records:
        by_problem.setdefault(record.problem, []).append(record)
    near = sorted((distance(problem, other), str(other), other) for other in by_problem if other != problem)
    best = (best_of(by_problem[other], asked) for how_far, _, other in near if how_far <= NEAR)
    return [record for record in best if record]


def same_but_finish(problem: Problem, records: Sequence[Record], asked: Collection[str] = ()) -> list[Record]:
    """The best record of each problem that differs only in what is done to the result; in the fewest fields first."""
    found: dict[Problem, list[Record]] = {}
    for record in records:
        if record.problem != problem and problem.is_bare_as(record.problem):
            found.setdefault(record.problem, []).append(record)

    def fields_apart(other: Problem) -> int:
        return sum(getattr(problem, name) != getattr(other, name) for name in problem.finishing)

    best = (
        best_of(found[other], asked) for other in sorted(found, key=lambda other: (fields_apart(other), str(other)))
    )
    return [record for record in best if record]


def distance(one: Problem, other: Problem) -> float:
    """How many doublings of extents lie between two problems of an operator; infinite if they differ in more than
    extents (dtype, stride, padding, what is fused)."""
    total = 0.0
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if a == b:
            continue
        if type(a) is not int or type(b) is not int or min(a, b) < 1:
            return math.inf
        total += abs(math.log2(a / b))
    return total


def _records(operator: str, folders: Sequence[str | Path] | None) -> tuple[list[Located], list[BadLine]]:
    return read_journals(list(_journals(f"*/{operator}", folders)), _read)


def journals_of(operator: str) -> Iterator[Path]:
    """The journals, of every device, that a choice for problems of an operator may depend on."""
    return _journals(f"*/{operator}", None)


def _journals(pattern: str, folders: Sequence[str | Path] | None) -> Iterator[Path]:
    for folder in folders if folders is not None else log_folders():
        yield from sorted(Path(folder).glob(f"{pattern}.jsonl"))


def _read(file: Path) -> tuple[list[tuple[int, Record]], list[BadLine]]:
    try:
        found = os.stat(file)
    except OSError:  # which reading it says better
        return read_numbered(file)
    return _read_once(file, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _read_once(file: Path, inode: int, size: int, modified: int) -> tuple[list[tuple[int, Record]], list[BadLine]]:
    return read_numbered(file)


def _only_device(records: Sequence[Record]) -> str | None:
    names = {record.device for record in records}
    return names.pop() if len(names) == 1 else None


def _same_versions(record: Record, arch: Arch) -> bool:
    ours = versions()
    if any(record.versions.get(name) != ours[name] for name in ("apache-tvm", "apache-tvm-ffi")):
        return False
    from schedules.build.builder import compiler_of

    try:
        return record.versions.get("compiler") == compiler_of(arch)
    except ToolchainError:
        return True  # then nothing will be built; the build says so better


def _passed_over(
    known: Sequence[Record],
    here: Sequence[Record],
    usable: Sequence[Record],
    device: str | None,
    folders: Sequence[str | Path] | None,
) -> str:
    if usable:
        return ""
    if not known:
        if device is None or any(_journals(f"{slug(device)}/*", folders)):
            return ""
        return f"no records of {device}; `schedules tune` measures some"
    if here:
        old = here[-1].versions
        return f"records of {old.get('apache-tvm')} with {old.get('compiler')} are not used; tune again"
    names = sorted({record.device for record in known})
    if device is None:
        return f"records of {' and '.join(names)} exist; choose with --device"
    return f"records of {names[0]} exist, none of {device}; `schedules tune` measures some"
