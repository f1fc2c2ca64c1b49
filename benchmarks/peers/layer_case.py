"""One layer at its first call beside cuDNN: the default choice, records left aside, built ahead in another process.

All of it happens on the device, so that hundreds of layers take minutes: the random tensors, the reference (PyTorch's
convolution in float32; exact, by float64, for int8), the comparison with it, and the times.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.bench import view
from benchmarks.peers.comparison import Call, Entrant, compare, reason
from benchmarks.peers.convolution import call_of, operands, peers_of, placed
from benchmarks.peers.convolution_case import layer
from benchmarks.peers.cudnn import torch_module
from benchmarks.peers.graphs import launching
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.errors import UsageError
from schedules.core.problem import Argument, Conv2dProblem
from schedules.core.registry import operator, operator_of
from schedules.measure.choice import default_choice
from schedules.measure.timer import Timer
from schedules.operators.conv2d_nchw32.packing import GROUP

# of results, relative and absolute: those of data and filters whose products sum up to about one
ALLOWED = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 1e-4, "int8": 0.5}
WORDS = re.compile(r"(\d+)x(\d+)x(\d+) (\d+)->(\d+) (\d+)x(\d+)((?: (?:stride|pad|dilation) \d+(?:,\d+)?)*)")


@dataclass(frozen=True)
class Layer:
    """A convolution of the set of layers that is called `set`."""

    set: str
    problem: Conv2dProblem

    def __str__(self) -> str:
        return f"{self.set}: {operator_of(self.problem).name} {self.problem.dtype} {layer(self.problem.to_json())}"

    def to_json(self) -> dict[str, Any]:
        p = self.problem
        return {"set": self.set, "operator": operator_of(p).name, "dtype": p.dtype, "layer": layer(p.to_json())}


def layer_named(set: str, name: str, dtype: str, words: str) -> Layer:
    """The layer that `words` say, as "16x56x56 64->256 3x3 stride 2", for the operator `name`.  Raises UsageError and
    its kinds."""
    found = WORDS.fullmatch(words)
    if not found:
        raise UsageError(f"{words!r} is no layer; write one as '16x56x56 64->256 3x3 stride 2 pad 1'")
    n, h, w, ci, co, kh, kw = map(int, found.groups()[:7])
    sizes = {"stride": (1, 1), "dilation": (1, 1)}
    for field, size in re.findall(r"(\w+) ([\d,]+)", found[8]):
        first, _, second = size.partition(",")
        sizes[field] = int(first), int(second or first)
    same = tuple(d * (k - 1) // 2 for d, k in zip(sizes["dilation"], (kh, kw), strict=True))
    given = dict(n=n, h=h, w=w, ci=ci, co=co, kh=kh, kw=kw, dtype=dtype, **{"pad": same, **sizes})
    problem = operator(name).problem(**given)
    assert isinstance(problem, Conv2dProblem)
    return Layer(set, problem)


@dataclass(frozen=True)
class Prebuilt:
    """A layer's default choice, built into `library`; `workspaces` are the tensors that its function wants after the
    problem's.  `seconds` went into the choice and the build, on one core."""

    library: Path
    schedule: str
    config: Mapping[str, Any]
    workspaces: tuple[Argument, ...]
    seconds: float

    def call(self, arch: Arch, problem: Conv2dProblem, tensors: Mapping[str, Any]) -> Call:
        """A function that runs on `tensors` of the problem, by name, and hands back the outputs."""
        from schedules.build.library import load_library

        torch, function = torch_module(), load_library(self.library, arch)
        spaces = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in self.workspaces]
        given = [view(tensor) for tensor in (*tensors.values(), *spaces)]
        output = tensors[problem.arguments()[-1].name]

        def call() -> Sequence[Any]:
            function(*given)
            return (output,)

        return call


@dataclass(frozen=True)
class Served:
    """What `schedules.torch` serves a layer with; `seconds` went into its choice, build and timing, on all cores."""

    kernel: Any  # a TorchKernel
    schedule: str
    config: Mapping[str, Any]
    seconds: float

    def call(self, arch: Arch, problem: Conv2dProblem, tensors: Mapping[str, Any]) -> Call:
        """As `Prebuilt.call`."""
        kernel, given = self.kernel, tuple(tensors.values())

        def call() -> Sequence[Any]:
            kernel(*given)
            return (given[-1],)

        return call


def served_in_benchmark_mode(layers: Sequence[Layer]) -> list[tuple[Served | None, str]]:
    """What PyTorch's benchmark mode serves each of `layers` with, all built at once; None, and why, of one that cannot
    be."""
    from schedules.torch.kernels import kernel_for, prepare

    torch = torch_module()
    cudnn, device = torch.backends.cudnn, torch.device("cuda", torch.cuda.current_device())
    found: list[tuple[Served | None, str]] = []
    with cudnn.flags(enabled=True, benchmark=True, benchmark_limit=0, deterministic=False, allow_tf32=False):
        start = time.perf_counter()
        prepare([layer.problem for layer in layers], device)
        seconds = (time.perf_counter() - start) / len(layers)
        for layer in layers:
            try:
                kernel = kernel_for(layer.problem, device)
            except Exception as error:  # TVM's and PyTorch's many types
                found.append((None, reason(error)))
                continue
            found.append((served(layer, kernel, seconds), ""))
    return found


def served(layer: Layer, kernel: Any, seconds: float) -> Served:
    """A layer's TorchKernel, whose schedule and config are told by how it was made."""
    schedule, *words = kernel.made.partition(" for ")[0].split()
    given = dict(word.split("=", 1) for word in words)
    config = operator_of(layer.problem).schedule(schedule).config.parse(given)
    return Served(kernel, schedule, config.to_json(), seconds)


