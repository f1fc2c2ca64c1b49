"""Softmax for PyTorch: the operators ``schedules::softmax``, ``dropout_softmax`` and ``softmax_grad``.

Gradients are the operator's own kernels, from the output that the forward pass wrote, and the dropout of the backward
pass is the tensor of zeros and ones that the forward pass was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from schedules.core.errors import ArgumentError, DerivativeError
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.torch.kernels import TorchKernel, dtype_name, kernel_for, remembered
from schedules.torch.operators import Launch, custom_operator

Shape = Sequence[int]


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """softmax(scale * x + mask) over the axis `dim`: a tensor of the shape and dtype of `x`.

    `x` is float32, float16 or bfloat16, computed in float32; of any shape and strides, though one that is not
    contiguous, or a `dim` other than the last, costs a copy.  `mask` has x's dtype and is added, or is bool, True where
    an element takes part, and broadcasts to x's shape: of one row, (cols,), it is read as it is, any other is written
    out to x's shape first.  Differentiable in `x` and `mask`.

    In place of a mask, along the last axis: with `lengths`, int32 and of the shape of x without that axis, only the
    first so many elements of each row take part (from 0 to all; not tested); with `causal`, of matrices of queries by
    keys, the last two axes, those up to the query's own key, where the last query's is the last key.  The others are as
    ``x.masked_fill(..., -inf)`` would have them, in results and gradients; no mask is made, and most are not read.

    Raises ArgumentError, ProblemError.
    """
    return _forward("softmax", x, dim, scale, mask, lengths, causal)


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """The logarithm of `softmax`, with the same arguments."""
    return _forward("log_softmax", x, dim, scale, mask, lengths, causal)


def dropout_softmax(
    x: Tensor,
    p: float,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    drop: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """`softmax` with each element zeroed with probability `p`, and else divided by 1 - p, in the same kernel.

    `drop` chooses the elements: uint8 of x's shape, 0 to zero and 1 to keep.  By default it is drawn with PyTorch's
    generator of x's device.  Not `training`, or with p = 0, nothing is dropped.

    Raises ArgumentError, ProblemError.
    """
    if not 0 <= p < 1:
        raise ArgumentError(f"p={p} is not a probability from 0 up to, and not including, 1")
    if not training or p == 0:
        return softmax(x, dim, scale=scale, mask=mask)
    last, mask = _rows_last(x, dim, mask)
    keep = round(1 - p, 12)  # 0.3, not 0.30000000000000004, is what a bundle is exported for
    if drop is None:
        drop = torch.empty(last.shape, dtype=torch.uint8, device=x.device).bernoulli_(keep)
    elif last is not x:
        drop = drop.movedim(dim, -1)
    output = _dropout_softmax(last, mask, drop, "softmax", scale, keep)[1]
    return output if last is x else output.movedim(-1, dim)


def _forward(
    function: str,
    x: Tensor,
    dim: int,
    scale: float,
    mask: Tensor | None,
    lengths: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    if lengths is not None or causal:
        return _cut(function, x, dim, scale, mask, lengths, causal)
    if mask is None and dim == -1 and x.dim():
        return _softmax(x, None, function, scale, 0)
    last, mask = _rows_last(x, dim, mask)
    y = _softmax(last, mask, function, scale, 0)
    return y if last is x else y.movedim(-1, dim)


def _cut(
    function: str, x: Tensor, dim: int, scale: float, mask: Tensor | None, lengths: Tensor | None, causal: bool
) -> Tensor:
    """`_forward` of rows of which only the first elements take part."""
    if dim not in (-1, x.dim() - 1):
        raise ArgumentError(f"dim={dim} is not the last axis, which lengths and causal are along; transpose x")
    if (mask is not None) + (lengths is not None) + causal != 1:
        raise ArgumentError("mask, lengths and causal exclude one another; give one of them")
    if lengths is None:
        if x.dim() < 2:
            raise ArgumentError(f"causal is for (..., queries, keys), not for a tensor of shape {tuple(x.shape)}")
        return _softmax(x, None, function, scale, x.shape[-2])
    if lengths.dtype is not torch.int32 or lengths.shape != x.shape[:-1]:
        shapes = f"{lengths.dtype} {tuple(lengths.shape)} beside x of shape {tuple(x.shape)}"
        raise ArgumentError(f"lengths are torch.int32, one for each row of x, not {shapes}")
    return _softmax(x, lengths.reshape(-1), function, scale, 0)


def _rows_last(x: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`x` with the axis `dim` last, which is `x` itself if it is, and `mask` likewise: (cols,) or of x's shape."""
    axes = x.dim()
    if not -axes <= dim < axes:
        raise ArgumentError(f"dim={dim} is no axis of a tensor of shape {tuple(x.shape)}")
    axis = dim if dim < 0 else dim - axes
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=mask.device).masked_fill_(~mask, -math.inf)
        if mask.dim() >= -axis and mask.shape[axis] == mask.numel() == x.shape[axis]:
            mask = mask if mask.dim() == 1 else mask.reshape(-1)
        elif mask.shape != x.shape or axis != -1:
            try:
                mask = mask.expand(x.shape).movedim(axis, -1)
            except RuntimeError:
                shape = tuple(mask.shape)
                raise ArgumentError(f"mask of shape {shape} does not broadcast to x's, {tuple(x.shape)}") from None
    return x if axis == -1 else x.movedim(axis, -1), mask


