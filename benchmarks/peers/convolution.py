"""Convolutions by cuDNN: through PyTorch, and by one algorithm (int8, and float32's direct ones) by cuDNN's interface.

Every peer of `PEERS` takes a problem and its tensors by argument name (PyTorch tensors on the GPU, shapes and dtypes of
``problem.arguments()``), brings them into its own layout and dtype, and returns a call on PyTorch's current stream that
computes the convolution alone, without bias or activation.  Its output is (n, co, out_h, out_w) however it lies;
`placed` brings it into the problem's layout.

PyTorch tries the algorithms that cuDNN's heuristics put first (torch.backends.cudnn.benchmark_limit of them) and keeps
the fastest.  The two of implicit GEMM are peers each for itself: in int8, which nothing else takes, and in float32,
where PyTorch's choice may do fewer multiplications (Winograd, FFT).
"""

from __future__ import annotations

import ctypes
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import cudnn
from benchmarks.peers.comparison import Call
from schedules.core.arithmetic import TF32, Arithmetic
from schedules.core.epilogue import Activation
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.problem import Conv2dProblem
from schedules.core.registry import operator_of
from schedules.operators.conv2d_nchw32.packing import GROUP

Tensors = Mapping[str, Any]

# where (image, channel, row, column) lie in an operator's data and output, and so (filter, channel, row, column) in its
# filter
_AXES: Mapping[str, tuple[int, int, int, int]] = {
    "conv2d_nchw": (0, 1, 2, 3),
    "conv2d_nhwc": (0, 3, 1, 2),
    "conv2d_hwcn": (3, 2, 0, 1),
}

OPERATORS = (*_AXES, "conv2d_nchw32")  # that the peers know

_CROSS_CORRELATION, _TENSOR_OP_MATH, _FMA_MATH = 1, 1, 3


@dataclass(frozen=True)
class Peer:
    """cuDNN's convolution in `layout` (nhwc or nchw) and `arithmetic` for problems of the dtypes `takes`.

    `algorithm` is a cudnnConvolutionFwdAlgo_t; None where PyTorch chooses.
    """

    layout: str
    arithmetic: str  # a dtype, or tf32
    takes: tuple[str, ...]
    algorithm: int | None = None

    @property
    def name(self) -> str:
        short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(self.arithmetic, self.arithmetic)
        return " ".join(["cudnn", self.layout, short, *([] if self.algorithm is None else [f"algo {self.algorithm}"])])

    @property
    def dtype(self) -> str:
        return "float32" if self.arithmetic == "tf32" else self.arithmetic

    def counts(self, ours: Arithmetic) -> bool:
        """Whether a result computed in the arithmetic `ours` is measured against it: not if it is less exact."""
        return self.arithmetic != TF32.name or ours.error >= TF32.error

    @property
    def far(self) -> float:
        """An error, in units of the tolerance, beyond which it computes something else.

        An int8 that is rounded the other way is 2, TF32 reaches about 200 where sums are short and algorithms that
        multiply less some tens; data that is laid out wrongly is hundreds in int8, thousands in floating point.
        """
        return 8.0 if self.arithmetic == "int8" else 1000.0

    def same_work(self, problem: Conv2dProblem) -> bool:
        """Whether its results are to be compared with the problem's reference."""
        return self.dtype == problem.dtype


# int8 problems beside float16 too: where cuDNN's int8 collapses, that is its best
_FLOATING = [
    Peer(layout, dtype, (dtype, "int8") if (layout, dtype) == ("nhwc", "float16") else (dtype,))
    for dtype in ("float16", "bfloat16", "float32")
    for layout in ("nhwc", "nchw")
]
_TF32 = [Peer(layout, TF32.name, ("float32",)) for layout in ("nhwc", "nchw")]
# implicit GEMM, and the same with precomputed offsets
_DIRECT = [
    Peer(layout, dtype, (dtype,), algorithm)
    for layout, dtype in (("nhwc", "int8"), ("nhwc", "float32"), ("nchw", "float32"))
    for algorithm in (0, 1)
]
PEERS: dict[str, Peer] = {peer.name: peer for peer in (*_DIRECT, *_FLOATING, *_TF32)}


