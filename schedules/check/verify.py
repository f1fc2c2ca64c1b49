"""Verification: what was built computes what its definition says.

Routes, from the truest to the most portable:

device    the built function on the device it was built for
emulated  the generated CUDA C++, or LLVM IR for AMD GPUs, run on the CPU by `emulate`: barriers, indices, instructions
serial    the scheduled program with its threads as loops, run by LLVM: tiling, predicates, layouts

Inputs are fresh and random, outputs poisoned with NaN before each run.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from schedules.build.builder import Built, build, build_scheduled
from schedules.build.present import device_name, to_device
from schedules.build.toolchain.link import write_library
from schedules.check.emulate.emulator import EmulationMode, Emulator
from schedules.check.emulate.serial import serialize
from schedules.check.emulate.toolchain import find_cxx
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.errors import EmulationError, ToolchainError, UnknownNameError, UsageError
from schedules.core.memory import require_memory
from schedules.core.operator import Array, Expected, ScheduleSpec
from schedules.core.problem import Argument, Config, Problem, numpy_dtype
from schedules.core.registry import operator_of
from schedules.core.tolerance import Difference, compare
from schedules.definitions.program import of_shapes
from schedules.predict.start import started
from schedules.steps.intrinsics import as_described

Run = Callable[[Sequence[Array]], list[Array]]  # inputs and poisoned outputs -> the outputs
ROUTES = ("device", "emulated", "serial")
# Each mode hides what another shows: late copies miss a wait, early ones overwrite what is still read.
MODES = (
    EmulationMode(copies="late", order="forward"),
    EmulationMode(copies="early", order="reverse"),
    EmulationMode(copies="late", order="strided"),
)
# What the CPU can stand in for a GPU in reasonable time; larger problems are verified on a smaller one of their kind
EMULATED_FLOPS = 2**26
SERIAL_FLOPS = 2**29
UNOPTIMIZED_FLOPS = 2**24  # up to which code runs for less time than it takes to optimise


@dataclass(frozen=True)
class Check:
    """One run compared with the reference.  `error` is the worst element's, in units of the tolerance."""

    route: str
    problem: Problem
    seed: int
    error: float
    passed: bool
    detail: str
    seconds: float


def verify(
    problem: Problem,
    arch: Arch,
    schedule: str | None = None,
    config: Config | dict[str, Any] | None = None,
    *,
    routes: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
) -> list[Check]:
    """Build `problem` and compare it with the reference by each of `routes`, once for each seed.

    By default: the device if there is one for `arch`, else every route that this machine has and the schedule takes.
    What is built for a range of extents is compared at its ends and between, by one build.
    On the CPU routes a problem too large for them is replaced by a smaller one of its kind, with the same config; the
    checks say which.  Raises what `build` raises, and UsageError for a route that cannot be taken here.
    """
    spec, concrete = started(problem, arch, schedule, config)
    chosen = list(routes) if routes is not None else default_routes(arch, spec)
    checks = []
    for route in chosen:
        if route not in ROUTES:
            raise UnknownNameError("route", route, ROUTES)
        if route in spec.no_routes:
            raise UsageError(f"schedule {spec.name} has no route {route}: {spec.no_routes[route]}")
        target = problem if route == "device" else reduced(problem, arch, concrete, route)
        runs = list(RUNNERS[route](target, arch, spec.name, concrete))
        checks += [
            check
            for instance in target.instances()
            for seed in seeds
            for check in _checks(instance, runs, seed, spec.arithmetic_of(problem, concrete))
        ]
    return checks


def verify_function(
    problem: Problem,
    arch: Arch,
    function: Callable[..., None],
    seeds: Sequence[int] = (0,),
    schedule: str | None = None,
    config: Config | None = None,
) -> list[Check]:
    """Compare a function that takes the problem's tensors on the device of `arch` (a loaded bundle) with the
    reference, within the tolerance of the `schedule` and `config` that it was built with."""
    spec = operator_of(problem).schedule(schedule) if schedule else None
    arithmetic = (spec.arithmetic_of(problem, config) if config else spec.arithmetic) if spec else FLOAT32
    runs = [("device", on_device(function, problem, arch))]
    instances = problem.instances()
    return [check for each in instances for seed in seeds for check in _checks(each, runs, seed, arithmetic)]


def on_device(function: Callable[..., None], problem: Problem, arch: Arch) -> Run:
    """`function` with its arrays copied to the device of `arch`, and its outputs copied back."""

    def run(arrays: Sequence[Array]) -> list[Array]:
        tensors = [to_device(array, arch) for array in arrays]
        function(*tensors)
        return [tensor.numpy() for tensor in tensors[-len(outputs_of(problem)) :]]

    return run


def default_routes(arch: Arch, spec: ScheduleSpec) -> list[str]:
    """The routes to take for a schedule here.  Raises UsageError if there are none."""
    if device_name(arch) is not None:
        return ["device"]
    routes = ["serial"]
    if arch.is_gpu and emulator_available():
        routes.append("emulated")
    taken = [route for route in routes if route not in spec.no_routes]
    if not taken:
        reason = "; ".join(f"{route}: {reason}" for route, reason in spec.no_routes.items())
        raise UsageError(f"schedule {spec.name} can be verified on a device only ({reason})")
    return taken


@lru_cache
def emulator_available() -> bool:
    """Whether a C++ compiler is here to build the emulator with."""
    try:
        find_cxx()
    except ToolchainError:
        return False
    return True


