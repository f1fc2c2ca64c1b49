"""Our softmax beside its peers, on one GPU, in one run: what is compared, how it is timed, and what is kept.

Everything of one case is timed in turn, in rounds, so that what changes on the device (clocks, temperature) meets all
alike.  A result is written after every case; a run that was cut off goes on with what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedules.errors import SchedulesError, UsageError
from schedules.measure import Timer, uncertainty
from schedules.peers.softmax import Call
from schedules.records import now
from schedules.softmax.definition import FUNCTIONS, SoftmaxProblem

SCHEMA = 1
ROWS = 49152
WIDTHS = (32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768)
ODD_WIDTHS = (100, 1000, 1023, 50257)
FEW_ROWS, LONG_ROWS = (1, 8, 132), (65536, 262144, 1048576)
SCALE, MASK, KEEP = 0.125, "full", 0.9  # of what is fused
SETS = ("widths", "odd", "few", "fused")

ROUNDS = (3, 9)  # at least and at most
IN_A_ROUND = (3, 40)  # calls of one function, at least and at most
PRECISION = 0.005  # half the 95% confidence interval of each median, aimed at
DISTINCT_ELEMENTS = 2**21
FEWEST_DISTINCT = 13  # rows


def cases(
    sets: Sequence[str], widths: Sequence[int], functions: Sequence[str], dtype: str, rows: int = ROWS
) -> list[SoftmaxProblem]:
    """The problems of `sets` (of SETS), each once, narrow ones first; "fused" is softmax and its gradient with scale,
    mask (forward only) and dropout.

    Raises UsageError (ProblemError for a dtype or extent that no softmax takes).
    """
    if unknown := [name for name in sets if name not in SETS]:
        raise UsageError(f"unknown set {unknown[0]!r}; use {', '.join(SETS)}")
    if unknown := [name for name in functions if name not in FUNCTIONS]:
        raise UsageError(f"unknown function {unknown[0]!r}; use {', '.join(FUNCTIONS)}")

    def plain(shapes: Iterable[tuple[int, int]]) -> Iterator[SoftmaxProblem]:
        return (SoftmaxProblem(r, c, function, dtype) for r, c in shapes for function in functions)

    found: list[SoftmaxProblem] = []
    for name in SETS:
        if name not in sets:
            continue
        if name == "few":
            found += plain((r, c) for c in LONG_ROWS for r in FEW_ROWS)
        elif name == "fused":
            for cols in widths:
                if "softmax" in functions:
                    found.append(SoftmaxProblem(rows, cols, "softmax", dtype, SCALE, MASK, KEEP))
                if "softmax_grad" in functions:
                    found.append(SoftmaxProblem(rows, cols, "softmax_grad", dtype, SCALE, "none", KEEP))
        else:
            found += plain((rows, c) for c in (widths if name == "widths" else ODD_WIDTHS))
    return list(dict.fromkeys(found))


def name_of(problem: SoftmaxProblem) -> str:
    """A short name that no other case has; also that of its bundle's folder."""
    p = problem
    steps = [f"scale{p.scale:g}"] * (p.scale != 1) + [f"mask-{p.mask}"] * (p.mask != "none")
    steps += [f"keep{p.keep:g}"] * p.has_dropout
    return "-".join([p.function, f"{p.rows}x{p.cols}", p.dtype, *steps])


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: the median of the rounds' medians, and the 10th and 90th percentile of all `runs`."""

    us: float
    p10_us: float
    p90_us: float
    runs: int

    def to_json(self, nbytes: int) -> dict[str, Any]:
        """With the rate at which `nbytes` were moved."""
        values = {"us": self.us, "p10_us": self.p10_us, "p90_us": self.p90_us}
        rounded = {name: round(value, 3) for name, value in values.items()}
        return {**rounded, "runs": self.runs, "gbytes_per_s": round(nbytes / self.us / 1e3, 1)}


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

    What computes something else than the reference is not timed if `must_match`, else timed and its error kept.
    """

    make: Callable[[], Call]
    about: Mapping[str, Any]
    must_match: bool = False
    judged: bool = True  # against the reference; a copy is not


def compare(
    entrants: Mapping[str, Entrant],
    timer: Timer,
    judge: Callable[[Sequence[Any]], float],
    poison: Callable[[], None],
    seconds: float,
) -> dict[str, tuple[Times | None, dict[str, Any]]]:
    """Run each of `entrants` once on poisoned outputs, judge it, and time those that run in turn.

    `judge` gives the error of outputs in units of the tolerance.  For each its times (None if it failed) and what is
    known of it: `about`, `error`, or `failed` with the reason in a line.
    """
    calls: dict[str, Call] = {}
    told: dict[str, dict[str, Any]] = {}
    for name, entrant in entrants.items():
        about = told[name] = dict(entrant.about)
        try:
            call = entrant.make()
            poison()
            outputs = call()
            error = judge(outputs) if entrant.judged else 0.0
        except Exception as fault:  # other libraries raise many types; theirs must not end the comparison
            about["failed"] = reason(fault)
            continue
        if entrant.judged:
            about["error"] = round(error, 4) if np.isfinite(error) else "infinite"
        if entrant.must_match and not error <= 1:
            about["failed"] = f"wrong: {error:.3g} times the tolerance"
            continue
        calls[name] = call
    times = time_in_turn(timer, calls, seconds) if calls else {}
    return {name: (times.get(name), about) for name, about in told.items()}


def reason(fault: BaseException) -> str:
    """A failure as one line."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return (text if isinstance(fault, SchedulesError) else f"{type(fault).__name__}: {text}")[:300]