def peers_of(problem: Conv2dProblem, patterns: Sequence[str] = ("*",)) -> list[Peer]:
    """The peers for the problem's dtype whose name fits one of `patterns`."""
    return [
        peer
        for name, peer in PEERS.items()
        if problem.dtype in peer.takes and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def require_patterns(patterns: Sequence[str]) -> None:
    """Raise UnknownNameError for a pattern that no peer's name fits."""
    for pattern in patterns:
        if not fnmatch.filter(PEERS, pattern):
            raise UnknownNameError("peer", pattern, PEERS)


def call_of(peer: Peer, problem: Conv2dProblem, tensors: Tensors) -> Call:
    """The call of `peer`.  Raises UsageError for what cuDNN does not fuse here, ToolchainError without PyTorch or
    cuDNN, RuntimeError if cuDNN refuses the problem."""
    if not is_plain(problem):
        raise UsageError("cuDNN fuses nothing here; compare without bias, residual, activation and scales at run time")
    return (_by_pytorch if peer.algorithm is None else _by_algorithm)(peer, problem, tensors)


def is_plain(problem: Conv2dProblem) -> bool:
    """Whether nothing is fused but the scale of an int8 output."""
    return not problem.epilogue.operands and problem.epilogue.activation == Activation()


def operands(problem: Conv2dProblem, tensors: Tensors) -> tuple[Any, Any]:
    """Data (n, ci, h, w) and filter (co, ci, kh, kw), views where the layout has one."""
    p, name = problem, operator_of(problem).name
    data, weight = tensors["data"], tensors["filter"]
    if name in _AXES:
        packed = getattr(p, "packed", False)  # (kh, kw, co, ci)
        return data.permute(*_AXES[name]), weight.permute(*((2, 3, 0, 1) if packed else _AXES[name]))
    _require_grouped(name)
    # (n, ci/32, h, w, 32) and (ci/32, kh, kw, co', 32)
    data = data.permute(0, 1, 4, 2, 3).reshape(p.n, -1, p.h, p.w)
    weight = weight.permute(3, 0, 4, 1, 2).reshape(weight.shape[3], -1, p.kh, p.kw)
    return data[:, : p.ci], weight[: p.co, : p.ci]


def placed(problem: Conv2dProblem, output: Any) -> Any:
    """An output (n, co, out_h, out_w) in the problem's layout."""
    p, name = problem, operator_of(problem).name
    if name in _AXES:
        return output.permute(*(_AXES[name].index(axis) for axis in range(4)))
    _require_grouped(name)
    missing = -p.co % GROUP
    padded = cudnn.torch_module().nn.functional.pad(output, (0, 0, 0, 0, 0, missing)) if missing else output
    return padded.reshape(p.n, -1, GROUP, p.out_h, p.out_w).permute(0, 1, 3, 4, 2)


def _require_grouped(name: str) -> None:
    if name != "conv2d_nchw32":
        raise UsageError(f"the layout of {name} is not known to the peers; add it to peers/convolution.py")


def _by_pytorch(peer: Peer, problem: Conv2dProblem, tensors: Tensors) -> Call:
    """PyTorch's conv2d.  For a problem of another dtype the data is normal, as inputs of `peer.dtype` would be."""
    torch = cudnn.torch_module()
    p, dtype = problem, getattr(torch, peer.dtype)
    memory = torch.channels_last if peer.layout == "nhwc" else torch.contiguous_format
    if peer.same_work(p):
        given = operands(p, tensors)
    else:
        shapes = ((p.n, p.ci, p.h, p.w), (p.co, p.ci, p.kh, p.kw))
        given = tuple(torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes)
    # copies, for PyTorch goes by strides, and those of a view of a 1x1 filter may be another layout's
    x, weight = (tensor.clone(memory_format=memory) for tensor in given)

    def call() -> Sequence[Any]:
        # read when the convolution is called; another peer may have set it since
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = peer.arithmetic == "tf32"
        return (torch.nn.functional.conv2d(x, weight, None, p.stride, p.pad, p.dilation),)

    return call


def _by_algorithm(peer: Peer, problem: Conv2dProblem, tensors: Tensors) -> Call:
    """cuDNN's convolution by `peer.algorithm`: of int8 with int8 output, scaled as the problem's, or of float32."""
    p, out_dtype = problem, problem.epilogue.out_dtype
    integer = peer.dtype == "int8"
    if out_dtype != peer.dtype:
        raise UsageError(
            f"cuDNN's {peer.dtype} convolution gives {peer.dtype}, not {out_dtype}; compare that out_dtype"
        )
    torch, library = cudnn.torch_module(), cudnn.library()
    last = peer.layout == "nhwc"
    form, dtype, sums = (
        cudnn.NHWC if last else cudnn.NCHW,
        *((cudnn.INT8, cudnn.INT32) if integer else (cudnn.FLOAT,) * 2),
    )
    x, weight = ((tensor.permute(0, 2, 3, 1) if last else tensor).contiguous() for tensor in operands(p, tensors))
    shape = (p.n, p.out_h, p.out_w, p.co) if last else (p.n, p.co, p.out_h, p.out_w)
    y = torch.empty(shape, dtype=getattr(torch, peer.dtype), device="cuda")

    def tensor_of(c: int, h: int, w: int) -> ctypes.c_void_p:
        return cudnn.descriptor("cudnnCreateTensorDescriptor", "cudnnSetTensor4dDescriptor", form, dtype, p.n, c, h, w)

    x_of, y_of = tensor_of(p.ci, p.h, p.w), tensor_of(p.co, p.out_h, p.out_w)
    filter_of = cudnn.descriptor(
        "cudnnCreateFilterDescriptor", "cudnnSetFilter4dDescriptor", dtype, form, p.co, p.ci, p.kh, p.kw
    )
    conv_of = cudnn.descriptor(
        "cudnnCreateConvolutionDescriptor", "cudnnSetConvolution2dDescriptor",
        *p.pad, *p.stride, *p.dilation, _CROSS_CORRELATION, sums,
    )  # fmt: skip
    cudnn.ok(library.cudnnSetConvolutionMathType(conv_of, _TENSOR_OP_MATH if integer else _FMA_MATH))
    size = ctypes.c_size_t(0)
    cudnn.ok(
        library.cudnnGetConvolutionForwardWorkspaceSize(
            cudnn.handle(), x_of, filter_of, conv_of, y_of, peer.algorithm, ctypes.byref(size)
        )
    )
    workspace = torch.empty(max(size.value, 1), dtype=torch.int8, device="cuda")
    scale, zero = ctypes.c_float(p.epilogue.scale), ctypes.c_float(0.0)
    output = y.permute(0, 3, 1, 2) if last else y

    def call() -> Sequence[Any]:
        status = library.cudnnConvolutionForward(
            cudnn.handle(), ctypes.byref(scale), x_of, cudnn.pointer(x), filter_of, cudnn.pointer(weight), conv_of,
            peer.algorithm, cudnn.pointer(workspace), size, ctypes.byref(zero), y_of, cudnn.pointer(y),
        )  # fmt: skip
        cudnn.ok(status)
        return (output,)

    return call