def prebuild(problem: Conv2dProblem, arch: Arch, library: Path, schedule: str | None = None) -> Prebuilt:
    """Choose (of `schedule`, if one is named) and build as the first call of a layer does, into `library`.  Raises what
    these raise."""
    from schedules.build.builder import build_scheduled
    from schedules.build.toolchain.link import write_library
    from schedules.build.workspace import workspaces_as_arguments

    start = time.perf_counter()
    choice, op = default_choice(problem, arch, schedule), operator_of(problem)
    spec = op.schedule(choice.schedule)
    scheduled, workspaces = spec.apply(problem, choice.config, arch), ()
    if arch.is_gpu:
        scheduled, workspaces = workspaces_as_arguments(scheduled)
    built = build_scheduled(op, problem, spec, choice.config, arch, scheduled)
    seconds = time.perf_counter() - start
    write_library(built.module, library)
    return Prebuilt(library, choice.schedule, choice.config.to_json(), workspaces, seconds)


def run_layer(
    layer: Layer, arch: Arch, made: Prebuilt | Served, timer: Timer, seconds: float, launch: str, copy: bool = False
) -> dict[str, Any]:
    """The layer with its times in microseconds: `us` ours, `cudnn` its best of either layout and, where they are told
    apart, `direct` its best of implicit GEMM alone, and with `copy` that of as many bytes as it must move; or `failed`
    and why.

    Raises DeviceError, and what a device that is out of order makes TVM or PyTorch raise.
    """
    torch, problem = torch_module(), layer.problem
    torch.backends.cudnn.benchmark_limit = 0  # every algorithm is tried
    tensors = random_tensors(problem)
    judge = judge_of(problem, tensors)
    launched = launching(launch)
    output = tensors[problem.arguments()[-1].name]

    def ours() -> Call:
        return launched(made.call(arch, problem, tensors))

    entrants = {"ours": Entrant(ours, {}, most=1.0)}
    peers = [peer for peer in peers_of(problem) if peer.counts(FLOAT32)]
    for peer in peers:

        def theirs(peer: Any = peer) -> Call:
            return launched(call_of(peer, problem, tensors))

        judged = peer.same_work(problem)
        entrants[peer.name] = Entrant(theirs, {}, peer.far, judged, lambda outputs: [placed(problem, outputs[0])])

    def copied() -> Call:
        nbytes = (problem.min_bytes // 2,)
        source, target = (torch.empty(nbytes, dtype=torch.int8, device="cuda").fill_(0) for _ in range(2))
        return launched(lambda: (target.copy_(source),))

    if copy:
        entrants["copy"] = Entrant(copied, {}, judged=False)

    def poison() -> None:
        output.view(torch.uint8).fill_(0xFF)

    found = compare(entrants, timer, judge, poison, seconds)
    words = {
        **layer.to_json(),
        "schedule": made.schedule,
        "config": dict(made.config),
        "first_s": round(made.seconds, 2),
    }
    times, told = found["ours"]
    best = [found[peer.name][0] for peer in peers]
    direct = [found[peer.name][0] for peer in peers if peer.dtype == problem.dtype and peer.algorithm is not None]
    if times is None:
        return {**words, "failed": told["failed"]}
    fastest = {"us": [times], "cudnn": best, **({"direct": direct} if problem.dtype == "float32" else {})}
    fastest |= {"copy": [found["copy"][0]]} if copy else {}
    return words | {name: round(min(t.us for t in some if t), 2) for name, some in fastest.items() if any(some)}


def failed(layer: Layer, why: object) -> dict[str, Any]:
    """What is kept of a layer that came to nothing."""
    return {**layer.to_json(), "failed": reason(why) if isinstance(why, BaseException) else str(why)}


def random_tensors(problem: Conv2dProblem) -> dict[str, Any]:
    """Tensors of the problem on the GPU by argument name; the channels that fill up a group are zeros."""
    torch, p, tensors = torch_module(), problem, {}
    for argument in p.arguments():
        if argument.output:
            tensors[argument.name] = torch.empty(argument.shape, dtype=getattr(torch, argument.dtype), device="cuda")
        elif argument.dtype == "int8":
            tensors[argument.name] = torch.randint(-128, 128, argument.shape, dtype=torch.int8, device="cuda")
        else:
            made = torch.randn(argument.shape, dtype=getattr(torch, argument.dtype), device="cuda")
            tensors[argument.name] = made if argument.name == "data" else made.mul_((p.ci * p.kh * p.kw) ** -0.5)
    if p.dtype == "int8":
        if p.ci % GROUP:
            tensors["data"][:, -1, ..., p.ci % GROUP :] = 0
            tensors["filter"][-1, ..., p.ci % GROUP :] = 0
        tensors["filter"][..., p.co :, :] = 0
    return tensors


def judge_of(problem: Conv2dProblem, tensors: Mapping[str, Any]) -> Callable[[Sequence[Any]], float]:
    """The worst error of outputs, in units of what is allowed."""
    torch, p = torch_module(), problem
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.allow_tf32 = False, False
    wide = torch.float64 if p.dtype == "int8" else torch.float32
    data, weight = (tensor.to(wide) for tensor in operands(p, tensors))
    wanted = torch.nn.functional.conv2d(data, weight, None, p.stride, p.pad, p.dilation)
    allowed = ALLOWED[p.dtype]
    if p.dtype == "int8":
        wanted = (wanted * p.epilogue.scale).round().clip(-128, 127)
    wanted = placed(p, wanted)

    def judge(outputs: Sequence[Any]) -> float:
        away = (outputs[0].to(wide) - wanted).abs()
        return float((away / allowed if p.dtype == "int8" else away / (allowed * (wanted.abs() + 1))).max())

    return judge
