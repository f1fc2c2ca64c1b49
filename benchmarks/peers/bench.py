"""Our side of a comparison: a case's tensors, its reference, and our function for it, of any operator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.comparison import Call, Entrant
from benchmarks.peers.cudnn import torch_module
from schedules.build.builder import build, compiler_of
from schedules.bundle.bundle import Bundle, write_bundle
from schedules.check.device_judge import DeviceJudge, HostJudge
from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.errors import ToolchainError
from schedules.core.operator import Array
from schedules.core.problem import Argument, Problem
from schedules.core.registry import operator_of
from schedules.core.versions import version_of
from schedules.measure.choice import Choice
from schedules.measure.records import environment
from schedules.store.disk import disk
from schedules.store.kernels import chosen_as, kernel_of


class Bench:
    """Fresh random tensors of one problem on the device of `arch` (PyTorch's, so that every peer takes them), and the
    reference.

    The data, and with it the reference, is that of `distinct`, the problem with fewer rows (the first axis), repeated;
    by default of the problem itself.  `arithmetic` is what results are held to.  Raises ToolchainError without PyTorch.
    """

    def __init__(
        self,
        problem: Problem,
        arch: Arch,
        seed: int,
        distinct: Problem | None = None,
        arithmetic: Arithmetic = FLOAT32,
    ) -> None:
        torch, op, small = torch_module(), operator_of(problem), distinct or problem
        arrays = op.inputs(small, np.random.default_rng(seed))
        given = [argument for argument in problem.arguments() if not argument.output]
        self.problem, self.arch = problem, arch
        device = "cuda" if arch.is_gpu else "cpu"
        self.outputs = [argument for argument in problem.arguments() if argument.output]
        self.tensors: dict[str, Any] = {
            argument.name: _uploaded(array, argument, device) for argument, array in zip(given, arrays, strict=True)
        }
        for argument in self.outputs:
            dtype = getattr(torch, argument.dtype)
            self.tensors[argument.name] = torch.empty(argument.shape, dtype=dtype, device=device)
        expected = op.reference(small, arrays)
        self._judge = (DeviceJudge if arch.is_gpu else HostJudge)(problem, arch, expected, arithmetic)

    def ours(
        self, choice: Choice, bundle: Path | None = None, launched: Callable[[Call], Call] = lambda call: call
    ) -> Entrant:
        """The function of `choice` on these tensors, as `our_function` finds it and `launched` launches it."""

        def make() -> Call:
            function = our_function(choice, self.arch, bundle)
            tensors = [view(self.tensors[argument.name]) for argument in self.problem.arguments()]
            outputs = [self.tensors[argument.name] for argument in self.outputs]

            def call() -> Sequence[Any]:
                function(*tensors)
                return outputs

            return launched(call)

        about = {"schedule": choice.schedule, "config": choice.config.to_json(), "chosen": choice.source}
        return Entrant(make, about, most=1.0)

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


def _uploaded(array: Array, argument: Argument, device: str) -> Any:
    """A copy of `array` on `device`, its rows repeated to the extent of `argument`."""
    torch = torch_module()
    array = np.ascontiguousarray(array)
    if argument.dtype == "bfloat16":  # a dtype that PyTorch takes no arrays of
        part = torch.from_numpy(array.view(np.int16)).to(device, copy=True).view(torch.bfloat16)
    else:
        part = torch.from_numpy(array).to(device, copy=True)
    rows, distinct = argument.shape[0], array.shape[0]
    if rows == distinct:
        return part
    whole, rest = divmod(rows, distinct)
    tensor = torch.empty(argument.shape, dtype=part.dtype, device=device)
    tensor[: whole * distinct].view(whole, *part.shape).copy_(part)
    tensor[whole * distinct :].copy_(part[:rest])
    return tensor


def our_function(choice: Choice, arch: Arch, bundle: Path | None = None) -> Any:
    """The function of `choice`: from `bundle` if that is a bundle of the same problem, schedule and config, else built
    here; one for the CPU is kept on disk for the next process.

    Raises BundleError for a bundle that is damaged or for another device, and what `build` raises.
    """
    problem = choice.problem
    if bundle and bundle.is_dir():
        found = Bundle.open(bundle)
        made = found.manifest["schedule"], found.manifest["config"], found.arch, found.problem
        if made == (choice.schedule, choice.config.to_json(), arch, problem):
            return found.load().function
    if arch.is_gpu:
        return build(problem, arch, choice.schedule, choice.config).module["main"]
    return kernel_of(chosen_as(choice, arch), disk()).function


def write_build(choice: Choice, arch: Arch, bundle: Path) -> Bundle:
    """Build `choice` into the folder `bundle`.  Raises what `build` and `write_bundle` raise."""
    return write_bundle(build(choice.problem, arch, choice.schedule, choice.config), bundle, force=True)


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
