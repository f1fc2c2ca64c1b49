"""What journals hold, as commands and reports ask for it: records and their places, problems, searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schedules.build.toolchain.devices import on_named
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError, UsageError
from schedules.core.problem import Problem
from schedules.measure.choice import default_choice, legal_best
from schedules.measure.journal import BadLine, Located, is_being_written, journals, read_journals
from schedules.measure.records import ENVIRONMENT, Record, Search, speedup

Comparable = tuple[str | None, ...]


def located(files: Iterable[Path]) -> list[Located]:
    """Every record of the journals `files`, in their order.  Raises JournalError if none can be read."""
    return read_journals(list(files))[0]


def journal_files(folders: Iterable[str | Path], journal: str | Path | None = None) -> list[Path]:
    """The journal `journal`, else all in `folders`.  Raises UsageError if there are none."""
    if journal:
        if not Path(journal).is_file():
            raise UsageError(f"--journal {journal} is not a file")
        return [Path(journal)]
    folders = list(folders)
    files = list({file.resolve(): file for folder in folders for file in journals(folder)}.values())
    if not files:
        where = ", ".join(map(str, folders)) or "tuning_logs"
        raise UsageError(f"there are no journals in {where}; run `schedules tune` first, or say where they are")
    return files


def comparable(record: Record) -> Comparable:
    """What must agree for two records of a problem to stand side by side: device, target, TVM and compiler."""
    names = [name for name in ENVIRONMENT if name != "driver"]
    return (record.device, record.target, *(record.versions.get(name) for name in names))


def latest_comparable(found: Sequence[Located]) -> list[Located]:
    """Those that stand beside the newest."""
    newest = max(found, key=lambda item: item.record.date, default=None)
    return [item for item in found if newest and comparable(item.record) == comparable(newest.record)]


def ranked(found: Iterable[Located]) -> list[Located]:
    """The latest correct time of each config, the fastest first: rank #1 is the first."""
    latest = {item.record.key: item for item in found if item.record.correct}
    return sorted(latest.values(), key=lambda item: item.record.us)


def default_record(records: Iterable[Record], problem: Problem, arch: Arch) -> Record | None:
    """The latest time of the default config among `records`."""
    try:
        default = default_choice(problem, arch)
    except ConfigError:
        return None
    key = (default.schedule, str(default.config))
    same = [record for record in records if record.problem == problem and record.key == key and record.correct]
    return same[-1] if same else None


@dataclass(frozen=True)
class Campaign:
    """One search as far as it came; `ended` says that a limit of its own ended it."""

    problem: Problem
    target: str
    device: str
    search: Search
    trials: int
    seconds: float
    last: str
    ended: bool
    file: Path


def campaigns(found: Iterable[Located]) -> list[Campaign]:
    """The last campaign of every search, the most recent first."""
    groups: dict[tuple[object, ...], list[Located]] = {}
    for item in found:
        search = item.record.search
        if search:
            key = (
                item.record.problem,
                item.record.environment,
                search.strategy,
                search.schedules,
                search.space,
                item.file,
            )
            groups.setdefault(key, []).append(item)
    made = [_campaign(group) for group in groups.values()]
    return sorted(made, key=lambda campaign: campaign.last, reverse=True)


def _campaign(group: Sequence[Located]) -> Campaign:
    number = max(item.record.search.campaign for item in group if item.record.search)
    ours = [item for item in group if item.record.search and item.record.search.campaign == number]
    records = [item.record for item in ours]
    trials = [record for record in records if record.stage == "trial"]
    finals = [record for record in records if record.stage == "final"]
    last = records[-1]
    assert last.search
    return Campaign(
        problem=last.problem,
        target=last.target,
        device=last.device,
        search=last.search,
        trials=len(trials),
        seconds=max((record.more.get("elapsed", 0.0) for record in trials), default=0.0),
        last=max(record.date for record in records),
        ended=bool(finals) and finals[-1].more.get("trials") == len(trials),
        file=ours[0].file,
    )


@dataclass(frozen=True)
class Summary:
    """What is known of a problem on one device: its newest comparable records."""

    problem: Problem
    operator: str
    target: str
    device: str
    trials: int
    outcomes: Counter[str]
    best: Record | None  # an illegal one only where none is legal
    refused: tuple[BadLine, ...]  # those that would be the best, were they legal
    default: Record | None
    last: str
    older: int  # records of other versions
    running: bool
    searches: tuple[Campaign, ...] = field(repr=False)
    records: tuple[Record, ...] = field(repr=False)  # the comparable ones, in the order of the journal

    @property
    def speedup(self) -> float | None:
        return speedup(self.best, self.default)


def summaries(found: Sequence[Located]) -> list[Summary]:
    """One for each problem, device and target, in the order in which they were first measured."""
    groups: dict[tuple[Problem, str, str], list[Located]] = {}
    for item in found:
        groups.setdefault((item.record.problem, item.record.device, item.record.target), []).append(item)
    running = {file: is_being_written(file) for file in {item.file for item in found}}
    return [_summary(group, running) for group in groups.values()]


def _summary(group: Sequence[Located], running: dict[Path, bool]) -> Summary:
    kept = latest_comparable(group)
    records = [item.record for item in kept]
    last, trials = records[-1], [record for record in records if record.stage == "trial"]
    best, refused = legal_best(kept)
    if refused and best is None:  # what was measured is told, though nothing can be built of it any more
        first = (refused[0].file, refused[0].number)
        best = next(item.record for item in kept if (item.file, item.line) == first)
    return Summary(
        problem=last.problem,
        operator=last.operator,
        target=last.target,
        device=last.device,
        trials=len(trials),
        outcomes=Counter(record.outcome for record in trials),
        best=best,
        refused=tuple(refused),
        default=default_record(records, last.problem, on_named(parse_arch(last.target), last.device, (last.device,))),
        last=max(record.date for record in records),
        older=len(group) - len(kept),
        running=any(running[item.file] for item in kept),
        searches=tuple(campaigns(kept)),
        records=tuple(records),
    )
