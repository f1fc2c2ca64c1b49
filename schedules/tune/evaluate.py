"""What happens to a candidate in a worker process: it is built, compared with the reference, and timed.

Every function here takes and returns plain data, and reports a candidate's fault as a `Failure`.  What is no
candidate's fault (no compiler, no device) is raised.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.errors import BuildError, ConfigError, DeviceError, SchedulesError, ToolchainError, UsageError
from schedules.core.machine import complaint
from schedules.core.operator import Array, Expected
from schedules.core.problem import Problem
from schedules.core.process import SCRATCH
from schedules.core.registry import operator_of
from schedules.measure.contest import Contest, hold
from schedules.measure.neighbours import ahead_of_others, others_running
from schedules.tune.strategy import Candidate

if TYPE_CHECKING:
    from schedules.check.device_judge import DeviceJudge

ABANDON = 1.5  # a candidate this many times slower than the best is not measured further
PRECISION = 0.005  # half the 95% confidence interval of a trial's median, aimed at
SECONDS = 0.25  # of one trial's timing at most
SHARED_BYTES = 2**30  # of a problem's tensors: what is larger is not written to a file for other processes
SPREAD = 3.0  # of a trial's 90th percentile over its 10th: what is more is noise, and measured once more
TURN = 0.1  # seconds of a finalist's calls in a round, at most, if it is more than one call
LONGEST = 120.0  # seconds of finals, however slow the finalists are


@dataclass(frozen=True)
class Failure:
    """Why a candidate came to nothing; `outcome` is one of `records.OUTCOMES`."""

    outcome: str
    reason: str
    error: float | None = None
    fatal: bool = False  # the process that found it must not be used again
    suspect: str = ""  # why the machine may be at fault, if something says so


@dataclass(frozen=True)
class Artifact:
    """A built candidate: the library's bytes, and what is known about it before it runs."""

    library: bytes
    program: str
    compiler: str
    registers: int
    spilled: int
    seconds: float
    arithmetic: Arithmetic = FLOAT32  # that its results are held to


@dataclass(frozen=True)
class Timing:
    """Microseconds of a correct candidate; `error` in units of the tolerance; `verified` names what it was run on."""

    median_us: float
    p10_us: float
    p90_us: float
    runs: int
    error: float
    verified: tuple[str, ...]
    seconds: float = 0.0  # that it kept the device, with loading and verification
    busy: float = 0.0  # threads that other processes ran or wanted to run meanwhile, for each core

    @property
    def spread(self) -> float:
        return self.p90_us / self.p10_us


def build_candidate(problem: Problem, arch: Arch, candidate: Candidate) -> Artifact | Failure:
    """Build `candidate` into a library.  Raises ToolchainError."""
    from schedules.build.builder import build
    from schedules.build.toolchain.link import write_library

    start = time.perf_counter()
    try:
        built = build(problem, arch, candidate.schedule, candidate.config)
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernel.so"
            write_library(built.module, library)
            content = library.read_bytes()
    except ToolchainError:
        raise
    except ConfigError as error:
        return Failure("constraints", line_of(error))
    except Exception as error:  # TVM raises many types while it schedules; ScheduleError is one
        text = line_of(error) if isinstance(error, BuildError) else f"{type(error).__name__}: {line_of(error)}"
        return Failure("compile", text, fatal=isinstance(error, MemoryError), suspect=complaint(error))
    used = built.resources
    return Artifact(
        content,
        built.program,
        built.compiler,
        max((kernel.registers for kernel in used), default=0),
        sum(kernel.spilled for kernel in used),
        time.perf_counter() - start,
        built.schedule.arithmetic_of(problem, built.config),
    )


def describe_device(arch: Arch) -> tuple[str, dict[str, str]]:
    """The name of this process's device, and the versions that a result on it depends on.

    Raises UsageError if there is none, ToolchainError if nothing can be built for it.
    """
    from schedules.build.builder import compiler_of
    from schedules.build.present import device_name
    from schedules.measure.records import environment

    name = device_name(arch)
    if name is None:
        raise UsageError(f"no device for {arch} here; use --target llvm, or a machine that has one")
    return name, environment(arch, compiler_of(arch))


