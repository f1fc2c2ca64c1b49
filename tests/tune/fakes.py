"""Stand-ins for what a search works with: a crew that answers from a table, records, a watcher that remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from schedules.core.problem import Problem
from schedules.measure.contest import hold
from schedules.measure.records import Record, Search, now
from schedules.tune import evaluate
from schedules.tune.crew import Job
from schedules.tune.evaluate import Artifact, Failure, Timing
from schedules.tune.strategy import Candidate
from schedules.tune.tuner import Result, Silent, Status

VERSIONS = {"apache-tvm": "1", "apache-tvm-ffi": "2", "compiler": "cc 3"}


class FakeCrew:
    """Builds nothing and measures by asking `time_us`, whose answer may be a Failure."""

    def __init__(self, time_us: Callable[[Candidate], float | Failure], device: str = "Some CPU") -> None:
        self.time_us, self.device, self.versions = time_us, device, dict(VERSIONS)
        self.slots, self.builders, self.exclusive = 1, 2, False
        self.built: list[Candidate] = []
        self.measured: list[str] = []
        self.busy, self.ahead = 0.0, True
        self.confirm: Callable[[Candidate], tuple[str, ...] | Failure] = lambda candidate: ("seed 1",)
        self._programs: dict[str, Candidate] = {}

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        self.built.append(candidate)
        program = f"{candidate.key} {problem}"
        self._programs[program] = candidate
        return _done(Artifact(b"", program, "cc 3", 0, 0, 0.0))

    def measure(self, job: Job) -> Future[Any]:
        self.measured.append(job.function.__name__)
        if job.function is evaluate.measure_in_turn:
            artifacts, seed, holder, kept, seconds = job.arguments
            times = [self.time_us(self._programs[artifact.program]) for artifact in artifacts]
            found = hold(
                lambda index: [times[index]] * 3, len(times), holder=holder, kept=kept, seconds=seconds, longest=1.0
            )
            return _done(evaluate.Rounds(found, self.busy, self.ahead))
        candidate = self._programs[job.arguments[0].program]
        if job.function is evaluate.confirm_candidate:
            return _done(self.confirm(candidate))
        us = self.time_us(candidate)
        return _done(us if isinstance(us, Failure) else Timing(us, us, us, 3, 0.1, ("seed 0",)))

    def expect(self, problem: Problem, seeds: Sequence[int]) -> None:
        pass

    def state(self) -> list[str]:
        return ["idle"]

    def close(self) -> None:
        pass


class Memory(Silent):
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.notes: list[str] = []
        self.result: Result | None = None

    def trial(self, record: Record, status: Status) -> None:
        self.records.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, result: Result) -> None:
        self.result = result


def record_of(
    problem: Problem, operator: str, candidate: Candidate, us: float | None, target: str = "llvm", **changes: Any
) -> Record:
    """A trial of `candidate` that took `us`, or failed to compile if that is None."""
    fields: dict[str, Any] = dict(
        operator=operator,
        problem=problem,
        schedule=candidate.schedule,
        config=candidate.config,
        target=target,
        device="Some CPU",
        date=now(),
        versions=VERSIONS,
        stage="trial",
        outcome="compile" if us is None else "correct",
        median_us=us,
        p10_us=us,
        p90_us=us,
        search=Search("template", 1, 0),
    )
    return Record(**{**fields, **changes})


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
