"""Our CPU kernels beside PyTorch's on the same cores: the cases, and one of them run.

A results file of kind "cpu"; see `comparison`.  Both sides run on PyTorch's threads.  Each is timed alone, and between
PyTorch's operators: right after a torch.relu of the output, as in a network.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.peers import convolution, convolution_case, softmax, softmax_case
from benchmarks.peers.bench import Bench
from benchmarks.peers.comparison import STREAM, Call, Entrant, Times, compare, head_of, time_in_turn
from benchmarks.peers.cudnn import torch_module
from schedules.build.builder import compiler_of
from schedules.core.arch import Arch
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.problem import Conv2dProblem, Problem
from schedules.core.registry import operator_of
from schedules.measure.choice import Choice
from schedules.measure.records import environment
from schedules.measure.timer import CpuTimer
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem

KIND = "cpu"
BATCHES = (1, 16)
# (pixels of a side, input channels, output channels, kernel, stride): ResNet-50's, and one of few channels
LAYERS = (
    (224, 3, 64, 7, 2),
    (56, 64, 64, 3, 1),
    (56, 64, 256, 1, 1),
    (56, 128, 128, 3, 2),
    (28, 128, 128, 3, 1),
    (14, 256, 256, 3, 1),
    (14, 1024, 256, 1, 1),
    (7, 512, 512, 3, 1),
    (256, 8, 8, 3, 1),
)
ROWS = ((16384, 8), (4096, 100), (4096, 1000), (4096, 1024), (1024, 4096), (256, 32768), (8, 262144))
CONVOLUTIONS: Mapping[str, type[Conv2dProblem]] = {
    "conv2d_nchw": NchwProblem,
    "conv2d_nhwc": NhwcProblem,
    "conv2d_hwcn": HwcnProblem,
}
FAR = 100.0  # an error in units of the tolerance beyond which a peer computes something else; long sums reach a few
OPERATORS = (*CONVOLUTIONS, "softmax")

# PyTorch has no HWCN: its peers take the same images and filters in layouts of its own, copied before the clock starts
LAYOUTS = {
    "torch nchw": convolution.Peer("nchw", "float32", ("float32",)),
    "torch channels_last": convolution.Peer("nhwc", "float32", ("float32",)),
}

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt


def cases(operators: Sequence[str], batches: Sequence[int]) -> list[Problem]:
    """The float32 problems of `operators` (of OPERATORS), convolutions with every batch.

    Raises UnknownNameError, and ProblemError for a batch that is none.
    """
    found: list[Problem] = []
    for name in operators:
        if name in CONVOLUTIONS:
            for n in batches:
                for size, ci, co, k, stride in LAYERS:
                    fields = {"stride": (stride, stride), "pad": (k // 2, k // 2), "dtype": "float32"}
                    found.append(CONVOLUTIONS[name](n, size, size, ci, co, k, k, **fields))  # type: ignore[arg-type]
        elif name == "softmax":
            found += [SoftmaxProblem(*shape, function, "float32") for shape in ROWS for function in FUNCTIONS]
        else:
            raise UnknownNameError("operator of the comparison", name, OPERATORS)
    return found


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep what is freed, so that PyTorch's outputs, new with each call, cost no page faults;
    ours are there before."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)


def versions_here(arch: Arch, threads: int) -> dict[str, str]:
    """The versions of ours and of PyTorch, and the number of threads: results with others are kept apart.

    Raises ToolchainError without PyTorch.
    """
    torch = torch_module()
    return {**environment(arch, compiler_of(arch)), "torch": str(torch.__version__), "threads": str(threads)}


def peers_of(problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Callable[[], Call]]:
    """What makes the call of each peer.  Raises UsageError for a problem of another kind."""

    def in_layout(peer: convolution.Peer, problem: Conv2dProblem) -> Callable[[], Call]:
        return lambda: convolution.call_of(peer, problem, tensors)

    if isinstance(problem, tuple(CONVOLUTIONS.values())):
        return {name: in_layout(peer, problem) for name, peer in LAYOUTS.items()}
    if isinstance(problem, SoftmaxProblem):
        rows = problem
        return {"torch": lambda: softmax.eager(rows, tensors)}
    raise UsageError(f"{operator_of(problem).name} is not compared on the CPU; use {', '.join(OPERATORS)}")


def run_case(
    problem: Problem, arch: Arch, choice: Choice, timer: CpuTimer, seconds: float, *, seed: int = 0
) -> dict[str, Any]:
    """Compare `choice` with PyTorch; what `case_result` says.  Raises ToolchainError without PyTorch."""
    distinct = None
    if isinstance(problem, SoftmaxProblem):
        distinct = replace(problem, rows=softmax_case.distinct_rows(problem))
    bench = Bench(problem, arch, seed, distinct)
    ours = bench.ours(choice)
    entrants = {"ours": replace(ours, make=cache(ours.make))}
    for name, make in peers_of(problem, bench.tensors).items():
        entrants[name] = Entrant(cache(make), {}, most=FAR, adapt=lambda outputs: _placed(problem, outputs))
    found = compare(entrants, timer, bench.judge, bench.poison, seconds)
    calls = {name: entrants[name].make() for name, (times, _) in found.items() if times}
    return case_result(problem, found, _between(calls, timer, bench, seconds))


def _between(calls: Mapping[str, Call], timer: CpuTimer, bench: Bench, seconds: float) -> dict[str, Times]:
    relu, output = torch_module().relu, bench.tensors[bench.outputs[0].name]
    timer.before = lambda: relu(output)
    try:
        return time_in_turn(timer, calls, seconds)
    finally:
        timer.before = lambda: None


def _placed(problem: Problem, outputs: Sequence[Any]) -> list[Any]:
    if isinstance(problem, Conv2dProblem):
        return [convolution.placed(problem, output) for output in outputs]
    return list(outputs)


def case_result(
    problem: Problem,
    found: Mapping[str, tuple[Times | None, dict[str, Any]]],
    between: Mapping[str, Times] | None = None,
) -> dict[str, Any]:
    """One case as plain data.  Names in `found` and `between`: "ours" and the peers'.

    `ratio` is the time of `best`, the fastest peer, as a multiple of ours: over 1 ours is faster.  `between_us` and
    `between_ratio` are the same between PyTorch's operators.
    """
    told = {name: {**about, **(times.to_json() if times else {})} for name, (times, about) in found.items()}
    for name, times in (between or {}).items():
        told[name]["between_us"] = round(times.us, 3)
    ours = told.pop("ours")
    case = {**head_of(problem, STREAM), "flops": problem.flops, "ours": ours, "peers": told}
    timed = {name: words["us"] for name, words in told.items() if "us" in words}
    if timed and "us" in ours:
        best = min(timed, key=lambda name: timed[name])
        case |= {"best": best, "ratio": round(timed[best] / ours["us"], 4)}
    if beside := [words["between_us"] for words in told.values() if "between_us" in words and "between_us" in ours]:
        case["between_ratio"] = round(min(beside) / ours["between_us"], 4)
    return case


def name_of(problem: Problem) -> str:
    """The problem for people who read an error."""
    if isinstance(problem, Conv2dProblem):
        return convolution_case.name_of(problem)
    return str(problem)


def line_of(case: Mapping[str, Any]) -> str:
    """A case in a line, for people who watch."""
    words, ours = case["problem"], case["ours"]
    what = convolution_case.layer(words) if "kh" in words else f"{words['function']} {words['rows']}x{words['cols']}"
    parts = [f"{case['operator']:12} {what:34}"]
    if "us" in ours:
        parts.append(f"{ours['us']:9.1f} us ({ours['chosen']})")
    else:
        parts.append(f"FAILED: {ours.get('failed', 'not run')}")
    for name, peer in case["peers"].items():
        parts.append(f"{name} {peer['us']:.1f}" if "us" in peer else f"{name} - ({peer.get('failed', 'not run')})")
    if "ratio" in case:
        parts.append(f"{case['ratio']:.2f} of {case['best']}")
    if "between_ratio" in case:
        parts.append(f"{case['between_ratio']:.2f} between PyTorch's operators")
    return "  ".join(parts)