def locate_device(arch: Arch) -> tuple[str, dict[str, str], str]:
    """What `describe_device` says, and where the device is: a GPU's place on the PCI bus, "" for the CPU.

    Raises what `describe_device` does.
    """
    name, versions = describe_device(arch)
    if arch.kind != "cuda":
        return name, versions, ""
    from cuda.bindings import runtime

    status, place = runtime.cudaDeviceGetPCIBusId(32, 0)
    return name, versions, place.split(b"\0")[0].decode() if status == runtime.cudaError_t.cudaSuccess else ""


def describe_builder(arch: Arch) -> tuple[str, dict[str, str]]:
    """The versions that a build here depends on, and for the CPU it is built on that CPU's name, otherwise "".

    Raises ToolchainError if nothing can be built for `arch`.
    """
    from schedules.build.builder import compiler_of
    from schedules.build.present import device_name
    from schedules.measure.records import environment

    name = device_name(arch) if arch.kind == "llvm" else None
    return name or "", environment(arch, compiler_of(arch))


def warm_up(arch: Arch) -> None:
    """Import what a build needs, and find the compiler.  Raises ToolchainError."""
    from schedules.build.builder import compiler_of

    compiler_of(arch)


def precompute(problem: Problem, arch: Arch, seed: int) -> None:
    """Compute data and reference for the workers that share this one's scratch folder."""
    _reference(problem, seed)


def prepare(problem: Problem, arch: Arch, seed: int) -> float:
    """Bring data and reference to the device, so that the next measurement need not; returns the seconds it took."""
    start = time.perf_counter()
    _bench(problem, arch, seed)
    return time.perf_counter() - start


def prove_device(problem: Problem, arch: Arch, seed: int) -> None:
    """Have the device write the outputs and give them back.  Raises DeviceError if they come back otherwise."""
    _bench(problem, arch, seed).prove()


def measure_candidate(problem: Problem, arch: Arch, artifact: Artifact, seed: int, best_us: float) -> Timing | Failure:
    """Run once on poisoned outputs and compare, then time.  One much slower than `best_us` is timed only briefly, one
    whose times are noise twice."""
    start = time.perf_counter()
    try:
        bench = _bench(problem, arch, seed)
        function = _load(artifact, arch)
        failure, error = bench.check(function, artifact.arithmetic)
        if failure:
            return failure
        busy = _others(arch)
        found = _timed(bench, function, error, best_us)
        if found.spread > SPREAD and found.p10_us <= ABANDON * best_us:
            found = min(found, _timed(bench, function, error, best_us), key=lambda timing: timing.spread)
    except Exception as fault:  # whatever the runtime raises, this candidate caused it
        return _fault(fault)
    return replace(found, seconds=time.perf_counter() - start, busy=(busy + _others(arch)) / 2)


def confirm_candidate(
    problem: Problem, arch: Arch, artifact: Artifact, seeds: Sequence[int], odd: tuple[Problem, Artifact] | None
) -> tuple[str, ...] | Failure:
    """Compare a new best again, on other data and on an odd shape if it takes one; returns what it was compared on."""
    passed = []
    try:
        for seed in seeds:
            failure, _ = _bench(problem, arch, seed).check(_load(artifact, arch), artifact.arithmetic)
            if failure:
                return failure
            passed.append(f"seed {seed}")
        if odd:
            failure, _ = Bench(odd[0], arch, seeds[0]).check(_load(odd[1], arch), odd[1].arithmetic)
            if failure:
                return Failure(failure.outcome, f"on {odd[0]}: {failure.reason}", failure.error, failure.fatal)
            passed.append(str(odd[0]))
    except Exception as fault:
        return _fault(fault)
    return tuple(passed)


@dataclass(frozen=True)
class Rounds:
    """A contest; the threads of other processes that ran meanwhile, for each core; whether its calls went ahead of
    them."""

    contest: Contest
    busy: float
    ahead: bool


