"""What a report shows of a problem, from its records and the comparisons with peers: curves, times, failures.

Pure functions from what was measured to frozen dataclasses; nothing is built or drawn here.
"""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from schedules.core.arithmetic import FLOAT32
from schedules.core.device import slug
from schedules.core.errors import UsageError
from schedules.core.presets import short
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.measure.lookup import Summary
from schedules.measure.records import Record
from schedules.measure.results import arithmetic_of, is_comparison, read_results
from schedules.tune.tuner import peers_of

DEFAULT, OURS, PEER, OTHER = "default", "ours", "peer", "other"  # kinds of a Timing; other: a copy, or other arithmetic
JOURNAL = "journal"  # the source of a Beside that no results file has


@dataclass(frozen=True)
class Curve:
    """The trials of one search in their order: microseconds (infinite where one failed), and the seconds of the search
    at which each ended.

    `dated` says that the journal did not keep those seconds: they are told by the records' dates, pauses included.
    """

    name: str
    us: tuple[float, ...]
    seconds: tuple[float, ...]
    dated: bool

    @property
    def best(self) -> tuple[float, ...]:
        """The fastest so far, after each trial."""
        return tuple(accumulate(self.us, min))


@dataclass(frozen=True)
class Failures:
    """Candidates that failed alike: where (`outcome`), of which schedule, why; numbers in the reason are left open.

    `example` is the first one's reason as it was, and `config` its config.
    """

    outcome: str
    schedule: str
    reason: str
    count: int
    example: str
    config: str


