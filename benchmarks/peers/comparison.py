"""An operator of ours beside its peers, on one device, in one run: how it is timed, and what is kept.

Everything of one case is timed in turn, in rounds, so that what changes on the device (clocks, temperature) meets all
alike.  A result is written after every case; a run that was cut off goes on with what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.errors import SchedulesError, UsageError
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.records import now
from schedules.measure.results import SCHEMA, arithmetic_of, read_results
from schedules.measure.timer import Timer, uncertainty

STREAM, GRAPH = "stream", "graph"  # how calls are launched: one by one, or from a captured CUDA graph

ROUNDS = (3, 9)  # at least and at most
IN_A_ROUND = (3, 40)  # calls of one function, at least and at most
PRECISION = 0.005  # half the 95% confidence interval of each median, aimed at

Call = Callable[[], Sequence[Any]]  # runs once on the current stream; its outputs, in order
P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: the median of the rounds' medians, and the 10th and 90th percentile of all `runs`."""

    us: float
    p10_us: float
    p90_us: float
    runs: int

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def time_in_turn(timer: Timer, calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, Times]:
    """Time `calls` in rounds, each a few times in every round, for about `seconds` of the device in all.

    Ends earlier when every median is known to within PRECISION.  Raises what a call raises.
    """
    quiet = {name: _quiet(call) for name, call in calls.items()}
    each = seconds / max(1, len(calls)) / ROUNDS[0]
    counts = {}
    for name, call in quiet.items():
        once = float(np.median(np.asarray(timer.times(call, 3)))) + timer.flush_us
        counts[name] = max(IN_A_ROUND[0], min(IN_A_ROUND[1], round(each * 1e6 / once)))
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for done in range(1, ROUNDS[1] + 1):
        for name, call in quiet.items():
            rounds[name].append(timer.times(call, counts[name]))
        known = all(uncertainty(sum(times, [])) <= PRECISION for times in rounds.values())
        if done >= ROUNDS[0] and (known or time.perf_counter() >= end):
            break
    return {name: _summed_up(times) for name, times in rounds.items()}


