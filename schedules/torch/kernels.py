"""Kernels for PyTorch tensors: which one serves a problem on a device, built or loaded once and called without copies.

TVM takes a tensor's memory as it is (DLPack) and launches on PyTorch's current stream of the tensor's device.  All
memory comes from PyTorch: outputs, and the workspaces of functions of several kernels (`schedules.workspace`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from schedules.build.library import VECTOR_BYTES, allocates
from schedules.build.toolchain import devices
from schedules.build.toolchain.devices import LocalDevice
from schedules.bundle.bundle import MANIFEST, Bundle
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ArgumentError, BundleError, DeviceError, SchedulesError, UsageError
from schedules.core.problem import Argument, Problem
from schedules.measure.choice import distance
from schedules.store.disk import Disk, disk, private_disk
from schedules.store.kernels import Chosen, build_all, chosen_for, is_kept, kernel_of

logger = logging.getLogger("schedules")

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "uint8", "int32")
}  # TVM's names, as PyTorch's
REMEMBERED = 4096  # shapes whose kernel is found without asking again

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class TorchKernel:
    """A function on one device.

    `arguments` are its tensors in order, outputs last; `workspaces` the tensors it wants after these.  `made` says in
    words what it is: schedule and config, or a bundle.
    """

    arch: Arch
    arguments: tuple[Argument, ...]
    workspaces: tuple[Argument, ...]
    made: str
    function: Callable[..., None] = field(repr=False)
    why: str = ""  # it was chosen, in words

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run on contiguous tensors of one device, outputs given too.

        Raises ArgumentError before anything runs if a tensor does not fit.
        """
        index = tensors[0].get_device()
        if index >= 0 and index != torch._C._cuda_getDevice():  # below 0 on a CPU
            with torch.cuda.device(index):  # TVM leaves the tensors' device as the current one
                return self(*tensors)
        try:
            if self.workspaces:
                self.function(*tensors, *self.memory(tensors[0].device, self._extent(tensors)))
            else:
                self.function(*tensors)
        except (TypeError, ValueError):  # of the function's own checks
            from schedules.build.builder import check_arguments

            check_arguments(self.arguments, self.arch, tensors)
            if len(places := {str(tensor.device) for tensor in tensors}) > 1:
                raise ArgumentError(f"tensors lie on {' and '.join(sorted(places))}; move them to one") from None
            raise

    def _extent(self, tensors: tuple[torch.Tensor, ...]) -> int | None:
        along = zip(self.arguments, tensors, strict=True)
        return next((tensor.shape[a.runtime_axis] for a, tensor in along if a.runtime_axis is not None), None)

    def memory(self, device: torch.device, extent: int | None) -> list[torch.Tensor]:
        """Workspaces for one call, whose run-time extent is `extent`."""
        return [
            torch.empty(
                [extent if axis == space.runtime_axis else size for axis, size in enumerate(space.shape)],
                dtype=DTYPES[space.dtype],
                device=device,
            )
            for space in self.workspaces
        ]


def dtype_name(dtype: torch.dtype) -> str:
    """TVM's name of a dtype: float32 of torch.float32."""
    return str(dtype).removeprefix("torch.")