@remembered
def _kernel(
    function: str,
    shape: Shape,
    dtype: torch.dtype,
    scale: float,
    mask: str,
    keep: float,
    queries: int,
    device: torch.device,
) -> TorchKernel:
    return kernel_for(problem_of(function, shape, dtype, scale, mask, keep, queries), device)


def problem_of(
    function: str,
    shape: Shape,
    dtype: torch.dtype,
    scale: float = 1.0,
    mask: str = "none",
    keep: float = 1.0,
    queries: int = 0,
) -> SoftmaxProblem:
    """The problem of a tensor of this shape, whose last axis is a row.  Raises ProblemError."""
    *outer, cols = shape
    return SoftmaxProblem(math.prod(outer), cols, function, dtype_name(dtype), scale, mask, keep, queries=queries)


def _bind(
    function: str,
    inputs: Sequence[Tensor],
    scale: float,
    mask: str = "none",
    keep: float = 1.0,
    outputs: int = 1,
    queries: int = 0,
) -> Launch:
    """The kernel for inputs of shape (*, cols), but for a mask "cols" or "lengths", which is the second."""
    x, row = inputs[0], 1 if mask in ("cols", "lengths") else None  # the tensor that has one row, or column
    shape = x.shape
    for number, tensor in enumerate(inputs):
        flat = (x.numel() // max(1, shape[-1]),) if mask == "lengths" else shape[-1:]
        if tensor.shape != (flat if number == row else shape):
            raise ArgumentError(f"a tensor of shape {tuple(tensor.shape)} beside one of {tuple(shape)}")
    if not x.numel():
        empty = _like if outputs == 1 else _two_like
        return empty
    as_rows = x.numel() // shape[-1], shape[-1]
    kernel = _kernel(function, shape, x.dtype, scale, mask, keep, queries, x.device)
    launch = kernel.launch(x.device, *[(as_rows, x.dtype)] * outputs)
    if len(shape) == 2:
        return launch

    def viewed(*tensors: Tensor) -> Any:
        made = launch(*[tensor if number == row else tensor.view(as_rows) for number, tensor in enumerate(tensors)])
        return made.view(shape) if outputs == 1 else tuple([each.view(shape) for each in made])

    return viewed


def _masked(x: Tensor, mask: Tensor | None) -> tuple[list[Tensor], str]:
    """The inputs `x` and `mask`, and the problem's name of the mask."""
    if mask is None:
        return [x], "none"
    return [x, mask], "lengths" if mask.dtype is torch.int32 else "cols" if mask.dim() == 1 else "full"


def _bind_softmax(x: Tensor, mask: Tensor | None, function: str, scale: float, queries: int = 0) -> Launch:
    inputs, kind = _masked(x, mask)
    return _bind(function, inputs, scale, "causal" if queries else kind, queries=queries)


def _bind_dropout_softmax(
    x: Tensor, mask: Tensor | None, drop: Tensor, function: str, scale: float, keep: float
) -> Launch:
    inputs, kind = _masked(x, mask)
    return _bind(function, [*inputs, drop], scale, kind, keep, outputs=2)


def _bind_softmax_grad(y: Tensor, dy: Tensor, drop: Tensor | None, function: str, scale: float, keep: float) -> Launch:
    return _bind(f"{function}_grad", [y, dy] if drop is None else [y, dy, drop], scale, "none", keep)


def _like(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _two_like(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _gradients(ctx: Any, y: Tensor, dy: Tensor, drop: Tensor | None, keep: float) -> tuple[Tensor, Tensor | None]:
    """dx, and the mask's gradient if it is needed: dx before it is multiplied by scale."""
    if ctx.mask_axes is None:
        return _softmax_grad(y, dy, drop, ctx.function, ctx.scale, keep), None
    dv = _softmax_grad(y, dy, drop, ctx.function, 1.0, keep)
    return dv * ctx.scale, dv.sum(ctx.mask_axes) if ctx.mask_axes else dv


def _keep_for_gradient(ctx: Any, x: Tensor, mask: Tensor | None, function: str, scale: float) -> None:
    ctx.function, ctx.scale = function, scale
    ctx.mask_axes = None  # that the mask's gradient is summed over, if there is one
    if mask is not None and ctx.needs_input_grad[1]:
        ctx.mask_axes = tuple(range(x.dim() - mask.dim()))


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mask, function, scale, *queries = inputs  # PyTorch leaves out what is as by default
    _keep_for_gradient(ctx, x, mask, function, scale)
    # a logarithm of what takes no part hands its gradient on, where that of x has none
    ctx.cut = function == "log_softmax" and (any(queries) or (mask is not None and mask.dtype is torch.int32))
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    dx, dmask = _gradients(ctx, y, dy, None, 1.0)
    gradients = dx.masked_fill(y == -math.inf, 0) if ctx.cut else dx, dmask, None, None, None
    return gradients[: len(ctx.needs_input_grad)]


def _dropout_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, mask, drop, function, scale, ctx.keep = inputs
    _keep_for_gradient(ctx, x, mask, function, scale)
    ctx.save_for_backward(output[0], drop)
    ctx.set_materialize_grads(False)


def _dropout_backward(ctx: Any, dy: Tensor | None, doutput: Tensor | None) -> tuple[Any, ...]:
    y, drop = ctx.saved_tensors
    dx = dmask = None
    for gradient, kept, keep in ((dy, None, 1.0), (doutput, drop, ctx.keep)):
        if gradient is not None:
            more_x, more_mask = _gradients(ctx, y, gradient, kept, keep)
            dx = more_x if dx is None else dx + more_x
            dmask = more_mask if dmask is None or more_mask is None else dmask + more_mask
    return dx, dmask, None, None, None, None


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    raise DerivativeError("softmax has no second derivative here; use torch.softmax where one is needed")


_softmax = custom_operator(
    "softmax",
    "(Tensor x, Tensor? mask, str function, float scale, int queries=0) -> Tensor",
    _bind_softmax,
    lambda x, mask, *options: (x.shape, mask is None, *options),
    _like,
    _softmax_backward,
    _softmax_context,
    "float32",
)
_dropout_softmax = custom_operator(
    "dropout_softmax",
    "(Tensor x, Tensor? mask, Tensor drop, str function, float scale, float keep) -> (Tensor y, Tensor output)",
    _bind_dropout_softmax,
    lambda x, mask, drop, *options: (x.shape, mask is None, *options),
    _two_like,
    _dropout_backward,
    _dropout_context,
    "float32",
)
_softmax_grad = custom_operator(
    "softmax_grad",
    "(Tensor y, Tensor dy, Tensor? drop, str function, float scale, float keep) -> Tensor",
    _bind_softmax_grad,
    lambda y, dy, drop, *options: (y.shape, drop is None, *options),
    _like,
    _no_second_derivative,
)
