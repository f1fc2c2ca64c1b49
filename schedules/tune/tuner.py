"""The loop of a search: ask, build, verify, measure, write down, tell.

Batches are asked for while the one before is still at work, so that builders and devices stay busy; a batch is told as
a whole and in its order, so that the same seed and the same times lead to the same candidates.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from schedules.core.arch import Arch
from schedules.core.errors import MachineError, TuningError
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.journal import Journal, told
from schedules.measure.records import ENVIRONMENT, Record, Search, judged_us, now, speedup
from schedules.tune import evaluate
from schedules.tune.crew import Crew, Job
from schedules.tune.evaluate import Artifact, Failure, Timing
from schedules.tune.finals import CONFIRM_SEEDS, hold_finals
from schedules.tune.noise import NoiseWatch
from schedules.tune.outages import OUTAGE, Outages, StopAsked
from schedules.tune.strategy import Candidate, Strategy

BATCHES = 2  # at work at once, at least
# candidates at work for each builder: one that builds ten times longer than the others holds up its batch, and with it
# the batches to come, but not the GPUs
AT_WORK = 6
KEPT = 16  # of the fastest candidates' libraries
HOPELESS = 16  # candidates that fail alike, with none correct, end a search


@dataclass(frozen=True)
class Limits:
    """When a search ends: `trials` or `minutes` in all (earlier runs counted), or `patience` trials without a new best;
    for this run also at `until`, a time of the monotonic clock.  None is no limit.  A fault of the machine may last
    `outage` seconds."""

    trials: int | None = None
    minutes: float | None = None
    patience: int | None = None
    until: float | None = None
    outage: float = OUTAGE


@dataclass
class Status:
    """Where a search stands, for those who watch it."""

    problem: Problem
    arch: Arch
    device: str
    strategy: str
    limits: Limits
    space: int | None
    done: int = 0  # trials, earlier runs counted
    resumed: int = 0  # of them, trials of earlier runs
    outcomes: Counter[str] = field(default_factory=Counter)
    default: Record | None = None
    best: Record | None = None
    since_best: int = 0
    peers: dict[str, float] = field(default_factory=dict)  # name to microseconds
    started: float = field(default_factory=time.monotonic)
    earlier: float = 0.0  # seconds of earlier runs
    devices: list[str] = field(default_factory=list)
    phase: str = "searching"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def spent(self) -> float:
        """Seconds of this search, earlier runs counted."""
        return self.earlier + self.seconds

    @property
    def rate(self) -> float:
        """Trials a second of this run."""
        return (self.done - self.resumed) / max(self.seconds, 1e-9)


class Watcher(Protocol):
    """Who is told of a search's progress.  Nothing it does changes the search."""

    def start(self, status: Status) -> None: ...

    def trial(self, record: Record, status: Status) -> None: ...

    def tick(self, status: Status) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Result:
    """What a search came to: `best` is the record to use, `why` the reason it ended."""

    status: Status
    best: Record | None
    trials: tuple[Record, ...]
    why: str
    finished: bool  # the limits were reached; otherwise it was stopped and can be resumed
    default: Record | None = None  # timed beside the best, if there were finals

    @property
    def speedup(self) -> float | None:
        """Of the best over the default, timed side by side if there were finals."""
        return speedup(self.best, self.default or self.status.default)

    @property
    def verdict(self) -> str:
        """What the finals showed, in a line; "" if there were none."""
        return str(self.best.more.get("verdict", "")) if self.best else ""


@dataclass
class _Trial:
    """A candidate on its way, and the future it waits for."""

    candidate: Candidate
    order: Callable[[], Future[Any]] | None = None  # asks for what it waits for
    pending: Future[Any] | None = None
    dropped: bool = False  # whatever it comes to is not wanted any more
    stage: str = "build"  # build, measure, odd (building the odd shape), confirm
    artifact: Artifact | None = None
    timing: Timing | None = None
    odd: Problem | None = None
    record: Record | None = None

    @property
    def needs(self) -> str:
        """What must work for it to go on."""
        return "build" if self.stage in ("build", "odd") else "measure"


