"""An operator whose configs go wrong on purpose: y = x + 1, computed in as many ways to fail as a search meets.

Workers find it through SCHEDULES_EXTRA_OPERATORS="faulty=tests.tune.faulty".
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.operator import Array, Expected, Operator, ScheduleSpec
from schedules.core.problem import Argument, Config, Problem

# what each fault must come to
OUTCOMES = {
    "none": "correct",
    "wrong": "correctness",  # one element is off
    "stale": "correctness",  # nothing is written: right only where the right answer already stands
    "partly": "correctness",  # the last elements are not written
    "clobber": "correct",  # right, but the input is written to as well
    "segfault": "runtime",
    "exit": "runtime",
    "memory": "runtime",  # takes all there is
    "spin": "timeout",  # a loop in native code
    "refused": "compile",
    "crash": "compile",  # takes the compiler down
    "slow": "timeout",  # to build
}
GPU_OUTCOMES = {
    "none": "correct",
    "wrong": "correctness",
    "stale": "correctness",
    "partly": "correctness",
    "illegal": "runtime",  # writes far outside: the context is lost
    "spin": "timeout",  # a kernel that never ends
}
POPULATED = 0x8022  # of mmap on Linux: private, anonymous, present at once
SLOW_FIRST = 0.02  # seconds that a build takes at least, so that a kill finds something to interrupt


@dataclass(frozen=True)
class FaultyProblem(Problem):
    n: int
    faults: str = "none"  # joined by "+": what the space holds, beside good configs
    good: int = 200

    @property
    def flops(self) -> int:
        return self.n

    def arguments(self) -> tuple[Argument, ...]:
        return Argument("x", (self.n,), "float32"), Argument("y", (self.n,), "float32", output=True)

    def odd(self) -> Iterator[FaultyProblem]:
        yield replace(self, n=self.n // 2 + 1)


@dataclass(frozen=True)
class FaultyConfig(Config):
    number: int = 0
    fault: str = "none"

    def check(self, problem: FaultyProblem, arch: Arch) -> str | None:
        return None if self.fault in OUTCOMES else f"fault={self.fault} is not known"


def schedule(problem: FaultyProblem, config: FaultyConfig, arch: Arch) -> Any:
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule
    from tvm.script import tirx as T

    time.sleep(SLOW_FIRST)
    if config.fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if config.fault == "slow":
        time.sleep(1000)
    if config.fault == "refused":
        Schedule(te.create_prim_func(definition(problem))).get_sblock("nobody")  # raises ScheduleError
    n = problem.n
    if config.fault in ("none", "wrong"):
        x = te.placeholder((n,), "float32", name="x")
        wrong = 1 if config.fault == "wrong" else 0
        y = te.compute((n,), lambda i: x[i] + te.if_then_else(i == n // 2, 1.0 + wrong, 1.0), name="y")
        sch = Schedule(te.create_prim_func([x, y]))
        if config.number % 2:
            sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 4])[1])
        return sch.mod
    written = {"stale": 0, "partly": n - 3}.get(config.fault, n)
    clobber = config.fault == "clobber"
    size = 1 << 28

    @T.prim_func
    def spin(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")) -> None:
        while T.call_extern("int32", "sched_yield") == 0:
            y[0] = y[0] + 1.0

    @T.prim_func
    def memory(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")) -> None:
        while T.call_extern("int32", "sched_yield") == 0:
            # mapped and filled by the system, where the optimiser does not see that nothing uses it
            T.evaluate(
                T.call_extern(
                    "handle",
                    "memset",
                    T.call_extern("handle", "mmap", T.int64(0), T.int64(size), 3, POPULATED, -1, T.int64(0)),
                    1,
                    T.int64(8),
                )
            )

    @T.prim_func
    def segfault(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")) -> None:
        T.evaluate(T.call_extern("handle", "memset", T.int64(8), 1, T.int64(8)))

    @T.prim_func
    def leave(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")) -> None:
        T.evaluate(T.call_extern("int32", "_exit", 3))

    @T.prim_func
    def copy(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")) -> None:
        for i in range(written):
            y[i] = x[i] + T.float32(1)
        if clobber:
            x[0] = T.float32(1e9)

    functions = {"spin": spin, "memory": memory, "segfault": segfault, "exit": leave}
    return tvm.IRModule({"main": functions.get(config.fault, copy).with_attr("global_symbol", "main")})


@dataclass(frozen=True)
class FaultyGpuConfig(FaultyConfig):
    """The faults a kernel can have."""

    def check(self, problem: FaultyProblem, arch: Arch) -> str | None:
        return None if self.fault in GPU_OUTCOMES else f"fault={self.fault} is not known"


def gpu_schedule(problem: FaultyProblem, config: FaultyGpuConfig, arch: Arch) -> Any:
    import tvm
    from tvm.script import tirx as T

    n, threads = problem.n, 64
    blocks = -(-n // threads)
    spin, far = config.fault == "spin", (1 << 40) if config.fault == "illegal" else 0
    limit = {"stale": 0, "partly": n - 3}.get(config.fault, n)
    more = 2.0 if config.fault == "wrong" else 1.0

    @T.prim_func
    def main(x: T.Buffer((n,), "float32"), y: T.Buffer((n,), "float32")) -> None:
        T.func_attr({"global_symbol": "main"})
        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for thread in T.thread_binding(threads, thread="threadIdx.x"):
                if block * threads + thread < limit:
                    y[T.int64(block * threads + thread) + T.int64(far)] = x[block * threads + thread] + T.float32(more)
                    while T.bool(spin) and x[block * threads + thread] < T.float32(1e30):
                        y[block * threads + thread] = y[block * threads + thread] + T.float32(1)

    return tvm.IRModule({"main": main})


def space(problem: FaultyProblem, arch: Arch) -> Iterator[FaultyConfig]:
    for number in range(problem.good):
        yield FaultyConfig(number)
    for fault in problem.faults.split("+"):
        yield FaultyConfig(1000, fault)


def definition(problem: FaultyProblem) -> Sequence[Any]:
    from tvm import te

    x = te.placeholder((problem.n,), "float32", name="x")
    return [x, te.compute((problem.n,), lambda i: x[i] + 1.0, name="y")]


def reference(problem: FaultyProblem, inputs: Sequence[Array]) -> Sequence[Expected]:
    values = inputs[0].astype(np.float64) + 1
    return [Expected(values, np.abs(values))]


OPERATOR = Operator(
    name="faulty",
    summary="y = x + 1, or not",
    problem=FaultyProblem,
    definition=definition,
    reference=reference,
    inputs=lambda problem, random: [random.standard_normal(problem.n).astype(np.float32)],
    schedules=(
        ScheduleSpec("cpu", "", ("llvm",), FaultyConfig, schedule, lambda problem, arch: FaultyConfig(), space),
        ScheduleSpec(
            name="gpu",
            summary="",
            kinds=("cuda",),
            config=FaultyGpuConfig,
            apply=gpu_schedule,
            default=lambda problem, arch: FaultyGpuConfig(),
            space=lambda problem, arch: iter(()),
        ),
    ),
    choose=lambda problem, arch: "gpu" if arch.is_gpu else "cpu",
)
