"""Kernels for PyTorch tensors: which one serves a problem on a device, built or loaded once and called without copies.

TVM takes a tensor's memory on the CPU as it is (DLPack).  Kernels of GPUs are launched by the driver itself on
PyTorch's current stream of the tensors' device (`bundle.package.launch`), without TVM: nothing is linked, and a tensor
map is encoded once for each address.  All memory comes from PyTorch: outputs, and the workspaces of functions of many
kernels (`build.workspace`); a bundle keeps its own, one for each stream and captured graph.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from schedules.build.library import VECTOR_BYTES
from schedules.build.toolchain import devices
from schedules.build.toolchain.devices import LocalDevice
from schedules.bundle.bundle import MANIFEST, Bundle
from schedules.bundle.package.launch import ALIGNED, Ready
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ArgumentError, BundleError, DeviceError, SchedulesError, UsageError
from schedules.core.problem import Argument, Conv2dProblem, Problem
from schedules.measure.choice import distance
from schedules.store.disk import Disk, disk, private_disk
from schedules.store.kernels import (
    Chosen,
    build_all,
    build_contenders,
    chosen_for,
    contenders,
    is_kept,
    keep_winner,
    kernel_of,
    look_around,
    missing,
    ready_to_build,
    winner,
)
from schedules.torch import benchmark

logger = logging.getLogger("schedules")

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
}  # TVM's names, as PyTorch's
REMEMBERED = 4096  # shapes whose kernel is found without asking again

F = TypeVar("F", bound=Callable[..., Any])
Shape = Sequence[int]
Output = tuple[Shape, torch.dtype]


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
        device = tensors[0].device
        with _current(device):
            try:
                self.function(*tensors, *self.memory(device, self._extent([tensor.shape for tensor in tensors])))
            except (TypeError, ValueError):
                self.explain(tensors)
                raise

    def launch(self, device: torch.device, *outputs: Output) -> Callable[..., Any]:
        """A function of contiguous inputs on `device`, always of the same shapes, that makes these outputs and returns
        them: one, or a tuple of several.  Raises ArgumentError as a call does."""
        shapes: list[Shape] = [()] * (len(self.arguments) - len(outputs)) + [shape for shape, _ in outputs]
        makes, spaces = [_maker(device, *wanted) for wanted in outputs], self._spaces(self._extent(shapes))
        if device.type == "cuda":
            return _by_driver(self, makes, spaces, device)
        return _by_tvm(self, [*makes, *[_maker(device, *space) for space in spaces]], len(outputs))

    def _extent(self, shapes: Sequence[Shape]) -> int | None:
        for argument, shape in zip(self.arguments, shapes, strict=True):
            axis = argument.runtime_axis if argument.ranged_axis is None else argument.ranged_axis
            if axis is not None and shape:
                return shape[axis]
        return None

    def _spaces(self, extent: int | None) -> list[Output]:
        def sizes(space: Argument) -> tuple[int, ...]:
            return tuple(
                extent if axis == space.runtime_axis and extent else size for axis, size in enumerate(space.shape)
            )

        return [(sizes(space), DTYPES[space.dtype]) for space in self.workspaces]

    def memory(self, device: torch.device, extent: int | None) -> list[torch.Tensor]:
        """Workspaces for one call, whose run-time extent is `extent`."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._spaces(extent)]

    def explain(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ArgumentError if the function's own checks refuse these tensors; what those say is hard to read."""
        from schedules.build.builder import check_arguments

        check_arguments(self.arguments, self.arch, tensors)
        if len(places := {str(tensor.device) for tensor in tensors}) > 1:
            raise ArgumentError(f"tensors lie on {' and '.join(sorted(places))}; move them to one") from None


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """With a GPU, if PyTorch uses any, as the current one."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.cuda.device(device) if on_gpu else contextlib.nullcontext()


def dtype_name(dtype: torch.dtype) -> str:
    """TVM's name of a dtype: float32 of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _maker(device: torch.device, shape: Shape, dtype: torch.dtype, strides: Shape = ()) -> Callable[[], torch.Tensor]:
    """New memory on the current device of a kind, contiguous if no `strides` are given, as code that inductor wrote has
    it: in half the time of `torch.empty`."""
    strides = strides or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
    return functools.partial(make, tuple(shape), tuple(strides), dtype)  # torch.Size is not tuple enough


def _by_tvm(kernel: TorchKernel, makes: Sequence[Callable[[], torch.Tensor]], count: int) -> Callable[..., Any]:
    """A function of inputs on the CPU that makes the outputs, `count` of what `makes` makes, and returns them."""
    function, make = kernel.function, makes[0]

    def one(*inputs: torch.Tensor) -> torch.Tensor:
        output = make()
        try:
            function(*inputs, output)
        except (TypeError, ValueError):
            kernel.explain((*inputs, output))
            raise
        return output

    def several(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [make() for make in makes]
        try:
            function(*inputs, *made)
        except (TypeError, ValueError):
            kernel.explain((*inputs, *made))
            raise
        return tuple(made)

    return one if count == 1 else several


def _lent(run: Callable[..., int], spaces: Sequence[Output]) -> Callable[..., int]:
    """`run`, a function of a stream and addresses, with those of workspaces after all others: one piece of PyTorch's
    memory, given back once all is launched, which the stream's order allows.  Tensors would cost more than a kernel."""
    if not spaces:
        return run
    take, give = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
    sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED for shape, dtype in spaces]
    size, starts = sum(sizes), [sum(sizes[:at]) for at in range(1, len(sizes))]

    def call(stream: int, *addresses: int) -> int:
        memory = take(size, stream)
        try:
            if not starts:
                return run(stream, *addresses, memory)
            return run(stream, *addresses, memory, *[memory + start for start in starts])
        finally:
            give(memory)

    return call


def _by_driver(
    kernel: TorchKernel,
    makes: Sequence[Callable[[], torch.Tensor]],
    spaces: Sequence[Output],
    device: torch.device,
    ready: Ready | None = None,
) -> Callable[..., Any]:
    """The same on a GPU: with it as the current one, and inputs at multiples of 16 bytes.  Where nothing is `ready` the
    first call looks at its tensors; those after it are of others like them."""
    current, stream_of, index = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream, device.index
    make, address, count = makes[0], torch.Tensor.data_ptr, len(makes)
    run = None if ready is None else _lent(ready.run, spaces)

    def one(*inputs: torch.Tensor) -> Any:
        if run is None or current() != index:
            return otherwise(inputs)
        output = make()
        code = run(stream_of(index), *map(address, inputs), address(output))
        return again(code, inputs, [output]) if code else output

    def several(*inputs: torch.Tensor) -> Any:
        if run is None or current() != index:
            return otherwise(inputs)
        outputs = tuple([make() for make in makes])
        code = run(stream_of(index), *map(address, inputs), *map(address, outputs))
        return again(code, inputs, outputs) if code else outputs

    def again(code: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        """After what kept it from launching."""
        assert ready is not None and run is not None
        launch = functools.partial(run, stream_of(index), *map(address, inputs), *map(address, outputs))
        if not ready.settle(code, launch):
            return call(*map(_even, inputs))
        return outputs[0] if count == 1 else outputs

    def otherwise(inputs: Sequence[torch.Tensor]) -> Any:
        """The first call, or one with another device as the current one."""
        nonlocal ready, run
        if current() != index:
            with torch.cuda.device(index):
                return call(*inputs)
        inputs = [*map(_even, inputs)]
        made = [make() for make in (*makes, *[_maker(device, *space) for space in spaces])]
        try:
            ready = ready or kernel.function.ready(*inputs, *made)  # type: ignore[attr-defined]
        except ValueError:
            kernel.explain((*inputs, *made[:count]))
            raise
        run = _lent(ready.run, spaces)
        return call(*inputs)

    def making(like: torch.Tensor) -> Callable[..., Any]:
        """After a call: the same of other views of the inputs, whose result is as `like`."""
        return _by_driver(kernel, [_maker(device, like.shape, like.dtype, like.stride())], spaces, device, ready)

    call = one if count == 1 else several
    if count == 1:
        call.making = making  # type: ignore[attr-defined]
    return call


def _even(tensor: torch.Tensor) -> torch.Tensor:
    """The same at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor


def remembered(function: F) -> F:
    """Keep what `function` returned for its latest arguments, until `use_bundles` changes what it would return."""
    cached = lru_cache(maxsize=REMEMBERED)(function)
    when_bundles_change(cached.cache_clear)
    return cached  # type: ignore[return-value]


def when_bundles_change(forget: Callable[[], None]) -> None:
    """Have `forget` called by `use_bundles`."""
    _forgetting.append(forget)


def kernel_for(problem: Problem, device: torch.device) -> TorchKernel:
    """The kernel for `problem` on a device: of a bundle in use that takes it, else as `schedules.load` chooses.

    It comes from this user's folder of kernels, or is built and written there.  Equal programs are built or loaded once
    for each device, whatever run-time extents they are for.  Problems that are alike but for a range
    (`Problem.widened`) share a build, after the first `Problem.alone` of them.  In PyTorch's benchmark mode a
    convolution that no record is of has several built for itself, and gets the fastest (`torch.benchmark`).
    Raises DeviceError for a device without kernels, UsageError if a CUDA graph is being captured and the kernel is not
    there yet, and what `schedules.load` raises.
    """
    return _kernel_for(problem, device, disk())


def prepare(problems: Iterable[Problem], device: torch.device, progress: bool | None = None) -> None:
    """Have the kernels for `problems` on a device ready, so that their calls build nothing: all cores build at once
    what is in no bundle and was not built before.

    `progress` shows a bar on standard error; by default on a terminal only.  What cannot be built is logged, and its
    call raises the error.  Raises DeviceError for a device without kernels.
    """
    arch, problems, name = arch_of(device), list(dict.fromkeys(problems)), _name(device)
    with contextlib.ExitStack() as held:
        kept = disk() if disk().takes_files() else held.enter_context(private_disk())
        asked = [problem for problem in problems if _bundle_for(problem, device) is None]
        timed: dict[Problem, list[Chosen]] = {}
        for problem in asked:
            with contextlib.suppress(SchedulesError):  # which its own build tells
                if found := _contenders(problem, device, kept):
                    timed[problem] = found
        contending = [each for found in timed.values() for each in found]
        shared = {problem: _shared(problem, arch, device, kept) for problem in asked if problem not in timed}
        lacking = missing(shared, arch, name, kept)
        failed: dict[Problem, SchedulesError] = {}
        if len(contending) + len(lacking) > 1:  # one is sooner built here than a process is started
            with _bar(len(contending) + len(lacking), progress) as done:
                build_contenders(contending, name, kept, done)
                failed = build_all(lacking, arch, name, kept, done)
        for problem in problems:
            try:
                if problem not in failed:
                    _kernel_for(problem, device, kept)
            except SchedulesError as error:
                failed[problem] = error
    for problem, why in failed.items():
        logger.warning("no kernel for %s: %s", problem, why)


@contextlib.contextmanager
def likely_to_build(devices: Iterable[torch.device]) -> Iterator[None]:
    """While the body traces a model, have compilers start where this user has no kernel yet."""
    with contextlib.ExitStack() as ended:
        for device in devices if not _bundles and disk().is_empty() else ():
            with contextlib.suppress(DeviceError):
                ended.enter_context(ready_to_build(arch_of(device)))
        look_around()
        yield


def _kernel_for(problem: Problem, device: torch.device, kept: Disk) -> TorchKernel:
    arch = arch_of(device)
    with _lock:
        bundle = _bundle_for(problem, device)
        if bundle is not None:
            return _ready((bundle.path, device), problem, lambda: _loaded(bundle), "as exported")
        chosen = _timed(problem, device, kept)
        if chosen is None:
            chosen = chosen_for(problem, arch, _name(device), kept, _shared(problem, arch, device, kept))
        return _ready((chosen.key, device), problem, lambda: _made(chosen, kept), chosen.why)


def _contenders(problem: Problem, device: torch.device, kept: Disk) -> list[Chosen]:
    """What PyTorch's benchmark mode has timed for `problem`, if it does and did not yet."""
    arch, name = arch_of(device), _name(device)
    if not (isinstance(problem, Conv2dProblem) and benchmark.is_asked(device)) or winner(problem, arch, name, kept):
        return []
    found = contenders(chosen_for(problem, arch, name, kept), benchmark.most())
    return found if len(found) > 1 else []


def _timed(problem: Problem, device: torch.device, kept: Disk) -> Chosen | None:
    """What it finds to be the fastest; None where it is off, has no choice, no kernel may run now, or nothing could be
    kept of it."""
    if not benchmark.is_asked(device) or _is_capturing() or not kept.takes_files():
        return None
    arch, name = arch_of(device), _name(device)
    if found := winner(problem, arch, name, kept):
        return found
    wanted = _contenders(problem, device, kept)
    if not wanted:
        return None
    failed = build_contenders(wanted, name, kept)
    fit: list[Chosen] = []
    kernels: list[TorchKernel] = []
    for each in wanted:
        try:
            if each.key in failed:
                raise failed[each.key]
            with _current(device):
                kernels.append(_made(each, kept))
            fit.append(each)
        except SchedulesError as why:
            logger.warning("a kernel for %s is not timed: %s", problem, why)
    if not kernels:
        return None
    try:
        best = benchmark.fastest(kernels, device)
    except torch.OutOfMemoryError:
        logger.warning("kernels for %s are not timed: their tensors do not fit beside those of the program", problem)
        return None
    return keep_winner(fit[best.number], best.why, problem, name, kept)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _shared(problem: Problem, arch: Arch, device: torch.device, kept: Disk) -> bool:
    """Whether `problem` is to share a build with its like: after the first of them, or as another process had it."""
    alike, name = _alone.setdefault((problem.widened(), device), set()), _name(device)
    if len(alike - {problem.any_extent()}) >= problem.alone:
        return True
    if is_kept(problem, arch, name, kept, True) and not is_kept(problem, arch, name, kept):
        return True
    alike.add(problem.any_extent())
    return False


def use_bundles(*folders: str | Path) -> tuple[Bundle, ...]:
    """Serve the problems of the bundles in `folders`, at any depth, with them, whatever was measured; return these.

    Of several that take a tensor, by their run-time extents, the nearest serves.  Bundles for other devices than this
    machine's are left out, with a line in the log.  Bundles named before are forgotten; without a folder, all are.
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
        for forget in _forgetting:
            forget()
    return tuple(found)


@lru_cache
def arch_of(device: torch.device) -> Arch:
    """What kernels for `device` are built for.  Raises DeviceError if there are none."""
    if device.type == "cpu":
        return parse_arch("llvm")
    here = _as_device(device) if device.type == "cuda" else None
    arch = here.newest_arch() if here else None
    if here is None or arch is None:
        what = f"{device} ({here.capability})" if here else str(device)
        raise DeviceError(f"no kernels for {what}; `schedules list` names the GPUs that there are kernels for")
    return arch.on(here.row(arch))


_lock = threading.RLock()  # TVM's compile callbacks are one set for the process
_forgetting: list[Callable[[], None]] = []
_kernels: dict[Any, TorchKernel] = {}
_alone: dict[Any, set[Problem]] = {}  # problems built for themselves, by what would serve them all
_bundles: dict[Problem, list[Bundle]] = {}  # by what they serve


def _ready(key: tuple[Any, ...], problem: Problem, make: Callable[[], TorchKernel], why: str) -> TorchKernel:
    if key not in _kernels:
        if _is_capturing():
            raise UsageError(f"no kernel for {problem} yet, and a CUDA graph is being captured; call it once before")
        with _current(key[-1]):  # where the driver loads it
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
    """By which records know the device; of AMD GPUs there are none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and not torch.version.hip else None


def _loaded(bundle: Bundle) -> TorchKernel:
    return TorchKernel(bundle.arch, bundle.arguments, (), f"bundle {bundle.path}", bundle.load(by_driver=True).function)


def _served(bundle: Bundle) -> Problem:
    any_extent = any(argument.runtime_axis is not None for argument in bundle.arguments)
    return bundle.problem.any_extent() if any_extent else bundle.problem


def _bundle_for(problem: Problem, device: torch.device) -> Bundle | None:
    here = _as_device(device)
    known = [bundle for served, found in _bundles.items() if served.covers(problem) for bundle in found]
    fitting = [bundle for bundle in known if here.runs(bundle.arch)]
    return min(fitting, key=lambda bundle: distance(problem, bundle.problem.representative()), default=None)


def _unfit(bundle: Bundle) -> str | None:
    try:
        bundle.check_device()
    except BundleError as error:
        return str(error)
    return None


def _as_device(device: torch.device) -> LocalDevice:
    if device.type != "cuda":
        return devices.cpu()
    told = torch.cuda.get_device_properties(device)
    if torch.version.hip:  # "gfx90a:sramecc+:xnack-"
        return LocalDevice("rocm", told.name, told.gcnArchName.partition(":")[0])
    return LocalDevice("cuda", told.name, f"{told.major}.{told.minor}", told.multi_processor_count)