def measure_in_turn(
    problem: Problem,
    arch: Arch,
    artifacts: Sequence[Artifact],
    seed: int,
    holder: int,
    kept: Sequence[int],
    seconds: float,
) -> Rounds | Failure:
    """A contest of the artifacts (`measure.contest.hold`)."""
    try:
        bench = _bench(problem, arch, seed)
        functions = [_load(artifact, arch) for artifact in artifacts]
        for function, artifact in zip(functions, artifacts, strict=True):
            failure, _ = bench.check(function, artifact.arithmetic)
            if failure:
                return failure
        timer = _timer(arch)
        runs = [lambda call=function: call(*bench.tensors) for function in functions]
        counts = [_calls_of_a_turn(timer, run) for run in runs]
        busy: list[float] = []

        def turn(index: int) -> list[float]:
            busy.append(_others(arch))
            times: list[float] = timer.times(runs[index], counts[index])
            return times

        found = hold(
            turn,
            len(runs),
            holder=holder,
            kept=kept,
            percentile=timer.percentile,
            seconds=seconds,
            longest=LONGEST,
            seed=seed,
        )
    except Exception as fault:
        return _fault(fault)
    with ahead_of_others() as ahead:
        return Rounds(found, sum(busy) / len(busy), ahead)


def _calls_of_a_turn(timer: Any, run: Callable[[], None]) -> int:
    """As many as fit into a turn, the timer's fewest at most: a call so slow that they do not is known from one."""
    each = timer.times(run, 1)[0] + timer.flush_us
    return max(1, min(timer.fewest, round(TURN * 1e6 / each)))


def _others(arch: Arch) -> float:
    """What other processes run now, in threads for each core, where that disturbs the timing."""
    return 0.0 if arch.is_gpu else others_running()


def _timed(bench: Bench, function: Any, error: float, best_us: float) -> Timing:
    from schedules.measure.timer import timed_until

    timer, seed = _timer(bench.arch), bench.seed
    times = timed_until(timer, lambda: function(*bench.tensors), SECONDS, PRECISION, ABANDON * best_us)
    return _timing(times, error, (f"seed {seed}",))


class Bench:
    """The data of one problem and seed on the device, and the reference to compare with."""

    def __init__(self, problem: Problem, arch: Arch, seed: int) -> None:
        from schedules.build.present import to_device
        from schedules.check.verify import outputs_of, poisoned

        self.problem, self.arch, self.seed = problem, arch, seed
        self.inputs, self.expected = _reference(problem, seed)
        self.tensors: list[Any] = [to_device(array, arch) for array in (*self.inputs, *poisoned(problem))]
        self._judges: dict[Arithmetic, DeviceJudge] = {}
        if arch.kind == "cuda":
            self._judge_of(FLOAT32)  # what nearly every candidate needs, before the first is timed
        self._outputs = self.tensors[-len(outputs_of(problem)) :]

    def check(self, function: Any, arithmetic: Arithmetic = FLOAT32) -> tuple[Failure | None, float]:
        """Run `function` on the inputs and poisoned outputs; the failure if it is wrong by what `arithmetic` allows,
        and the worst error.

        What goes wrong on data that an earlier candidate has written to is run once more on good data.
        """
        for _ in range(2):
            self._poison()
            function(*self.tensors)
            error, detail = self._judged(arithmetic)
            if error <= 1:
                return None, error
            damaged = any(
                tensor.numpy().tobytes() != array.tobytes()
                for tensor, array in zip(self.tensors, self.inputs, strict=False)
            )
            self._restore()
            if not damaged:
                break
        return Failure("correctness", detail, error), error

    def prove(self) -> None:
        """Raises DeviceError if the outputs are not what was written to them."""
        self._poison()
        for tensor in self._outputs:
            if (np.frombuffer(tensor.numpy().tobytes(), np.uint8) != 0xFF).any():
                raise DeviceError("the device does not hold what is written to it")

    def _judge_of(self, arithmetic: Arithmetic) -> DeviceJudge:
        from schedules.check.device_judge import DeviceJudge

        if arithmetic not in self._judges:
            self._judges[arithmetic] = DeviceJudge(self.problem, self.arch, self.expected, arithmetic)
        return self._judges[arithmetic]

    def _judged(self, arithmetic: Arithmetic) -> tuple[float, str]:
        """The worst error of the outputs, and where it is if that is over 1."""
        from schedules.check.verify import judge

        if self.arch.kind == "cuda" and (error := self._judge_of(arithmetic).error(self._outputs)) <= 1:
            return error, ""
        outputs = [tensor.numpy() for tensor in self._outputs]
        difference = judge(self.problem, self.inputs, outputs, self.expected, arithmetic)
        return difference.error, str(difference)

    def _restore(self) -> None:
        """Bring inputs and reference to the device again: a kernel that went wrong may have written anywhere."""
        for tensor, array in zip(self.tensors, self.inputs, strict=False):
            tensor.copyfrom(array)
        for known in self._judges.values():
            known.restore()

    def _poison(self) -> None:
        from schedules.check.verify import outputs_of, poisoned
        from schedules.measure.timer import poison_cuda

        if self.arch.kind == "cuda":
            for tensor, argument in zip(self._outputs, outputs_of(self.problem), strict=True):
                poison_cuda(tensor.data_ptr(), argument.nbytes)
        else:
            for tensor, array in zip(self._outputs, poisoned(self.problem), strict=True):
                tensor.copyfrom(array)


