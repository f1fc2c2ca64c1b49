"""What a call from PyTorch costs: operators of `schedules.torch` on tiny tensors, beside PyTorch's own.

    python -m benchmarks.torch_overhead                  # on the GPU if there is one, else on the CPU
    python -m benchmarks.torch_overhead --device cpu --modes eager

Microseconds of one call, by the host's clock, of many in a row (on a GPU the device is waited for after the last): so
small that what is measured is the way to the kernel.  `kernel` is the launch alone, its output given: TVM's function
on a CPU, the driver's launch on a GPU; `eager` a call; `grad` forward and backward; `compiled` a call under
``torch.compile``; `graph` one of the calls captured in a CUDA graph.  Ours and PyTorch's take turns.  Kept in
``tuning_logs/<device>/torch_overhead.json``, from which python -m benchmarks.readme_tables makes the table of
docs/pytorch.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import schedules.torch as kernels
from benchmarks.peers.kept import keep_costs
from benchmarks.peers.overhead import KIND, MODES
from schedules.build.builder import compiler_of
from schedules.build.present import cpu_name
from schedules.cli.script import run_script
from schedules.core.errors import UsageError
from schedules.core.registry import operator
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.measure.records import environment
from schedules.torch.kernels import arch_of, kernel_for

ROUNDS = 15
CALLS = 200  # of a round
CAPTURED = 20  # calls in a graph
ROWS, COLS = 16, 64
IMAGE = dict(n=1, h=8, w=8, ci=8, co=8, kh=3, kw=3)

Call = Callable[[], Any]


def operators(device: torch.device) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """Name, our function, PyTorch's, and their arguments, differentiable in the first if ours is."""
    x = torch.randn(ROWS, COLS, device=device, requires_grad=True)
    yield "softmax", kernels.softmax, lambda x: torch.softmax(x, -1), (x,)
    n, h, w, ci, co, kh, kw = IMAGE.values()
    data, weight = torch.randn(n, ci, h, w, device=device), torch.randn(co, ci, kh, kw, device=device)
    yield "conv2d_nchw", kernels.conv2d, lambda x, w: torch.nn.functional.conv2d(x, w), (data, weight)


def calls(mode: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Call:
    """One call in `mode`, warmed up."""
    first = arguments[0]
    plain = [argument.detach() for argument in arguments]
    if mode == "grad":
        dy = torch.ones_like(function(*arguments))

        def call() -> Any:
            return torch.autograd.grad(function(*arguments), first, dy)

    elif mode == "compiled":
        compiled = torch.compile(function, fullgraph=True, dynamic=False)

        def call() -> Any:
            return compiled(*plain)

    elif mode == "graph":
        function(*plain)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [function(*plain) for _ in range(CAPTURED)]

        def call() -> Any:
            graph.replay()
            return kept

    else:

        def call() -> Any:
            return function(*plain)

    for _ in range(20):
        call()
    return call


def bare(name: str, arguments: tuple[Any, ...]) -> Call:
    """The launch of the operator's kernel with its output."""
    fields: dict[str, Any] = dict(rows=ROWS, cols=COLS) if name == "softmax" else IMAGE
    problem = operator(name).problem(**fields, dtype="float32")
    plain = [argument.detach() for argument in arguments]
    kernel = kernel_for(problem, plain[0].device)
    given = torch.empty(problem.arguments()[-1].shape, device=plain[0].device), *kernel.memory(plain[0].device, ROWS)
    if plain[0].device.type == "cpu":
        return lambda: kernel.function(*plain, *given)
    ready, stream = kernel.function.ready(*plain, *given), torch.cuda.current_stream().cuda_stream
    return lambda: ready([tensor.data_ptr() for tensor in (*plain, *given)], stream)


def timed(candidates: dict[str, Call], of_call: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds of a call of each candidate, which take turns; `of_call` operators run in one call."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, call in candidates.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / CALLS / of_call * 1e6)
    found = {}
    for name, us in times.items():
        p10, median, p90 = np.percentile(us, (10, 50, 90))
        found[name] = {"median_us": round(median, 2), "p10_us": round(p10, 2), "p90_us": round(p90, 2)}
    return found


def measured(device: torch.device, modes: list[str]) -> Iterator[dict[str, Any]]:
    for name, ours, theirs, arguments in operators(device):
        for mode in modes:
            if mode == "grad" and not arguments[0].requires_grad or mode == "graph" and device.type != "cuda":
                continue
            candidates = (
                {"ours": bare(name, arguments)}
                if mode == "kernel"
                else {"ours": calls(mode, ours, arguments), "torch": calls(mode, theirs, arguments)}
            )
            found = timed(candidates, CAPTURED if mode == "graph" else 1, device)
            shown = ", ".join(f"{who} {times['median_us']:.1f} us" for who, times in found.items())
            print(f"{name:12} {mode:9} {shown}", flush=True)
            yield {"operator": name, "mode": mode, "shapes": [list(a.shape) for a in arguments], **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--logs", type=Path, default=DEFAULT_FOLDER, help="the folder of tuning logs")
    args = parser.parse_args()
    modes = args.modes.split(",")
    if unknown := set(modes) - MODES.keys():
        raise UsageError(f"--modes has {sorted(unknown)[0]!r}; known: {', '.join(MODES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA GPU here; take --device cpu")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    arch = arch_of(device)
    name = torch.cuda.get_device_name(device) if arch.is_gpu else cpu_name()
    found = {"calls": list(measured(device, modes))}
    versions = {**environment(arch, compiler_of(arch)), "torch": str(torch.__version__)}
    print(keep_costs(args.logs, KIND, name, versions, found))
    return 0


if __name__ == "__main__":
    run_script(main)