def _quiet(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        call()

    return run


def _summed_up(rounds: Sequence[Sequence[float]]) -> Times:
    every = np.concatenate([np.asarray(times) for times in rounds])
    p10, p90 = (float(value) for value in np.percentile(every, (10, 90)))
    medians = [float(np.median(np.asarray(times))) for times in rounds]
    return Times(float(np.median(np.asarray(medians))), p10, p90, len(every))


@dataclass(frozen=True)
class Entrant:
    """One implementation of a case: `make` returns its call; `about` is kept with its result.

    What is further from the reference than `most` (in units of the tolerance) is not timed.  `adapt` brings its outputs
    into the problem's layout, outside of what is timed.
    """

    make: Callable[[], Call]
    about: Mapping[str, Any]
    most: float = float("inf")
    judged: bool = True  # against the reference; a copy is not
    adapt: Callable[[Sequence[Any]], Sequence[Any]] = lambda outputs: outputs

    @property
    def must_match(self) -> bool:
        return self.judged and self.most < float("inf")


def compare(
    entrants: Mapping[str, Entrant],
    timer: Timer,
    judge: Callable[[Sequence[Any]], float],
    poison: Callable[[], None],
    seconds: float,
) -> dict[str, tuple[Times | None, dict[str, Any]]]:
    """Run each of `entrants` once on poisoned outputs, judge it, time those that run in turn, and judge what must be
    right once more.

    `judge` gives the error of outputs in units of the tolerance.  For each its times (None if it failed) and what is
    known of it: `about`, `error`, or `failed` with the reason in a line.
    """
    calls: dict[str, Call] = {}
    told = {name: dict(entrant.about) for name, entrant in entrants.items()}

    def passes(name: str, call: Call | None = None) -> bool:
        entrant, about = entrants[name], told[name]
        try:
            call = calls[name] = call or entrant.make()
            poison()
            outputs = call()
            error = judge(entrant.adapt(outputs)) if entrant.judged else 0.0
        except Exception as fault:  # other libraries raise many types; theirs must not end the comparison
            about["failed"] = reason(fault)
            return False
        if entrant.judged:
            about["error"] = round(error, 4) if np.isfinite(error) else "infinite"
        if entrant.must_match and not error <= entrant.most:
            about["failed"] = f"wrong: {error:.3g} times the tolerance"
        return "failed" not in about

    running = [name for name in entrants if passes(name)]
    times = time_in_turn(timer, {name: calls[name] for name in running}, seconds) if running else {}
    # what is right when it runs alone may be wrong behind itself
    for name in running:
        if entrants[name].must_match and not passes(name, calls[name]):
            told[name]["failed"] += ", after it was timed"
            del times[name]
    return {name: (times.get(name), about) for name, about in told.items()}


def reason(fault: BaseException) -> str:
    """A failure as one line."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return (text if isinstance(fault, SchedulesError) else f"{type(fault).__name__}: {text}")[:300]


class Results:
    """The results of one device and one set of versions in a JSON file, written anew after every case.

    `kind` is of KINDS.  A case is what one operator's problem took when computed in one arithmetic and launched one way
    (STREAM or GRAPH); `launch` is that of this run.  Raises UsageError if the file holds another kind, or results of
    another device or other versions, unless `fresh`.
    """

    def __init__(
        self,
        file: Path,
        device: str,
        versions: Mapping[str, str],
        *,
        kind: str = "softmax",
        launch: str = STREAM,
        fresh: bool = False,
    ) -> None:
        self.file = file
        self._launch = launch
        self._head: dict[str, Any] = {"schema": SCHEMA, "kind": kind, "device": device, "versions": dict(versions)}
        self.cases: list[dict[str, Any]] = []
        if fresh or not file.exists():
            return
        old = read_results(file)
        for key in ("kind", "device", "versions"):
            if old[key] != self._head[key]:
                raise UsageError(f"{file} holds results of other {key}; pass --fresh to replace them, or another --out")
        self._head = {name: value for name, value in old.items() if name not in ("cases", "date")}
        self.cases = old["cases"]

    def __contains__(self, problem: object) -> bool:
        """Whether `problem` has been compared, launched as this run does, and ours was right."""
        if not isinstance(problem, Problem):
            return False
        return self.has(problem)

    def has(self, problem: Problem, arithmetic: Arithmetic = FLOAT32) -> bool:
        """The same, ours computed in `arithmetic`."""
        wanted = identity(head_of(problem, self._launch, arithmetic))
        return wanted in {identity(case) for case in self.cases if "us" in case["ours"]}

    def put(self, case: dict[str, Any]) -> None:
        """Add or replace a case, and write the file.  Raises UsageError if that cannot be done."""
        self.cases = [*(other for other in self.cases if identity(other) != identity(case)), case]
        self._write()

    def note(self, **facts: Any) -> None:
        """Keep `facts` in the head of the file, in place of older ones of their names.  Raises as `put` does."""
        self._head |= facts
        self._write()

    def _write(self) -> None:
        text = json.dumps({**self._head, "date": now(), "cases": self.cases}, indent=1)
        new = self.file.with_name(self.file.name + ".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text + "\n")
            os.replace(new, self.file)
        except OSError as error:
            raise UsageError(f"cannot write {self.file}: {error.strerror}; choose another --out") from error


def identity(case: Mapping[str, Any]) -> str:
    """What no two cases of a file share: operator, problem, how it was launched, and in what ours was computed."""
    return json.dumps([case["operator"], case["problem"], case["launch"], arithmetic_of(case)], sort_keys=True)


def head_of(problem: Problem, launch: str, arithmetic: Arithmetic = FLOAT32) -> dict[str, Any]:
    """What every case begins with; an arithmetic that is not the usual one is named."""
    named = {} if arithmetic == FLOAT32 else {"arithmetic": arithmetic.name}
    return {
        "operator": operator_of(problem).name,
        "problem": problem.to_json(),
        "launch": launch,
        "bytes": problem.min_bytes,
        **named,
        "date": now(),
    }


def compare_all(
    problems: Iterable[P],
    run: Callable[[P], dict[str, Any]],
    results: Results,
    tell: Callable[[dict[str, Any]], None] = lambda case: None,
) -> None:
    """Run every case and keep it at once, with the seconds it took.  Raises what `run` raises; what was kept before
    stays."""
    for problem in problems:
        start = time.perf_counter()
        case = run(problem)
        case["seconds"] = round(time.perf_counter() - start, 2)
        results.put(case)
        tell(case)