def _reference(problem: Problem, seed: int) -> tuple[Sequence[Array], Sequence[Expected]]:
    """Inputs and reference, computed by the first of the workers that share a scratch folder; the others read them.

    What is too large for that, or finds no room, each computes for itself.
    """
    op = operator_of(problem)

    def compute() -> tuple[Sequence[Array], Sequence[Expected]]:
        inputs = op.inputs(problem, np.random.default_rng(seed))
        return inputs, op.reference(problem, inputs)

    folder = os.environ.get(SCRATCH)
    if folder is None or sum(argument.nbytes for argument in problem.arguments()) > SHARED_BYTES:
        return compute()
    name = hashlib.sha256(f"{op.name} {problem} {seed}".encode()).hexdigest()[:16]
    file = Path(folder) / f"reference-{name}"
    try:
        with open(file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the kernel if this process dies
            if file.exists():
                with open(file, "rb") as stored:
                    found: tuple[Sequence[Array], Sequence[Expected]] = pickle.load(stored)
                return found
            found = compute()
            with open(file.with_suffix(".new"), "wb") as new:
                pickle.dump(found, new, protocol=5)
            os.replace(file.with_suffix(".new"), file)
            return found
    except OSError:
        return compute()


@lru_cache(maxsize=2)  # the search's data, and the other data that new bests are confirmed on
def _bench(problem: Problem, arch: Arch, seed: int) -> Bench:
    return Bench(problem, arch, seed)


@lru_cache(maxsize=1)
def _timer(arch: Arch) -> Any:
    from schedules.measure.timer import timer_of

    return timer_of(arch)


def _load(artifact: Artifact, arch: Arch) -> Any:
    from schedules.build.library import load_library

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        library.write_bytes(artifact.library)
        return load_library(library, arch)


def _timing(times: Sequence[float], error: float, verified: tuple[str, ...]) -> Timing:
    p10, median, p90 = (float(value) for value in np.percentile(times, (10, 50, 90)))
    return Timing(median, p10, p90, len(times), error, verified)


def _fault(error: Exception) -> Failure:
    """A failed run.  Memory that ran out leaves the process as it was; after anything else it is not to be trusted."""
    if isinstance(error, ToolchainError):
        raise error
    text = line_of(error) if isinstance(error, SchedulesError) else f"{type(error).__name__}: {line_of(error)}"
    return Failure("runtime", text, fatal=True, suspect=complaint(error))


def line_of(error: BaseException) -> str:
    """The telling line of a message, not too long for a journal."""
    from schedules.build.builder import telling_line

    return telling_line(error)[:300]
