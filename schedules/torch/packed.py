"""int8 over channels in groups of 32 for PyTorch: packing, unpacking and pooling.  Forward only.

The operators ``schedules::pack_nchw32``, ``unpack_nchw32`` and ``pool2d_nchw32``; convolutions of such tensors are
`convolution.conv2d_nchw32`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from schedules.core.errors import ArgumentError, DerivativeError
from schedules.core.problem import Problem
from schedules.operators.conv2d_nchw32.packing import GROUP, groups
from schedules.operators.pack_nchw32.definition import PackProblem
from schedules.operators.pool2d.definition import PoolProblem
from schedules.torch.convolution import Size, looking, pair
from schedules.torch.kernels import DTYPES, TorchKernel, dtype_name, kernel_for, remembered
from schedules.torch.operators import Launch, custom_operator

PACKED = "(n, groups, h, w, 32)"
SCALES = ("scale", "alpha", "gamma")


def pack_nchw32(x: Tensor, scale: Tensor | float, lanes: int = GROUP) -> Tensor:
    """round(scale * x) as int8 in groups of 32 channels, (n, ceil(c/32), h, w, 32), zeros in the channels added; of an
    image's few channels 4, 8 or 16 `lanes` in place of 32 are less to move.

    x (n, c, h, w), contiguous or channels-last, of float32, float16 or bfloat16; `scale` is a float32 tensor (1,) on
    its device, or a number.  Rounded to nearest even, saturated.  Raises ArgumentError, ProblemError.
    """
    return _pack(x, _scale(scale, x), lanes)


def unpack_nchw32(
    packed: Tensor,
    channels: int,
    scale: Tensor | float,
    *,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """The way back: scale * packed as (n, channels, h, w) of `dtype`, contiguous or channels-last.

    Raises ArgumentError, ProblemError.
    """
    return _unpack(packed, _scale(scale, packed), channels, dtype_name(dtype), memory_format is torch.channels_last)


def pool2d_nchw32(
    data: Tensor,
    kernel: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    kind: str = "max",
    residual: Tensor | None = None,
    alpha: Tensor | float | None = None,
    gamma: Tensor | float | None = None,
    activation: str = "none",
) -> Tensor:
    """int8 pooling over channels in groups of 32: the maximum of each window, or activation(alpha * sum + gamma *
    residual) with `kind` average, to nearest even and saturated.

    data (n, groups, h, w, 32), residual and the result (n, groups, out_h, out_w, 32), all int8; `stride` is by default
    the kernel; `alpha`, which holds the division by the window's pixels, and `gamma` are numbers or float32 tensors
    (1,).  Raises ArgumentError, ProblemError.
    """
    if kind == "average" and alpha is None or residual is not None and gamma is None:
        raise ArgumentError("an average needs alpha, and a residual gamma")
    factors = [None if factor is None else _scale(factor, data) for factor in (alpha, gamma)]
    sizes = [pair(size) for size in (kernel, kernel if stride is None else stride, padding, dilation)]
    return _pool(data, residual, *factors, *sizes, kind, activation)


def _scale(value: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not 0 < value < float("inf"):
        raise ArgumentError(f"a scale of {value} is not positive and finite")
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def _extents(name: str, tensor: Tensor, axes: str) -> Sequence[Any]:
    if tensor.dim() != axes.count(",") + 1 or axes == PACKED and tensor.shape[-1] != GROUP:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}, needed {axes}")
    return tensor.shape


def _operator(
    name: str,
    schema: str,
    bind: Callable[..., Launch],
    key: Callable[..., Hashable],
    fake: Callable[..., Tensor],
    strided: bool = False,
) -> Callable[..., Tensor]:
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise DerivativeError(f"{name} computes no gradients; call it under torch.no_grad()")

    tensors = re.findall(r"Tensor\??\s+(\w+)", schema)

    def looking_bind(*arguments: Any) -> Launch:
        given = [word for word, tensor in zip(tensors, arguments, strict=False) if tensor is not None]
        return looking(bind(*arguments), given, SCALES)

    return custom_operator(name, schema, looking_bind, key, fake, backward, strided=strided)


@remembered
def _kernel(problem: type[Problem], device: torch.device, *fields: tuple[str, Any]) -> TorchKernel:
    return kernel_for(problem(**dict(fields)), device)


def _empty_packed(x: Tensor, scale: Tensor, lanes: int) -> Tensor:
    n, c, h, w = _extents("x", x, "(n, c, h, w)")
    return x.new_empty((n, -(-c // lanes), h, w, lanes), dtype=torch.int8)


def _bind_pack(x: Tensor, scale: Tensor, lanes: int) -> Launch:
    if not x.numel():
        return lambda x, scale: _empty_packed(x, scale, lanes)
    n, c, h, w = _extents("x", x, "(n, c, h, w)")
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    fields = dict(n=n, h=h, w=w, ci=c, dtype=dtype_name(x.dtype), layout="nhwc" if last else "nchw", lanes=lanes)
    shape = n, -(-c // lanes), h, w, lanes
    launch = _kernel(PackProblem, x.device, *fields.items()).launch(x.device, (shape, torch.int8))
    if last:
        return lambda x, scale: launch(x.permute(0, 2, 3, 1), scale.contiguous())
    return lambda x, scale: launch(x.contiguous(), scale.contiguous())


def _empty_plain(packed: Tensor, scale: Tensor, channels: int, dtype: str, last: bool) -> Tensor:
    n, count, h, w, _ = _extents("packed", packed, PACKED)
    if groups(channels) != count:
        raise ArgumentError(f"{channels} channels are {groups(channels)} groups of 32, and packed has {count}")
    memory_format = torch.channels_last if last else torch.contiguous_format
    return torch.empty((n, channels, h, w), dtype=DTYPES[dtype], device=packed.device, memory_format=memory_format)


def _bind_unpack(packed: Tensor, scale: Tensor, channels: int, dtype: str, last: bool) -> Launch:
    plain = _empty_plain(packed, scale, channels, dtype, last)
    if not plain.numel():
        return lambda packed, scale: _empty_plain(packed, scale, channels, dtype, last)
    n, _, h, w, _ = packed.shape
    fields = dict(n=n, h=h, w=w, ci=channels, dtype=dtype, layout="nhwc" if last else "nchw", unpack=True)
    shape = (n, h, w, channels) if last else (n, channels, h, w)
    launch = _kernel(PackProblem, packed.device, *fields.items()).launch(packed.device, (shape, DTYPES[dtype]))
    if last:
        return lambda packed, scale: launch(packed, scale).permute(0, 3, 1, 2)
    return launch


def _empty_pooled(
    data: Tensor,
    residual: Tensor | None,
    alpha: Tensor | None,
    gamma: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    kind: str,
    activation: str,
) -> Tensor:
    n, count, *sides, lanes = _extents("data", data, PACKED)
    out = [
        (side + 2 * border - spread * (size - 1) - 1) // step + 1
        for side, border, spread, size, step in zip(sides, pad, dilation, kernel, stride, strict=True)
    ]
    return data.new_empty((n, count, *out, lanes))


def _bind_pool(data: Tensor, *rest: Any) -> Launch:
    residual, alpha, gamma, kernel, stride, pad, dilation, kind, activation = rest
    options = rest[3:]
    if not data.numel():
        return lambda data, *terms: _empty_pooled(data, None, None, None, *options)
    n, count, h, w, _ = _extents("data", data, PACKED)
    fields = dict(
        n=n, h=h, w=w, ci=count * GROUP, kh=kernel[0], kw=kernel[1], stride=tuple(stride), pad=tuple(pad),
        dilation=tuple(dilation), dtype=dtype_name(data.dtype), kind=kind, residual=residual is not None,
        activation=activation,
    )  # fmt: skip
    found = _kernel(PoolProblem, data.device, *fields.items())
    shape = tuple(_empty_pooled(data, None, None, None, *options).shape)
    launch = found.launch(data.device, (shape, data.dtype))
    if alpha is None or kind == "average":
        return launch
    number = 1 + (residual is not None)  # of alpha, which a maximum has no use for
    return lambda *tensors: launch(*tensors[:number], *tensors[number + 1 :])


def _key_pool(data: Tensor, *rest: Any) -> Hashable:
    residual, alpha, gamma, kernel, stride, pad, dilation, *words = rest
    given = residual is None, alpha is None, gamma is None
    return data.shape, *given, *kernel, *stride, *pad, *dilation, *words


_pack = _operator(
    "pack_nchw32",
    "(Tensor x, Tensor scale, int lanes) -> Tensor",
    _bind_pack,
    lambda x, scale, lanes: (x.shape, lanes),
    _empty_packed,
    strided=True,
)
_unpack = _operator(
    "unpack_nchw32",
    "(Tensor packed, Tensor scale, int channels, str dtype, bool last) -> Tensor",
    _bind_unpack,
    lambda packed, scale, *options: (packed.shape, *options),
    _empty_plain,
)
_pool = _operator(
    "pool2d_nchw32",
    "(Tensor data, Tensor? residual, Tensor? alpha, Tensor? gamma, int[2] kernel, int[2] stride, int[2] pad, "
    "int[2] dilation, str kind, str activation) -> Tensor",
    _bind_pool,
    _key_pool,
    _empty_pooled,
)