class Tuner:
    """One search for `problem` on `arch`: its candidates from `strategy`, its work by `crew`, its memory in `journal`.

    `schedules` and `space` are what the strategy was narrowed to: another choice is another search.  `offered` are the
    schedules it draws from where it was not: one that is new begins the search over.  `first` are candidates to measure
    before any other: the default, other defaults, earlier bests.  `stop` is asked often; once it
    says True nothing new starts and what is being measured is finished.
    """

    def __init__(
        self,
        problem: Problem,
        arch: Arch,
        strategy: Strategy,
        crew: Crew,
        journal: Journal,
        limits: Limits,
        *,
        seed: int = 0,
        schedules: tuple[str, ...] = (),
        space: str = "",
        offered: tuple[str, ...] = (),
        first: Sequence[Candidate] = (),
        incumbent: Record | None = None,
        fresh: bool = False,
        watcher: Watcher | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._problem, self._arch, self._strategy, self._crew = problem, arch, strategy, crew
        self._journal, self._limits, self._seed = journal, limits, seed
        self._watcher, self._stop, self._incumbent = watcher or Silent(), stop, incumbent
        self._first = deque(dict.fromkeys(first))
        default = self._first[0] if self._first else None
        self._narrowed = (schedules, space)
        ours = [record for record in journal.records if self._is_ours(record)]
        campaigns = [record.search.campaign for record in ours if record.search]
        last = max(campaigns, default=0)
        known = [set(r.search.offered) for r in ours if r.search and r.search.campaign == last and r.search.offered]
        self._new = sorted(set(offered) - known[-1]) if known else []
        asked = (limits.trials, limits.minutes, limits.patience)
        campaign = last + 1 if fresh or self._new else max(last, 1)
        self._search = Search(strategy.name, campaign, seed, schedules, space, *asked, offered)
        earlier = [record for record in ours if record.search and record.search.campaign == self._search.campaign]
        self._trials = [record for record in earlier if record.stage == "trial"]
        self._finals = [record for record in earlier if record.stage == "final"]
        self._default_key = default.key if default else None
        self._status = Status(problem, arch, crew.device, strategy.name, limits, strategy.size)
        self._status.peers = peers_of(journal.records, self._problem, crew.device)
        for record in self._trials:
            self._count(record)
        self._status.resumed = self._status.done
        self._status.earlier = max((record.more.get("elapsed", 0.0) for record in self._trials), default=0.0)
        self._tried = {record.key for record in self._trials}
        self._first = deque(candidate for candidate in self._first if candidate.key not in self._tried)
        self._leader_us = self._status.best.us if self._status.best else float("inf")  # the fastest, confirmed or not
        self._artifacts: dict[tuple[str, str], Artifact] = {}  # of the fastest
        self._kept: dict[tuple[str, str], float] = {}  # their times
        self._returned: queue.SimpleQueue[_Trial] = queue.SimpleQueue()  # what they waited for is there
        self._waiting = 0  # trials that wait for something
        self._noise = NoiseWatch()
        self._held: deque[_Trial] = deque()  # built, and measured once nothing else is at work
        self._outages = Outages(
            limits.outage,
            self._watcher.note,
            self._tick_outage,
            self._stop,
            lambda: self._status.phase == "searching" and bool(self._time_over()),
        )
        others = [
            record
            for record in journal.records
            if record.problem != problem
            and record.stage == "trial"
            and record.environment == environment_of(crew, arch)
        ]
        if others:
            strategy.learn(others)
        if self._trials:
            strategy.tell(self._trials)

    def _is_ours(self, record: Record) -> bool:
        """Whether `record` is of this search: problem, target, device, versions and space alike."""
        return (
            record.problem == self._problem
            and record.search is not None
            and record.search.strategy == self._strategy.name
            and (record.search.schedules, record.search.space) == self._narrowed
            and record.environment == environment_of(self._crew, self._arch)
        )

    def run(self) -> Result:
        """Search until a limit is reached, the space is exhausted or `stop` says so.

        What meets a fault of the machine is neither written down nor counted: the search pauses, says so, and goes on
        with it.  Raises MachineError if the fault lasts too long, TuningError if nothing works, ToolchainError if
        nothing can be built here.
        """
        self._watcher.start(self._status)
        if self._new:
            self._watcher.note(f"started over: the schedules {', '.join(self._new)} are new since")
        for torn in (True, False):
            if unused := told([line for line in self._journal.bad if line.torn is torn]):
                name = f"{self._journal.file.name}.bad"
                self._watcher.note(f"{unused}; " + (f"moved to {name}" if torn else "left as they are"))
        if not self._limit_reached():
            self._crew.expect(self._problem, (self._seed, *(self._seed + more for more in CONFIRM_SEEDS)))
        try:
            why, finished = self._loop()
            finals = self._held_finals(finished)
        except StopAsked:
            why, finished, finals = "stopped", False, []
        winner = next((record for record in finals if record.more.get("winner")), None)
        self._status.phase = "done" if finished else "stopped"
        default = next((record for record in finals if record.key == self._default_key), None)
        result = Result(self._status, winner or self._status.best, tuple(self._trials), why, finished, default)
        self._watcher.finish(result)
        return result

    def _held_finals(self, finished: bool) -> list[Record]:
        """The finals of the trials so far, held now if they were not before."""
        finals = [record for record in self._finals if record.more.get("trials") == self._status.done]
        if finished and self._trials and not finals and not self._stop():
            self._status.phase = "timing the finalists again"
            self._watcher.tick(self._status)
            finals = self._outages.patiently(
                "measure",
                lambda: hold_finals(
                    self._problem,
                    self._arch,
                    self._crew,
                    self._trials,
                    self._incumbent,
                    self._artifacts,
                    self._seed,
                    default=self._status.default,
                    spent=self._status.spent,
                    stop=self._stop,
                ),
            )
            if not finals and self._stop():
                raise StopAsked
            done = {"trials": self._status.done}
            finals = [replace(r, search=self._search, more={**r.more, **done}) for r in finals]
            for record in finals:
                self._write(record)
            if verdict := next((record.more["verdict"] for record in finals if record.more["winner"]), ""):
                self._watcher.note(verdict)
        return finals

    def _loop(self) -> tuple[str, bool]:
        """Why the search ended, and whether that was by itself."""
        batches: deque[list[_Trial]] = deque()
        size = max(8, self._crew.builders, 8 * self._crew.slots)
        lookahead = 1 if self._crew.exclusive else max(BATCHES, math.ceil(AT_WORK * self._crew.builders / size))
        why = ""
        while True:
            if not why and (why := "stopped" if self._stop() else self._limit_reached()) == "stopped":
                self._drop(batches)
            while not why and len(batches) < lookahead:
                batch = self._ask(size, sum(len(batch) for batch in batches))
                if not batch:
                    break
                batches.append(batch)
            if not batches:
                return why or self._limit_reached() or "every candidate has been tried", why != "stopped"
            self._advance()
            self._outages.check()
            while batches and all(trial.record for trial in batches[0]):
                self._strategy.tell([trial.record for trial in batches.popleft() if trial.record])
            self._status.devices = self._crew.state()
            self._watcher.tick(self._status)
            if why and why != "stopped" and self._stop():
                why = "stopped"
                self._drop(batches)

    def _limit_reached(self) -> str:
        limits, status = self._limits, self._status
        if limits.trials is not None and status.done >= limits.trials:
            return f"{status.done} trials"
        if time_over := self._time_over():
            return time_over
        if limits.patience is not None and status.since_best >= limits.patience and not self._first:
            return f"no new best in {status.since_best} trials"
        return ""

    def _time_over(self) -> str:
        limits, status = self._limits, self._status
        if limits.minutes is not None and status.spent >= 60 * limits.minutes:
            return f"{limits.minutes:g} minutes"
        if limits.until is not None and time.monotonic() >= limits.until:
            return "its share of the time is over"
        return ""

    def _tick_outage(self) -> None:
        if self._status.phase == "searching":
            self._watcher.tick(self._status)

    def _write(self, record: Record) -> None:
        self._outages.patiently("write", lambda: self._journal.append(record))

    def _ask(self, count: int, at_work: int) -> list[_Trial]:
        if self._limits.trials is not None:
            count = min(count, self._limits.trials - self._status.done - at_work)
        found: list[Candidate] = []
        while self._first and len(found) < count:
            self._take(self._first.popleft(), found)
        while len(found) < count:
            asked = self._strategy.ask(count - len(found))
            if not asked:
                break
            for candidate in asked:
                self._take(candidate, found)
        trials = [_Trial(candidate) for candidate in found]
        for trial in trials:
            self._await(trial, "build", partial(self._crew.build, self._problem, trial.candidate))
        return trials

    def _take(self, candidate: Candidate, found: list[Candidate]) -> None:
        """Add `candidate` to those `found`, unless it was tried."""
        if candidate.key not in self._tried:
            self._tried.add(candidate.key)
            found.append(candidate)

    def _await(self, trial: _Trial, stage: str, order: Callable[[], Future[Any]]) -> None:
        """Have `trial` come back by `_returned` with what `order` asks for."""
        pending = order()
        trial.stage, trial.order, trial.pending = stage, order, pending
        self._waiting += 1
        pending.add_done_callback(lambda _: self._returned.put(trial))

    def _drop(self, batches: deque[list[_Trial]]) -> None:
        """Forget what is not being measured; the rest is finished."""
        for batch in batches:
            for trial in list(batch):
                if trial.record is None and (trial.stage == "build" or not trial.pending or trial.pending.cancel()):
                    trial.dropped = True
                    batch.remove(trial)
        self._held.clear()
        self._outages.clear()

    def _advance(self) -> None:
        """Wait a little, then take every trial that came back one step further.

        Where building disturbs the timing, a trial is measured when nothing else is at work.
        """
        came: list[_Trial] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._returned.get(timeout=0 if self._held and not self._waiting else 0.2))
            while True:
                came.append(self._returned.get_nowait())
        self._waiting -= len(came)
        stalled: dict[str, list[_Trial]] = {}
        for trial in came:
            if trial.dropped:
                continue
            if trial.pending and isinstance(trial.pending.exception(), MachineError):
                stalled.setdefault(trial.needs, []).append(trial)
                continue
            if not self._is_refused(trial):
                self._outages.works(trial.needs)
            if self._crew.exclusive and trial.stage == "build":
                self._held.append(trial)
            else:
                self._go_on(trial)
        for needs, trials in stalled.items():
            error = trials[-1].pending and trials[-1].pending.exception()
            assert isinstance(error, MachineError)
            self._outages.wait_out(needs, error)
            for trial in trials:
                assert trial.order
                self._await(trial, trial.stage, trial.order)
        while self._held and not self._waiting:
            self._go_on(self._held.popleft())

    def _is_refused(self, trial: _Trial) -> bool:
        """Whether it came back without anything of the machine having been used."""
        result = trial.pending.result() if trial.pending else None
        return isinstance(result, Failure) and result.outcome == "constraints"

    def _go_on(self, trial: _Trial) -> None:
        assert trial.pending
        self._step(trial, trial.pending.result())

    def _step(self, trial: _Trial, result: Any) -> None:
        if isinstance(result, Failure):
            if trial.stage == "odd":  # the config does not build there; the other data still count
                trial.odd = None
                self._confirm(trial, None)
            else:
                self._finish(trial, result)
        elif trial.stage == "build":
            trial.artifact = result
            arguments = (result, self._seed, self._leader_us)
            job = Job(evaluate.measure_candidate, self._problem, arguments, seeds=(self._seed,))
            self._await(trial, "measure", partial(self._crew.measure, job))
        elif trial.stage == "measure":
            trial.timing = result
            if self._us(result) >= self._leader_us:
                self._finish(trial, None)
                return
            self._leader_us = self._us(result)
            trial.odd = odd_problem(self._problem, self._arch, trial.candidate)
            if trial.odd:
                self._await(trial, "odd", partial(self._crew.build, trial.odd, trial.candidate))
            else:
                self._confirm(trial, None)
        elif trial.stage == "odd":
            self._confirm(trial, result)
        else:
            assert trial.timing
            trial.timing = replace(trial.timing, verified=trial.timing.verified + result)
            self._finish(trial, None)

    def _confirm(self, trial: _Trial, odd: Artifact | None) -> None:
        seeds = tuple(self._seed + more for more in CONFIRM_SEEDS)
        arguments = (trial.artifact, seeds, (trial.odd, odd) if odd else None)
        job = Job(evaluate.confirm_candidate, self._problem, arguments, seeds=seeds, timeouts=2)
        self._await(trial, "confirm", partial(self._crew.measure, job))

    def _finish(self, trial: _Trial, failure: Failure | None) -> None:
        trial.pending = None
        if failure and trial.timing and self._us(trial.timing) <= self._leader_us:
            self._leader_us = self._status.best.us if self._status.best else float("inf")
        record = self._record(trial, failure)
        self._write(record)
        trial.record = record
        self._trials.append(trial.record)
        self._count(trial.record)
        if trial.record.correct and trial.artifact:
            self._keep(trial.record, trial.artifact)
        self._watcher.trial(trial.record, self._status)
        if trial.timing and (said := self._noise.look(trial.timing)):
            self._watcher.note(said)
        self._give_up_if_hopeless()

    def _keep(self, record: Record, artifact: Artifact) -> None:
        """Keep what the fastest were built into, so that the finals need not build them again."""
        self._kept[record.key] = record.us
        self._artifacts[record.key] = artifact
        if len(self._kept) > KEPT:
            slowest = max(self._kept, key=lambda key: self._kept[key])
            del self._kept[slowest], self._artifacts[slowest]

    def _record(self, trial: _Trial, failure: Failure | None) -> Record:
        artifact = trial.artifact
        more: dict[str, Any] = {"elapsed": round(self._status.spent, 1)}
        if artifact:
            more["build_s"] = round(artifact.seconds, 2)
        if trial.timing:
            more["run_s"] = round(trial.timing.seconds, 3)
            more |= {"busy": round(trial.timing.busy, 2)} if trial.timing.busy else {}
        if artifact and artifact.registers:
            more |= {"registers": artifact.registers, "spilled": artifact.spilled}
        found = Record(
            operator=operator_of(self._problem).name,
            problem=self._problem,
            schedule=trial.candidate.schedule,
            config=trial.candidate.config,
            target=str(self._arch),
            device=self._crew.device,
            date=now(),
            versions=self._crew.versions,
            stage="trial",
            outcome=failure.outcome if failure else "correct",
            reason=failure.reason if failure else "",
            error=failure.error if failure and failure.error is not None and math.isfinite(failure.error) else None,
            program=artifact.program if artifact else None,
            search=self._search,
            more=more,
        )
        if failure or not trial.timing:
            return found
        timing = trial.timing
        return replace(
            found,
            median_us=timing.median_us,
            p10_us=timing.p10_us,
            p90_us=timing.p90_us,
            runs=timing.runs,
            error=timing.error,
            verified=timing.verified,
        )

    def _us(self, timing: Timing) -> float:
        return judged_us(str(self._arch), timing.median_us, timing.p10_us)

    def _count(self, record: Record) -> None:
        status = self._status
        status.done += 1
        status.outcomes[record.outcome] += 1
        status.since_best += 1
        if record.key == self._default_key and record.correct:
            status.default = record
        if record.us < (status.best.us if status.best else float("inf")):
            status.best, status.since_best = record, 0

    def _give_up_if_hopeless(self) -> None:
        if self._status.best or len(self._trials) < HOPELESS:
            return
        # one cause has many texts: each names its own file, number or address
        kinds = {(record.outcome, re.sub(r"\S*[/\d]\S*", "", record.reason)[:60]) for record in self._trials}
        if len(kinds) == 1:
            outcome, _ = kinds.pop()
            raise TuningError(
                f"the first {len(self._trials)} candidates all failed alike ({outcome}: {self._trials[0].reason}); "
                f"mend that and run again with --fresh, or choose another --schedule"
            )


class Silent:
    """A watcher that says nothing."""

    def start(self, status: Status) -> None: ...

    def trial(self, record: Record, status: Status) -> None: ...

    def tick(self, status: Status) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, result: Result) -> None: ...


def environment_of(crew: Crew, arch: Arch) -> tuple[str | None, ...]:
    """The same as `Record.environment`, of what `crew` measures."""
    return (crew.device, str(arch), *(crew.versions.get(name) for name in ENVIRONMENT))


def odd_problem(problem: Problem, arch: Arch, candidate: Candidate) -> Problem | None:
    """A small odd problem of the same kind that the candidate's config is legal for, if there is one."""
    return next((odd for odd in problem.odd() if candidate.config.check(odd, arch) is None), None)


def peers_of(records: Sequence[Record], problem: Problem, device: str) -> dict[str, float]:
    """Microseconds of other libraries for `problem`, from the latest record on `device` that has them."""
    found: dict[str, float] = {}
    for record in records:
        if record.problem == problem and record.device == device:
            found = dict(record.more.get("peers") or found)
    return found
