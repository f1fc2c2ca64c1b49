"""cuDNN's convolutions (floating point through PyTorch, int8 through cuDNN's own interface) and what its callers share.

Both convolutions choose the fastest algorithm by trying (torch.backends.cudnn.benchmark; every int8 algorithm), on
random data.
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
NCHW, NHWC = 0, 1  # cudnnTensorFormat_t
_FLOAT, _INT8, _INT32 = 0, 3, 4  # cudnnDataType_t
_CROSS_CORRELATION, _TENSOR_OP_MATH = 1, 1
_ALGORITHMS = (0, 1)  # implicit GEMM, and the same with precomputed offsets: the two that take int8


def torch_module() -> Any:
    """PyTorch.  Raises ToolchainError if it is not installed."""
    try:
        import torch
    except ImportError:
        raise ToolchainError(f"PyTorch is not installed, and peers are measured through it; {INSTALL}") from None
    return torch


def convolution(problem: Conv2dProblem, channels_last: bool, dtype: str | None = None) -> Callable[[], object]:
    """A call of cuDNN's convolution of `problem`'s geometry in `dtype`, by default the problem's own.

    float16, bfloat16, or float32 without TF32.
    """
    torch = torch_module()
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
def library() -> ctypes.CDLL:
    """cuDNN 9's library, the one that PyTorch uses.  Raises ToolchainError if it is not there."""
    torch_module()
    try:
        import nvidia.cudnn as package
    except ImportError:
        raise ToolchainError(f"cuDNN's library was not found beside PyTorch; {INSTALL}") from None
    return ctypes.CDLL(str(Path(next(iter(package.__path__))) / "lib" / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)


def ok(status: int) -> None:
    """Raise RuntimeError in cuDNN's words if `status` (a cudnnStatus_t) is not success."""
    if status:
        library().cudnnGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(library().cudnnGetErrorString(status).decode())


def descriptor(create: str, set_up: str, *values: Any) -> ctypes.c_void_p:
    """A descriptor made by `create` and filled by `set_up`."""
    made = ctypes.c_void_p()
    ok(getattr(library(), create)(ctypes.byref(made)))
    ok(getattr(library(), set_up)(made, *values))
    return made


def _tensor(data: int, n: int, c: int, h: int, w: int) -> ctypes.c_void_p:
    return descriptor("cudnnCreateTensorDescriptor", "cudnnSetTensor4dDescriptor", NHWC, data, n, c, h, w)


def pointer(tensor: Any) -> ctypes.c_void_p:
    """Where a PyTorch tensor's data lies."""
    return ctypes.c_void_p(tensor.data_ptr())


@lru_cache
def handle() -> ctypes.c_void_p:
    """The process's cuDNN handle; its stream is the default one."""
    made = ctypes.c_void_p()
    ok(library().cudnnCreate(ctypes.byref(made)))
    return made


def int8_convolutions(problem: Conv2dProblem) -> list[Callable[[], object]]:
    """Calls of cuDNN's int8 NHWC convolution with int8 output, one for each algorithm that takes the problem."""
    torch = torch_module()
    p = problem
    x = torch.randint(-128, 127, (p.n, p.h, p.w, p.ci), dtype=torch.int8, device="cuda")
    weight = torch.randint(-128, 127, (p.co, p.kh, p.kw, p.ci), dtype=torch.int8, device="cuda")
    y = torch.empty((p.n, p.out_h, p.out_w, p.co), dtype=torch.int8, device="cuda")
    x_of = _tensor(_INT8, p.n, p.ci, p.h, p.w)
    y_of = _tensor(_INT8, p.n, p.co, p.out_h, p.out_w)
    filter_of = descriptor(
        "cudnnCreateFilterDescriptor", "cudnnSetFilter4dDescriptor", _INT8, NHWC, p.co, p.ci, p.kh, p.kw
    )
    conv_of = descriptor(
        "cudnnCreateConvolutionDescriptor", "cudnnSetConvolution2dDescriptor",
        *p.pad, *p.stride, *p.dilation, _CROSS_CORRELATION, _INT32,
    )  # fmt: skip
    ok(library().cudnnSetConvolutionMathType(conv_of, _TENSOR_OP_MATH))
    scale, zero = ctypes.c_float(0.001), ctypes.c_float(0.0)

    def with_algorithm(algorithm: int) -> Callable[[], object]:
        size = ctypes.c_size_t(0)
        ok(
            library().cudnnGetConvolutionForwardWorkspaceSize(
                handle(), x_of, filter_of, conv_of, y_of, algorithm, ctypes.byref(size)
            )
        )
        workspace = torch.empty(max(size.value, 1), dtype=torch.int8, device="cuda")

        def call() -> object:
            status = library().cudnnConvolutionForward(
                handle(), ctypes.byref(scale), x_of, pointer(x), filter_of, pointer(weight), conv_of, algorithm,
                pointer(workspace), size, ctypes.byref(zero), y_of, pointer(y),
            )  # fmt: skip
            ok(status)
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