def reduced(problem: Problem, arch: Arch, config: Config, route: str) -> Problem:
    """`problem`, or the largest of its smaller versions that the route can run and the config allows."""
    limit = EMULATED_FLOPS if route == "emulated" else SERIAL_FLOPS
    if problem.flops <= limit:
        return problem
    smallest = problem
    for candidate in problem.smaller():
        if config.check(candidate, arch) is None:
            smallest = candidate
            if candidate.flops <= limit:
                break
    return smallest


def _checks(problem: Problem, runs: Sequence[tuple[str, Run]], seed: int, arithmetic: Arithmetic) -> Iterator[Check]:
    """A check of each run on the same data; the reference is computed once, when a run has come to its end."""
    require_memory(problem)
    op, expected = operator_of(problem), None
    inputs = op.inputs(problem, np.random.default_rng(seed))
    for route, run in runs:
        start = time.perf_counter()
        detail, error = "", float("inf")
        try:
            outputs = run([*inputs, *poisoned(problem)])
        except EmulationError as problem_found:
            detail = str(problem_found)
        else:
            expected = expected or op.reference(problem, inputs)
            worst = judge(problem, inputs, outputs, expected, arithmetic)
            detail, error = str(worst), worst.error
        yield Check(route, problem, seed, error, error <= 1, detail, time.perf_counter() - start)


def poisoned(problem: Problem) -> list[Array]:
    """Fresh output arrays, every byte 0xFF: NaN in each float format."""
    arrays = []
    for argument in outputs_of(problem):
        array = np.empty(argument.shape, numpy_dtype(argument.dtype))
        array.view(np.uint8)[...] = 0xFF
        arrays.append(array)
    return arrays


def outputs_of(problem: Problem) -> list[Argument]:
    """The arguments that a function writes."""
    return [argument for argument in problem.arguments() if argument.output]


def judge(
    problem: Problem,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    expected: Sequence[Expected] | None = None,
    arithmetic: Arithmetic = FLOAT32,
) -> Difference:
    """The worst difference between `outputs` and the reference for `inputs`, in units of what `arithmetic` allows."""
    wanted = expected if expected is not None else operator_of(problem).reference(problem, inputs)
    found = [
        compare(output, reference, argument.dtype, arithmetic)
        for output, reference, argument in zip(outputs, wanted, outputs_of(problem), strict=True)
    ]
    return max(found, key=lambda difference: difference.error)


def _on_device(problem: Problem, arch: Arch, schedule: str | None, config: Any) -> Iterator[tuple[str, Run]]:
    if device_name(arch) is None:
        raise UsageError(f"no device for {arch} here; leave out --route device to verify on the CPU")
    yield "device", on_device(build(problem, arch, schedule, config), problem, arch)


def _serial(problem: Problem, arch: Arch, schedule: str | None, config: Any) -> Iterator[tuple[str, Run]]:
    spec, concrete = started(problem, arch, schedule, config)
    host = parse_arch("llvm")
    with as_described():
        scheduled = spec.apply(problem, concrete, arch)
    serialized = serialize(scheduled)

    @lru_cache
    def built(instance: Problem) -> Run:
        # LLVM 22's loop vectoriser reads the wrong elements where the lanes of a warp gather halves (AVX2, AVX-512)
        feature = "plain" if instance.flops > UNOPTIMIZED_FLOPS else "unoptimized"
        plain = replace(host, features=frozenset({feature}))
        mod = serialized
        if instance != problem:  # memory for what all blocks of a GPU have must be a number here
            mod = tvm.IRModule({"main": of_shapes(serialized["main"], instance.arguments())})
        made = build_scheduled(operator_of(instance), instance, spec, concrete, plain, mod)
        return on_device(made, instance, host)

    def run(arrays: Sequence[Array]) -> list[Array]:
        shape = arrays[0].shape
        return built(next(each for each in problem.instances() if each.arguments()[0].shape == shape))(arrays)

    yield "serial", run


def _emulated(problem: Problem, arch: Arch, schedule: str | None, config: Any) -> Iterator[tuple[str, Run]]:
    if not arch.is_gpu:
        raise UsageError(f"the emulator runs GPU code, not {arch}; use --route device")
    built = build(problem, arch, schedule, config, device_code=False)
    yield from emulated_runs(built)


def device_source(built: Built) -> str:
    """What the emulator runs: the generated CUDA C++, or the LLVM IR that AMD's backend is given."""
    return str(built.sources["cu" if built.arch.kind == "cuda" else "ll"])


class _HostCode:
    """The host code of `module` as a file: linked at the first use, and gone with this object."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @cached_property
    def library(self) -> Path:
        folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        write_library(self._module, folder / "kernel.so")
        return folder / "kernel.so"


def emulated_runs(
    built: Built, source: str | None = None, modes: Sequence[EmulationMode] = MODES
) -> Iterator[tuple[str, Run]]:
    """The generated code of `built`, or a mutant of it as `source`, behind its host code, once for each mode."""
    code = source or device_source(built)
    count = len(built.problem.arguments())
    outputs = range(count - len(outputs_of(built.problem)), count)
    host = _HostCode(built.module)

    def run(mode: EmulationMode) -> Run:
        def call(arrays: Sequence[Array]) -> list[Array]:
            kind, wave = built.arch.kind, built.arch.wave
            return emulator().run(host.library, code, list(arrays), list(outputs), mode=mode, kind=kind, wave=wave)

        return call

    for mode in modes:
        yield f"emulated {mode.copies} {mode.order}", run(mode)


@lru_cache
def emulator() -> Emulator:
    """One emulator for the process; its worker starts with the first run."""
    return Emulator()


RUNNERS: dict[str, Callable[..., Iterator[tuple[str, Run]]]] = {
    "device": _on_device,
    "serial": _serial,
    "emulated": _emulated,
}
