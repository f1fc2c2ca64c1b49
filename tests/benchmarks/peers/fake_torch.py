"""Enough of PyTorch to run a comparison of convolutions on this CPU: NumPy arrays with a tensor's methods, cuDNN's
convolution by the reference, and CUDA graphs that remember what was launched on the stream that is captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schedules.core.problem import Conv2dProblem
from schedules.core.reference import convolve

ALIGNMENT = 64  # that TVM asks for
CHANNELS_LAST, CONTIGUOUS = "channels_last", "contiguous_format"


class Tensor(np.ndarray):
    """A tensor on the GPU."""

    def permute(self, *axes: int) -> Tensor:
        return self.transpose(axes)

    def contiguous(self) -> Tensor:
        return tensor(self)

    def clone(self, memory_format: str) -> Tensor:
        if memory_format == CHANNELS_LAST:
            return tensor(self.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        return tensor(self)

    def t(self) -> Tensor:
        return self.T

    def to(self, target: Any, copy: bool = False) -> Tensor:
        return tensor(self) if target in ("cpu", "cuda") else self.astype(target)

    def fill_(self, value: float) -> Tensor:
        self[...] = value
        return self

    def copy_(self, source: Tensor) -> Tensor:
        self[...] = source
        return self

    def mul_(self, factor: float) -> Tensor:
        self *= factor
        return self

    def is_floating_point(self) -> bool:
        return self.dtype.kind == "f"

    def abs(self) -> Tensor:
        return np.abs(self)

    def isnan(self) -> Tensor:
        return np.isnan(self)

    def data_ptr(self) -> int:
        return int(self.ctypes.data)


def tensor(array: Any) -> Tensor:
    """A contiguous copy, aligned as device memory is."""
    array = np.asarray(array)
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape).view(Tensor)
    made[...] = array
    return made


class Stream:
    def __init__(self, number: int | None = None) -> None:
        self.cuda_stream = 77 if number is None else number


class Machine:
    """What was called: the streams, the flags that each convolution saw, the graph that is being captured."""

    def __init__(self) -> None:
        self.stream = Stream(0)
        self.capturing: CUDAGraph | None = None
        self.convolutions: list[dict[str, Any]] = []
        self.relus = 0
        self.refused: set[str] = set()  # memory formats of data that the convolution does not take
        self.launches_elsewhere = False  # whether a capture misses what is launched

    def launch(self, work: Callable[[], None]) -> None:
        """Run `work`, or keep it for the replays where a capture is under way."""
        if self.capturing is None:
            work()
        elif not self.launches_elsewhere:
            self.capturing.work.append(work)


machine = Machine()


class CUDAGraph:
    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def capture_begin(self) -> None:
        assert machine.stream.cuda_stream, "a capture on the default stream"
        machine.capturing = self

    def capture_end(self) -> None:
        machine.capturing = None

    def replay(self) -> None:
        assert machine.stream.cuda_stream == 0, "a replay that the timer's events do not enclose"
        for work in self.work:
            work()


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, machine.stream = machine.stream, stream
    try:
        yield
    finally:
        machine.stream = before


def memory_format(*tensors: Tensor) -> str:
    """By the strides of any, as PyTorch tells; those of an extent of 1 too."""
    return CHANNELS_LAST if any(x.strides[1] < x.strides[3] for x in tensors) else CONTIGUOUS


def conv2d(x: Tensor, weight: Tensor, bias: None, stride: Any, padding: Any, dilation: Any) -> Tensor:
    cudnn, found = module.backends.cudnn, memory_format(x, weight)
    if found in machine.refused:
        raise RuntimeError(f"no algorithm for {found}\nand more")
    machine.convolutions.append({"format": found, "tf32": cudnn.allow_tf32, "benchmark": cudnn.benchmark})
    n, ci, h, w = x.shape
    co, _, kh, kw = weight.shape
    problem = Conv2dProblem(n, h, w, ci, co, kh, kw, stride, padding, dilation)
    y = tensor(np.empty((n, co, problem.out_h, problem.out_w), x.dtype))
    machine.launch(lambda: y.fill_(convolve(problem, x, weight)[0]))
    return y


def pad(x: Tensor, amounts: Sequence[int]) -> Tensor:
    pairs = [tuple(amounts[i : i + 2]) for i in range(0, len(amounts), 2)][::-1]
    return tensor(np.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs))


class OutOfMemoryError(RuntimeError):
    pass


def _module() -> Any:
    made: Any = ModuleType("torch")
    made.float16, made.float32, made.float64 = np.float16, np.float32, np.float64
    made.int8, made.uint8 = np.int8, np.uint8
    made.channels_last, made.contiguous_format = CHANNELS_LAST, CONTIGUOUS
    made.OutOfMemoryError = OutOfMemoryError
    made.from_numpy = tensor
    made.empty = lambda shape, dtype, device: tensor(np.zeros(shape, dtype))
    made.randn = lambda shape, dtype=np.float32, device="": tensor(
        np.random.default_rng(0).standard_normal(shape).astype(dtype)
    )
    made.randint = lambda low, high, shape, dtype, device: tensor(np.ones(shape, dtype))
    made._int_mm = lambda a, b: a @ b
    made.nn = SimpleNamespace(functional=SimpleNamespace(conv2d=conv2d, pad=pad))
    made.backends = SimpleNamespace(
        cudnn=SimpleNamespace(allow_tf32=True, benchmark=False),
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
    )
    made.cuda = SimpleNamespace(
        CUDAGraph=CUDAGraph,
        Stream=Stream,
        stream=on_stream,
        current_stream=lambda: machine.stream,
        synchronize=lambda: None,
        empty_cache=lambda: None,
    )
    return made


module: Any = _module()


def _relu(tensor: Any) -> Any:
    machine.relus += 1
    return tensor


module.relu = _relu


def install(patch: pytest.MonkeyPatch) -> Machine:
    """`import torch` gives this until `patch` is undone; the returned machine is as new."""
    machine.__init__()  # type: ignore[misc]
    module.backends.cudnn.allow_tf32, module.backends.cudnn.benchmark = True, False
    patch.setitem(sys.modules, "torch", module)
    return machine