@dataclass(frozen=True)
class Timing:
    """One implementation's time in microseconds with the 10th and 90th percentile; `us` is None where it failed, and
    `note` then says why."""

    name: str
    kind: str  # DEFAULT, OURS, PEER or OTHER
    us: float | None
    p10_us: float | None = None
    p90_us: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Beside:
    """What was timed side by side: `source` is a file's name, `launch` how calls were launched, `date` when.

    `arithmetic` is that of ours where it is one that is used only if asked for (tf32), else "".
    """

    source: str
    launch: str
    date: str
    timings: tuple[Timing, ...]
    arithmetic: str = ""

    @property
    def place(self) -> str:
        """Where it was timed, in words."""
        return ", ".join([self.source, self.launch, *([f"in {self.arithmetic}"] if self.arithmetic else [])])

    @property
    def ours(self) -> Timing | None:
        return next((timing for timing in self.timings if timing.kind == OURS and timing.us), None)

    @property
    def best_peer(self) -> Timing | None:
        peers = [timing for timing in self.timings if timing.kind == PEER and timing.us]
        return min(peers, key=lambda timing: timing.us or math.inf, default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time as a multiple of ours: over 1 ours is faster."""
        ours, peer = self.ours, self.best_peer
        return peer.us / ours.us if ours and peer and ours.us and peer.us else None


@dataclass(frozen=True)
class Case:
    """One case of a results file: ours and the peers on one problem, in one run; `schedule` and `config` are ours.

    `copy_gbytes_per_s` is the fastest plain copy that was timed beside them.
    """

    operator: str
    problem: Problem
    device: str
    beside: Beside
    schedule: str
    config: Mapping[str, Any]
    copy_gbytes_per_s: float | None

    @property
    def name(self) -> str:
        return short(self.operator, self.problem)


@dataclass(frozen=True)
class Comparison:
    """A results file: its cases, and what bounds the device by it: the T(FL)OP/s of matrix products by arithmetic, and
    the GB/s of the fastest plain copy (None if it has none)."""

    file: Path
    device: str
    ceilings: Mapping[str, float]
    bandwidth: float | None
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Study:
    """All that is shown of one problem on one device but its kernel."""

    summary: Summary = field(repr=False)
    curves: tuple[Curve, ...]
    failures: tuple[Failures, ...]
    beside: tuple[Beside, ...]  # the journal's own times first

    @property
    def name(self) -> str:
        """The problem, for a heading."""
        return short(self.summary.operator, self.summary.problem)

    @property
    def key(self) -> str:
        """A name for files and links: no other study of a report has it."""
        whole = (self.summary.device, self.summary.target, self.summary.operator, str(self.summary.problem))
        digest = hashlib.sha256(" ".join(whole).encode()).hexdigest()[:8]
        return f"{slug(f'{self.summary.operator} {self.name}')[:80]}-{digest}"

    @property
    def ratio(self) -> tuple[float, str] | None:
        """The best peer's time as a multiple of ours, and the peer: of the newest run that timed both in turn, in the
        usual arithmetic, else by the journal."""
        usual = [run for run in self.beside if not run.arithmetic]
        for run in sorted(usual, key=lambda run: (run.source != JOURNAL, run.date), reverse=True):
            if run.ratio is not None and run.best_peer:
                return run.ratio, run.best_peer.name
        return None


def studies(summaries: Iterable[Summary], comparisons: Sequence[Comparison]) -> list[Study]:
    """What is known of each of `summaries`, with the cases of `comparisons` that are of the same problem and device."""
    cases: dict[tuple[str, str, Problem], list[Case]] = {}
    for comparison in comparisons:
        for case in comparison.cases:
            cases.setdefault((case.device, case.operator, case.problem), []).append(case)
    made = []
    for summary in summaries:
        records = summary.records
        same = cases.get((summary.device, summary.operator, summary.problem), [])
        own = journal_times(summary)
        made.append(
            Study(
                summary=summary,
                curves=tuple(curves(records)),
                failures=tuple(failures(records)),
                beside=(*([own] if own.timings else []), *(case.beside for case in same)),
            )
        )
    return made


def curves(records: Iterable[Record]) -> list[Curve]:
    """One for each search that left trials, in the order in which they began."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        search = record.search
        if search and record.stage == "trial":
            groups.setdefault((search.strategy, search.schedules, search.space, search.campaign), []).append(record)
    return [_curve(group) for group in groups.values()]


def _curve(trials: Sequence[Record]) -> Curve:
    search = trials[0].search
    assert search
    narrowed = ", ".join([*search.schedules, *([search.space] if search.space else [])])
    again = f" (search {search.campaign})" if search.campaign > 1 else ""
    elapsed = [trial.more.get("elapsed") for trial in trials]
    dated = any(value is None for value in elapsed)
    if dated:
        began = datetime.fromisoformat(trials[0].date)
        elapsed = [(datetime.fromisoformat(trial.date) - began).total_seconds() for trial in trials]
    return Curve(
        name=search.strategy + (f": {narrowed}" if narrowed else "") + again,
        us=tuple(trial.us for trial in trials),
        seconds=tuple(float(value or 0.0) for value in elapsed),
        dated=dated,
    )


def failures(records: Iterable[Record]) -> list[Failures]:
    """The failures by outcome, schedule and reason, the most frequent first."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.outcome != "correct":
            groups.setdefault((record.outcome, record.schedule, pattern(record.reason)), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        Failures(*key, count=len(group), example=group[0].reason, config=str(group[0].config)) for key, group in ordered
    ]


def pattern(reason: str) -> str:
    """A reason on one line with its numbers left open, so that failures alike fall together."""
    line = " ".join(reason.split())
    return re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?(e[+-]?\d+)?", "#", line) or "no reason was given"


def journal_times(summary: Summary) -> Beside:
    """The default, the best and the peers as the journal has them; of one run only where it came to its finals."""
    found = [
        _timing(name, kind, record)
        for name, kind, record in (("default", DEFAULT, summary.default), ("best", OURS, summary.best))
        if record
    ]
    peers = peers_of(summary.records, summary.problem, summary.device)
    found += [Timing(name, PEER, us) for name, us in peers.items()]
    return Beside(JOURNAL, "stream", summary.last, tuple(found))


def _timing(name: str, kind: str, record: Record) -> Timing:
    return Timing(name, kind, record.us, record.p10_us, record.p90_us, record.schedule)


def comparisons(folders: Iterable[Path]) -> tuple[list[Comparison], list[str]]:
    """The results files in the devices' `folders`, and what could not be read of them, in lines."""
    found: list[Comparison] = []
    notes: list[str] = []
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            if not is_comparison(file):
                continue
            try:
                found.append(_comparison(file, notes))
            except UsageError as error:  # of a schema that this version does not read
                notes.append(str(error))
    return found, notes


def _comparison(file: Path, notes: list[str]) -> Comparison:
    results = read_results(file)
    cases: list[Case] = []
    unread: Counter[str] = Counter()
    for words in results["cases"]:
        try:
            cases.append(_case(words, file, results["device"]))
        except UsageError as error:  # of an operator or a field that this version does not have
            unread[str(error)] += 1
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            unread[f"not a case: {type(error).__name__} {error}"] += 1
    notes += [
        f"{file}: {count} of {len(results['cases'])} cases not read: {reason}" for reason, count in unread.items()
    ]
    given = results.get("ceilings", {})
    if not (isinstance(given, dict) and all(isinstance(words, dict) for words in given.values())):
        raise UsageError(f"{file}: its ceilings are not numbers by name")
    ceilings = {name: _number(words, "tflops") for name, words in given.items() if "tflops" in words}
    bandwidth = max((case.copy_gbytes_per_s for case in cases if case.copy_gbytes_per_s), default=None)
    return Comparison(file, results["device"], ceilings, bandwidth, tuple(cases))


def _case(words: Mapping[str, Any], file: Path, device: str) -> Case:
    copies, ours = words.get("copies", {}), words["ours"]
    timings = [
        _told("ours", OURS, ours),
        *(_told(f"{name} copy", OTHER, copy) for name, copy in copies.items()),
        *(_told(name, PEER if peer.get("counts", True) else OTHER, peer) for name, peer in words["peers"].items()),
    ]
    owner = operator(words["operator"])
    usual = arithmetic_of(words) == FLOAT32.name
    rates = [_number(copy, "gbytes_per_s") for copy in copies.values() if "gbytes_per_s" in copy]
    return Case(
        operator=words["operator"],
        problem=owner.problem.parse(words["problem"]),
        device=device,
        beside=Beside(
            file.name, str(words["launch"]), str(words["date"]), tuple(timings), "" if usual else arithmetic_of(words)
        ),
        schedule=str(ours.get("schedule", "")),
        config=dict(ours.get("config", {})),
        copy_gbytes_per_s=max(rates, default=None),
    )


def _told(name: str, kind: str, words: Mapping[str, Any]) -> Timing:
    note = words.get("failed") or words.get("schedule", "")
    if kind == OTHER and words.get("counts") is False:
        note = note or "other arithmetic: not counted"
    us, p10, p90 = (None if words.get(time) is None else _number(words, time) for time in ("us", "p10_us", "p90_us"))
    return Timing(name, kind, us, p10, p90, str(note or ""))


def _number(words: Mapping[str, Any], name: str) -> float:
    """Raises UsageError unless it is one, finite and over 0."""
    value = words[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UsageError(f"{name}={reprlib.repr(value)} is not a finite number over 0")
    return float(value)