def prepared(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as kernels take it: contiguous and, on a GPU, at a multiple of 16 bytes.  A copy if it is not."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % VECTOR_BYTES else tensor


def remembered(function: F) -> F:
    """Keep what `function` returned for its latest arguments, until `use_bundles` changes what it would return."""
    cached = lru_cache(maxsize=REMEMBERED)(function)
    _remembered.append(cached)
    return cached  # type: ignore[return-value]


def kernel_for(problem: Problem, device: torch.device) -> TorchKernel:
    """The kernel for `problem` on a device: of a bundle in use that takes it, else as `schedules.load` chooses.

    It comes from this user's folder of kernels, or is built and written there.  Equal programs are built or loaded once
    for each device, whatever run-time extents they are for.
    Raises DeviceError for a device without kernels, UsageError if a CUDA graph is being captured and the kernel is not
    there yet, and what `schedules.load` raises.
    """
    return _kernel_for(problem, device, disk())


def prepare(problems: Iterable[Problem], device: torch.device, progress: bool | None = None) -> None:
    """Have the kernels for `problems` on a device ready, so that their calls build nothing: all cores build at once
    what is in no bundle and was not built before.

    `progress` shows a bar on standard error; by default on a terminal only.  Raises what `kernel_for` raises for the
    first that cannot be built, once the others are ready.
    """
    arch, problems, name = arch_of(device), list(dict.fromkeys(problems)), _name(device)
    failed: list[SchedulesError] = []
    with contextlib.ExitStack() as held:
        kept = disk() if disk().takes_files() else held.enter_context(private_disk())
        missing = [p for p in problems if _bundle_for(p, device) is None and not is_kept(p, arch, name, kept)]
        if len(missing) > 1:  # one is sooner built here than a process is started
            with _bar(len(missing), progress) as done:
                failed = build_all(missing, arch, name, kept, done)
        for problem in problems:
            try:
                _kernel_for(problem, device, kept)
            except SchedulesError as error:
                failed.append(error)
    if failed:
        raise failed[0]


def _kernel_for(problem: Problem, device: torch.device, kept: Disk) -> TorchKernel:
    arch = arch_of(device)
    with _lock:
        bundle = _bundle_for(problem, device)
        if bundle is not None:
            return _ready((bundle.path, device), problem, lambda: _loaded(bundle), "as exported")
        chosen = chosen_for(problem, arch, _name(device), kept)
        return _ready((chosen.key, device), problem, lambda: _made(chosen, kept), chosen.why)


def use_bundles(*folders: str | Path) -> tuple[Bundle, ...]:
    """Serve the problems of the bundles in `folders`, at any depth, with them, whatever was measured; return these.

    Of several that take a tensor, by their run-time extents, the nearest serves.  Left out, with a line in the log, are
    bundles for other devices than this machine's, and those for a GPU that have TVM allocate workspaces, which is not
    safe between streams.  Bundles named before are forgotten; without a folder, all are.
    Raises BundleError if a folder holds no bundle, or one that is not as it was written.
    """
    found: list[Bundle] = []
    for folder in map(Path, folders):
        paths = sorted(file.parent for file in folder.rglob(MANIFEST))
        if not paths:
            raise BundleError(f"{folder} holds no bundle; give a folder that `schedules export --out` wrote")
        for bundle in map(Bundle.open, paths):
            if reason := _unfit(bundle):
                logger.warning("%s is left out: %s", bundle.path, reason)
            else:
                found.append(bundle)
    with _lock:
        _bundles.clear()
        for bundle in found:
            _bundles.setdefault(_served(bundle), []).append(bundle)
        for cached in _remembered:
            cached.cache_clear()
    return tuple(found)


@lru_cache
def arch_of(device: torch.device) -> Arch:
    """What kernels for `device` are built for.  Raises DeviceError if there are none."""
    if device.type == "cpu":
        return parse_arch("llvm")
    here = _as_device(device) if device.type == "cuda" and torch.version.cuda else None
    arch = here.newest_arch() if here else None
    if here is None or arch is None:
        raise DeviceError(f"no kernels for {device}; they run on the CPU and on CUDA GPUs from sm_75 on")
    return arch.on(here.row(arch))


_lock = threading.RLock()  # TVM's compile callbacks are one set for the process
_remembered: list[Any] = []
_kernels: dict[Any, TorchKernel] = {}
_bundles: dict[Problem, list[Bundle]] = {}  # by what they serve


def _ready(key: tuple[Any, ...], problem: Problem, make: Callable[[], TorchKernel], why: str) -> TorchKernel:
    if key not in _kernels:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UsageError(f"no kernel for {problem} yet, and a CUDA graph is being captured; call it once before")
        _kernels[key] = make()
    logger.info("%s: %s; %s", problem, _kernels[key].made, why)
    return _kernels[key]


def _made(chosen: Chosen, kept: Disk) -> TorchKernel:
    found = kernel_of(chosen, kept)
    return TorchKernel(chosen.arch, found.arguments, found.workspaces, chosen.made, found.function, chosen.why)


@contextlib.contextmanager
def _bar(count: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """What is to be called after each of `count` builds."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("building kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=count)
        yield lambda: bar.advance(task)


def _name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _loaded(bundle: Bundle) -> TorchKernel:
    return TorchKernel(bundle.arch, bundle.arguments, (), f"bundle {bundle.path}", bundle.load().function)


def _served(bundle: Bundle) -> Problem:
    any_extent = any(argument.runtime_axis is not None for argument in bundle.arguments)
    return bundle.problem.any_extent() if any_extent else bundle.problem


def _bundle_for(problem: Problem, device: torch.device) -> Bundle | None:
    here = _as_device(device)
    known = (*_bundles.get(problem, ()), *_bundles.get(problem.any_extent(), ())) if _bundles else ()
    fitting = [bundle for bundle in known if here.runs(bundle.arch)]
    return min(fitting, key=lambda bundle: distance(problem, bundle.problem), default=None)


def _unfit(bundle: Bundle) -> str | None:
    if bundle.arch.is_gpu and allocates(bundle.library.read_bytes()):
        return "TVM allocates its workspaces; kernels that are built here take PyTorch's"
    try:
        bundle.check_device()
    except BundleError as error:
        return str(error)
    return None


def _as_device(device: torch.device) -> LocalDevice:
    if device.type != "cuda":
        return devices.cpu()
    told = torch.cuda.get_device_properties(device)
    return LocalDevice("cuda", told.name, f"{told.major}.{told.minor}", told.multi_processor_count)
