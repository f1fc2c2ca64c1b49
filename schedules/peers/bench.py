"""The GPU's side of a comparison: a case's tensors, its reference, and our function for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedules.arch import Arch
from schedules.build import build, compiler_of
from schedules.bundle import Bundle, write_bundle
from schedules.device_judge import DeviceJudge
from schedules.dispatch import Choice
from schedules.errors import ToolchainError
from schedules.measure import Timer
from schedules.operator import Array
from schedules.peers.comparison import (
    DISTINCT_ELEMENTS,
    FEWEST_DISTINCT,
    Entrant,
    case_result,
    compare,
    name_of,
)
from schedules.peers.cudnn import torch_module
from schedules.peers.softmax import COPIES, PEERS, Call
from schedules.problem import Argument
from schedules.records import environment
from schedules.softmax.definition import SoftmaxProblem, inputs, reference
from schedules.versions import version_of


def distinct_rows(problem: SoftmaxProblem) -> int:
    """How many different rows a case's data has: few enough for a quick reference, and an odd number, so that a row
    taken for another is seen."""
    return min(problem.rows, max(FEWEST_DISTINCT, DISTINCT_ELEMENTS // problem.cols) | 1)


class Bench:
    """Fresh random tensors of one problem on the GPU (PyTorch's, so that every peer takes them), and the reference.

    Raises ToolchainError without PyTorch.
    """

    def __init__(self, problem: SoftmaxProblem, arch: Arch, seed: int) -> None:
        torch = torch_module()
        small = replace(problem, rows=distinct_rows(problem))
        arrays = inputs(small, np.random.default_rng(seed))
        given = [argument for argument in problem.arguments() if not argument.output]
        self.outputs = [argument for argument in problem.arguments() if argument.output]
        self.tensors: dict[str, Any] = {
            argument.name: _uploaded(array, argument) for argument, array in zip(given, arrays, strict=True)
        }
        for argument in self.outputs:
            dtype = getattr(torch, argument.dtype)
            self.tensors[argument.name] = torch.empty(argument.shape, dtype=dtype, device="cuda")
        self._judge = DeviceJudge(problem, arch, reference(small, arrays))

    def judge(self, outputs: Sequence[Any]) -> float:
        """The worst error of `outputs` (PyTorch tensors) in units of the tolerance."""
        return self._judge.error([view(output.contiguous()) for output in outputs])

    def poison(self) -> None:
        """Fill the outputs with NaN."""
        torch = torch_module()
        for argument in self.outputs:
            self.tensors[argument.name].view(torch.uint8).fill_(0xFF)


def view(tensor: Any) -> Any:
    """A PyTorch tensor as TVM's, of the same memory."""
    import tvm

    return tvm.runtime.from_dlpack(tensor)


def _uploaded(array: Array, argument: Argument) -> Any:
    """`array` on the GPU, its rows repeated to the extent of `argument`."""
    torch = torch_module()
    array = np.ascontiguousarray(array)
    if argument.dtype == "bfloat16":  # a dtype that PyTorch takes no arrays of
        part = torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    else:
        part = torch.from_numpy(array).cuda()
    rows, distinct = argument.shape[0], array.shape[0]
    if rows == distinct:
        return part
    whole, rest = divmod(rows, distinct)
    tensor = torch.empty(argument.shape, dtype=part.dtype, device="cuda")
    tensor[: whole * distinct].view(whole, *part.shape).copy_(part)
    tensor[whole * distinct :].copy_(part[:rest])
    return tensor


def our_function(problem: SoftmaxProblem, arch: Arch, choice: Choice, builds: Path | None = None) -> Any:
    """The function of `choice`: from the bundle of its name in `builds` if that is of the same schedule and config,
    else built here.

    Raises BundleError for a bundle that is damaged or for another device, and what `build` raises.
    """
    folder = builds / name_of(problem) if builds else None
    if folder and folder.is_dir():
        bundle = Bundle.open(folder)
        made = bundle.manifest["schedule"], bundle.manifest["config"], bundle.arch, bundle.problem
        if made == (choice.schedule, choice.config.words(), arch, problem):
            return bundle.load().function
    return build(problem, arch, choice.schedule, choice.config).module["main"]


def write_build(choice: Choice, arch: Arch, builds: Path) -> Bundle:
    """Build `choice` into the folder that `our_function` looks in.  Raises what `build` and `write_bundle` raise."""
    problem = choice.problem
    assert isinstance(problem, SoftmaxProblem)
    made = build(problem, arch, choice.schedule, choice.config)
    return write_bundle(made, builds / name_of(problem), force=True)


def run_case(
    problem: SoftmaxProblem,
    arch: Arch,
    choice: Choice,
    peers: Sequence[str],
    timer: Timer,
    seconds: float,
    *,
    seed: int = 0,
    builds: Path | None = None,
) -> dict[str, Any]:
    """Compare `choice` with the copies and `peers` (names in PEERS); what `comparison.case_result` says.

    Raises DeviceError, ToolchainError, and what a device that is out of order makes TVM or PyTorch raise.
    """
    bench = Bench(problem, arch, seed)

    def ours() -> Call:
        function = our_function(problem, arch, choice, builds)
        tensors = [view(bench.tensors[argument.name]) for argument in problem.arguments()]
        outputs = [bench.tensors[argument.name] for argument in bench.outputs]

        def call() -> Sequence[Any]:
            function(*tensors)
            return outputs

        return call

    def of_peer(name: str) -> Callable[[], Call]:
        return lambda: PEERS[name](problem, bench.tensors)

    def of_copy(name: str) -> Callable[[], Call]:
        return lambda: COPIES[name](problem, bench.tensors)

    about = {"schedule": choice.schedule, "config": choice.config.words(), "chosen": choice.source}
    entrants = {"ours": Entrant(ours, about, must_match=True)}
    entrants |= {f"copy:{name}": Entrant(of_copy(name), {}, judged=False) for name in COPIES}
    entrants |= {f"peer:{name}": Entrant(of_peer(name), {}) for name in peers}
    return case_result(problem, compare(entrants, timer, bench.judge, bench.poison, seconds))


def versions_here(arch: Arch) -> dict[str, str]:
    """The versions of ours and of every peer, of CUDA and of NVIDIA's driver; what is not here is left out.

    Raises ToolchainError without PyTorch.
    """
    torch = torch_module()
    try:
        compiler = compiler_of(arch)
    except ToolchainError:
        compiler = "none"  # then everything comes from bundles
    found = {
        **environment(arch, compiler),
        "torch": str(torch.__version__),
        "torch-cuda": str(torch.version.cuda),
        "triton": version_of("triton"),
        "cudnn": str(torch.backends.cudnn.version()),
        "nvidia-driver": _nvidia_driver(),
    }
    return {name: version for name, version in found.items() if version}


def _nvidia_driver() -> str | None:
    """The driver's own version ("580.65.06"); None where its library does not tell."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode(errors="replace")
