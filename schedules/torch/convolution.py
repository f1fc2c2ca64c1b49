"""Convolutions for PyTorch: the operators ``schedules::conv2d_nchw``, ``conv2d_nhwc``, ``conv2d_hwcn`` and
``conv2d_nchw32``.  Forward only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedules.core.errors import ArgumentError, DerivativeError
from schedules.core.problem import Argument, Problem
from schedules.core.registry import operator
from schedules.torch.kernels import DTYPES, TorchKernel, dtype_name, kernel_for, prepared, remembered
from schedules.torch.operators import custom_operator

Size = int | Sequence[int]
Shape = Sequence[int]

SIZES = ("stride", "pad", "dilation")
PACKED = "kh kw co ci"


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """`conv2d_nchw` or, where `x` is in PyTorch's channels-last format, `conv2d_nhwc` on the same memory.

    x (n, ci, h, w), weight (co, ci, kh, kw), bias (co,); residual and the result (n, co, out_h, out_w), which is in the
    format of `x`.  Give `weight` and `residual` in it too: others are copied at each call.
    """
    last = torch.channels_last
    # images of one pixel, whose results are too, lie alike in both formats
    pixels = x.shape[2:] == weight.shape[2:] == (1, 1) and _pair(padding) == (0, 0)
    if (x.is_contiguous() and not pixels) or not x.is_contiguous(memory_format=last):
        return conv2d_nchw(x, weight, bias, stride, padding, dilation, residual=residual, activation=activation)
    data, filters = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
    added = None if residual is None else residual.permute(0, 2, 3, 1)
    output = conv2d_nhwc(data, filters, bias, stride, padding, dilation, residual=added, activation=activation)
    return output.permute(0, 3, 1, 2)


def conv2d_nchw(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
    filter_layout: str = "oihw",
) -> Tensor:
    """activation(conv + bias + residual) of data (n, ci, h, w) with filter (co, ci, kh, kw): (n, co, out_h, out_w).

    All of one dtype, float32, float16 or bfloat16; sums in float32; bias (co,), residual as the result.  `activation`
    is none, relu, relu6, silu, gelu, gelu_tanh (PyTorch's gelu with approximate="tanh"), hardswish or clamp:LOW:HIGH;
    with `filter_layout` hwoi the filter is packed, (kh, kw, co, ci).

    Raises ArgumentError, ProblemError; DerivativeError in a backward pass.
    """
    sizes = _pair(stride), _pair(padding), _pair(dilation)
    return _conv2d_nchw(data, filter, bias, residual, *sizes, activation, filter_layout)


def conv2d_nhwc(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """As `conv2d_nchw` of data (n, h, w, ci), filter (co, kh, kw, ci): (n, out_h, out_w, co)."""
    sizes = _pair(stride), _pair(padding), _pair(dilation)
    return _conv2d_nhwc(data, filter, bias, residual, *sizes, activation)


def conv2d_hwcn(
    data: Tensor,
    filter: Tensor,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """As `conv2d_nchw` of data (h, w, ci, n), filter (kh, kw, ci, co): (out_h, out_w, co, n)."""
    return _conv2d_hwcn(data, filter, bias, residual, _pair(stride), _pair(padding), _pair(dilation), activation)


def conv2d_nchw32(
    data: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    alpha: float,
    beta: float = 1.0,
    gamma: float = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype = torch.int8,
) -> Tensor:
    """int8 convolution over channels in groups of 32: activation(alpha * conv + beta * bias + gamma * residual).

    data (n, ci/32, h, w, 32) and filter (ci/32, kh, kw, co, 32) int8, as `operators.conv2d_nchw32.packing` makes them,
    co a multiple of 32; bias (co,) int32; residual and the result (n, co/32, out_h, out_w, 32) of `out_dtype`: int8
    (rounded to nearest even, saturated), int32 or float32.  alpha, beta and gamma are numbers of float32.

    Raises ArgumentError, ProblemError; DerivativeError in a backward pass.
    """
    sizes = _pair(stride), _pair(padding), _pair(dilation)
    scales = alpha, beta, gamma
    return _conv2d_nchw32(data, filter, bias, residual, *sizes, *scales, activation, dtype_name(out_dtype))


def _pair(size: Size) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


@dataclass(frozen=True)
class _Convolution:
    """A custom operator: its axes of data and filter, its options, fields of the problem with their types in PyTorch's
    schemas, and the tensors it may be given besides."""

    name: str
    data: str
    filter: str
    options: tuple[tuple[str, str], ...]
    optional: tuple[str, ...] = ("bias", "residual")

    @property
    def schema(self) -> str:
        tensors = ["Tensor data", "Tensor filter", *(f"Tensor? {name}" for name in self.optional)]
        sizes = [f"int[2] {name}" for name in SIZES]
        return f"({', '.join([*tensors, *sizes, *(f'{kind} {name}' for name, kind in self.options)])}) -> Tensor"

    def axes(self, layout: str) -> tuple[str, str]:
        """Names of the axes of data and filter."""
        return self.data, PACKED if layout == "hwoi" else self.filter

    def problem(self, data: Shape, filter: Shape, dtype: torch.dtype, given: Sequence[bool], options: Any) -> Problem:
        """The problem for tensors of these shapes.  Raises ArgumentError, ProblemError."""
        fields = dict(zip((*SIZES, *(name for name, _ in self.options)), options, strict=True))
        sizes: dict[str, int] = {}
        # an extent that both have is taken from data; a filter of another is refused when it is called
        shapes = ("filter", filter), ("data", data)
        for (name, shape), axes in zip(shapes, reversed(self.axes(fields.get("filter_layout", ""))), strict=True):
            names = axes.split()
            if len(names) != len(shape):
                raise ArgumentError(f"{name} has shape {tuple(shape)}, needed ({', '.join(names)})")
            sizes.update(zip(names, shape, strict=True))
        if "groups" in sizes:
            sizes["ci"] = sizes.pop("groups") * sizes.pop("lanes")
        fields |= dict(zip(self.optional, given, strict=True)) | {"dtype": dtype_name(dtype)}
        return operator(self.name).problem(**sizes, **fields)


def _operator(convolution: _Convolution) -> Callable[..., Tensor]:
    count = len(convolution.optional)

    @remembered
    def kernel(
        data: Shape, filter: Shape, dtype: torch.dtype, device: torch.device, *rest: Any
    ) -> tuple[TorchKernel, Argument]:
        problem = convolution.problem(data, filter, dtype, rest[:count], rest[count:])
        return kernel_for(problem, device), problem.arguments()[-1]

    def parts(rest: Sequence[Any]) -> Iterator[Any]:
        """Whether each optional tensor is given, then the options, in a form that can be compared."""
        for index, part in enumerate(rest):
            yield part is not None if index < count else tuple(part) if isinstance(part, list) else part

    def run(data: Tensor, filter: Tensor, *rest: Any) -> Tensor:
        device = data.device
        chosen, result = kernel(data.shape, filter.shape, data.dtype, device, *parts(rest))
        output = torch.empty(result.shape, dtype=DTYPES[result.dtype], device=device)
        chosen(*[prepared(tensor) for tensor in (data, filter, *rest[:count]) if tensor is not None], output)
        return output

    def fake(data: Tensor, filter: Tensor, *rest: Any) -> Tensor:
        given = tuple(parts(rest))
        problem = convolution.problem(data.shape, filter.shape, data.dtype, given[:count], given[count:])
        result = problem.arguments()[-1]
        return data.new_empty(result.shape, dtype=DTYPES[result.dtype])

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise DerivativeError(f"{convolution.name} computes no gradients; call it under torch.no_grad()")

    return custom_operator(convolution.name, convolution.schema, run, fake, backward)


_ACTIVATION = (("activation", "str"),)
_FILTER_LAYOUT = (("filter_layout", "str"),)
_EPILOGUE = (("alpha", "float"), ("beta", "float"), ("gamma", "float"), *_ACTIVATION, ("out_dtype", "str"))
_conv2d_nchw = _operator(_Convolution("conv2d_nchw", "n ci h w", "co ci kh kw", (*_ACTIVATION, *_FILTER_LAYOUT)))
_conv2d_nhwc = _operator(_Convolution("conv2d_nhwc", "n h w ci", "co kh kw ci", _ACTIVATION))
_conv2d_hwcn = _operator(_Convolution("conv2d_hwcn", "h w ci n", "kh kw ci co", _ACTIVATION))
_conv2d_nchw32 = _operator(_Convolution("conv2d_nchw32", "n groups h w lanes", "groups kh kw co lanes", _EPILOGUE))
