"""cuDNN's convolutions: floating point through PyTorch, int8 through cuDNN's own interface.

Both choose the fastest algorithm by trying (torch.backends.cudnn.benchmark; every int8 algorithm), on random data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from schedules.errors import ToolchainError
from schedules.problem import Conv2dProblem

INSTALL = "pip install 'te-schedules[torch]'"
_NCHW, _NHWC = 0, 1  # cudnnTensorFormat_t
_FLOAT, _INT8, _INT32 = 0, 3, 4  # cudnnDataType_t
_CROSS_CORRELATION, _TENSOR_OP_MATH = 1, 1
_ALGORITHMS = (0, 1)  # implicit GEMM, and the same with precomputed offsets: the two that take int8


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ToolchainError(f"PyTorch is not installed, and cuDNN is measured through it; {INSTALL}") from None
    return torch


def convolution(problem: Conv2dProblem, channels_last: bool, dtype: str | None = None) -> Callable[[], object]:
    """A call of cuDNN's convolution of `problem`'s geometry in `dtype`, by default the problem's own.

    float16, bfloat16, or float32 without TF32.
    """
    torch = _torch()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    p = problem
    layout = torch.channels_last if channels_last else torch.contiguous_format
    kind = getattr(torch, dtype or p.dtype)
    x = torch.randn(p.n, p.ci, p.h, p.w, device="cuda").to(kind).contiguous(memory_format=layout)
    weight = torch.randn(p.co, p.ci, p.kh, p.kw, device="cuda").to(kind).contiguous(memory_format=layout)

    def call() -> object:
        return torch.nn.functional.conv2d(x, weight, None, p.stride, p.pad, p.dilation)

    with torch.cuda.stream(torch.cuda.default_stream()):
        call()
    return call


@lru_cache
def _library() -> ctypes.CDLL:
    _torch()
    try:
        import nvidia.cudnn as package
    except ImportError:
        raise ToolchainError(f"cuDNN's library was not found beside PyTorch; {INSTALL}") from None
    return ctypes.CDLL(str(Path(next(iter(package.__path__))) / "lib" / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)


def _ok(status: int) -> None:
    if status:
        _library().cudnnGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(_library().cudnnGetErrorString(status).decode())


def _make(create: str, set_up: str, *values: Any) -> ctypes.c_void_p:
    """A descriptor made by `create` and filled by `set_up`."""
    descriptor = ctypes.c_void_p()
    _ok(getattr(_library(), create)(ctypes.byref(descriptor)))
    _ok(getattr(_library(), set_up)(descriptor, *values))
    return descriptor


def _tensor(data: int, n: int, c: int, h: int, w: int) -> ctypes.c_void_p:
    return _make("cudnnCreateTensorDescriptor", "cudnnSetTensor4dDescriptor", _NHWC, data, n, c, h, w)


@lru_cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _ok(_library().cudnnCreate(ctypes.byref(handle)))
    return handle


def int8_convolutions(problem: Conv2dProblem) -> list[Callable[[], object]]:
    """Calls of cuDNN's int8 NHWC convolution with int8 output, one for each algorithm that takes the problem."""
    torch, library = _torch(), _library()
    p = problem
    x = torch.randint(-128, 127, (p.n, p.h, p.w, p.ci), dtype=torch.int8, device="cuda")
    weight = torch.randint(-128, 127, (p.co, p.kh, p.kw, p.ci), dtype=torch.int8, device="cuda")
    y = torch.empty((p.n, p.out_h, p.out_w, p.co), dtype=torch.int8, device="cuda")
    x_of = _tensor(_INT8, p.n, p.ci, p.h, p.w)
    y_of = _tensor(_INT8, p.n, p.co, p.out_h, p.out_w)
    filter_of = _make("cudnnCreateFilterDescriptor", "cudnnSetFilter4dDescriptor", _INT8, _NHWC, p.co, p.ci, p.kh, p.kw)
    conv_of = _make(
        "cudnnCreateConvolutionDescriptor", "cudnnSetConvolution2dDescriptor",
        *p.pad, *p.stride, *p.dilation, _CROSS_CORRELATION, _INT32,
    )  # fmt: skip
    _ok(library.cudnnSetConvolutionMathType(conv_of, _TENSOR_OP_MATH))
    scale, zero = ctypes.c_float(0.001), ctypes.c_float(0.0)

    def pointer(tensor: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    def with_algorithm(algorithm: int) -> Callable[[], object]:
        size = ctypes.c_size_t(0)
        _ok(
            library.cudnnGetConvolutionForwardWorkspaceSize(
                _handle(), x_of, filter_of, conv_of, y_of, algorithm, ctypes.byref(size)
            )
        )
        workspace = torch.empty(max(size.value, 1), dtype=torch.int8, device="cuda")

        def call() -> object:
            status = library.cudnnConvolutionForward(
                _handle(), ctypes.byref(scale), x_of, pointer(x), filter_of, pointer(weight), conv_of, algorithm,
                pointer(workspace), size, ctypes.byref(zero), y_of, pointer(y),
            )  # fmt: skip
            _ok(status)
            return y

        call()
        torch.cuda.synchronize()
        return call

    found = []
    for algorithm in _ALGORITHMS:
        try:
            found.append(with_algorithm(algorithm))
        except RuntimeError:
            continue  # cuDNN says that this algorithm does not take the problem
    if not found:
        raise ToolchainError(f"this cuDNN has no int8 NHWC convolution for {problem}")
    return found