def case_result(problem: SoftmaxProblem, found: Mapping[str, tuple[Times | None, dict[str, Any]]]) -> dict[str, Any]:
    """One case as plain data.  Names in `found`: "ours", "copy:<name>", "peer:<name>".

    `bytes` are the problem's tensors, each once: an input read and an output written for a function alone, two inputs
    read and an output written for a gradient.  `of_copy` is a rate as a share of that of PyTorch's copy.
    """
    copied = 2 * problem.arguments()[0].nbytes
    copies: dict[str, Any] = {}
    peers: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for name, (times, about) in found.items():
        kind, _, label = name.partition(":")
        words = {**about, **(times.to_json(copied if kind == "copy" else problem.min_bytes) if times else {})}
        if kind == "ours":
            ours = words
        else:
            (copies if kind == "copy" else peers)[label] = words
    if rate := copies.get("torch", {}).get("gbytes_per_s"):
        for words in (ours, *peers.values()):
            if "gbytes_per_s" in words:
                words["of_copy"] = round(words["gbytes_per_s"] / rate, 4)
    return {
        "problem": problem.words(),
        "bytes": problem.min_bytes,
        "copy_bytes": copied,
        "date": now(),
        "ours": ours,
        "copies": copies,
        "peers": peers,
    }


class Results:
    """The results of one device and one set of versions in a JSON file, written anew after every case.

    Raises UsageError if the file holds those of another device or other versions, unless `fresh`.
    """

    def __init__(self, file: Path, device: str, versions: Mapping[str, str], *, fresh: bool = False) -> None:
        self.file = file
        self._head = {"schema": SCHEMA, "device": device, "versions": dict(versions)}
        self.cases: list[dict[str, Any]] = []
        if fresh or not file.exists():
            return
        old = read_results(file)
        for key in ("device", "versions"):
            if old[key] != self._head[key]:
                raise UsageError(f"{file} holds results of other {key}; pass --fresh to replace them, or another --out")
        self.cases = old["cases"]

    def __contains__(self, problem: object) -> bool:
        """Whether `problem` has been compared, and ours was right."""
        done = [case["problem"] for case in self.cases if "us" in case["ours"]]
        return isinstance(problem, SoftmaxProblem) and problem.words() in done

    def put(self, case: dict[str, Any]) -> None:
        """Add or replace a case, and write the file.  Raises UsageError if that cannot be done."""
        others = [other for other in self.cases if other["problem"] != case["problem"]]
        self.cases = [*others, case]
        text = json.dumps({**self._head, "date": now(), "cases": self.cases}, indent=1)
        new = self.file.with_name(self.file.name + ".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text + "\n")
            os.replace(new, self.file)
        except OSError as error:
            raise UsageError(f"cannot write {self.file}: {error.strerror}; choose another --out") from error


def read_results(file: str | Path) -> dict[str, Any]:
    """The content of a results file.  Raises UsageError if it is none."""
    try:
        found = json.loads(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"{file} is not JSON; give a file that scripts/compare_softmax.py wrote") from None
    wanted = {"device", "versions", "cases"}
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not wanted <= found.keys():
        raise UsageError(
            f"{file} is not a comparison of schema {SCHEMA}; give one that scripts/compare_softmax.py wrote"
        )
    return found


def compare_all(
    problems: Iterable[SoftmaxProblem],
    run: Callable[[SoftmaxProblem], dict[str, Any]],
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


def line_of(case: Mapping[str, Any]) -> str:
    """A case in a line, for people who watch."""
    p, ours = case["problem"], case["ours"]
    shape = f"{p['rows']}x{p['cols']}"
    fused = " fused" if (p["scale"], p["mask"], p["keep"]) != (1.0, "none", 1.0) else ""
    name = f"{p['function'] + fused:22} {shape:14} {p['dtype']:8}"
    if "us" in ours:
        what = (
            f"{ours['us']:9.2f} us {ours['gbytes_per_s']:6.0f} GB/s {ours.get('of_copy', float('nan')):6.1%} of a copy"
        )
        what += f"  {ours['schedule']} ({ours['chosen']})"
    else:
        what = f"FAILED: {ours.get('failed', 'not run')}"
    others = "  ".join(
        f"{peer} {words['gbytes_per_s']:.0f}" if "gbytes_per_s" in words else f"{peer} -"
        for peer, words in [("copy", case["copies"].get("torch", {})), *case["peers"].items()]
    )
    return f"{name} {what}  {others}"
