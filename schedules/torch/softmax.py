"""Softmax for PyTorch: the operators ``schedules::softmax``, ``softmax_lse``, ``dropout_softmax``, ``softmax_grad``
and, in place, ``softmax_``.

Gradients are the operator's own kernels, from the output that the forward pass wrote; the dropout of the backward pass
is that of the forward pass again, drawn from the same seed and offset or read of the same tensor.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from schedules.core.errors import ArgumentError
from schedules.torch.operators import Launch, custom_operator
from schedules.torch.rows import (
    Number,
    RowCall,
    like,
    mutating,
    no_second_derivative,
    number_a_row,
    of_rows,
    require_contiguous,
    temperature_of,
)


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    temperature: Number | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * x / temperature + mask) over the axis `dim`: a tensor of the shape and dtype of `x`.

    `x` is float32, float16 or bfloat16, computed in float32; of any shape and strides, though one that is not
    contiguous, or a `dim` other than the last, costs a copy.  `mask` has x's dtype and is added, or is bool, True where
    an element takes part, and broadcasts to x's shape: of one row, (cols,), it is read as it is, any other is written
    out to x's shape first.  Differentiable in `x`, `mask` and `temperature`.

    A kernel is built for each `scale`; `temperature` is read when it runs: a number, or a tensor of one or of one for
    each row (x's shape without the axis `dim`, which may be left as 1).  If one is not positive, its row is NaN.
    With ``dtype=torch.float32`` the result of 16-bit `x` is not rounded to x's dtype.  With `return_lse` the result is
    (softmax, log sum exp of what it is of), the latter float32, without the axis, and differentiable too.

    In place of a mask, along the last axis: with `lengths`, int32 and of the shape of x without that axis, only the
    first so many elements of each row take part (from 0 to all; not tested); with `causal`, of matrices of queries by
    keys, the last two axes, those up to the query's own key, where the last query's is the last key.  The others are as
    ``x.masked_fill(..., -inf)`` would have them, in results and gradients; no mask is made, and most are not read.

    Raises ArgumentError, ProblemError.
    """
    if dim == -1 and mask is temperature is lengths is dtype is None and not (causal or return_lse) and x.dim():
        return _softmax(x, None, None, "softmax", scale, 0, False)  # the short way for most calls
    return _forward("softmax", x, dim, scale, temperature, mask, lengths, causal, dtype, return_lse)


def log_softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    temperature: Number | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Any:
    """The logarithm of `softmax`, with the same arguments."""
    return _forward("log_softmax", x, dim, scale, temperature, mask, lengths, causal, dtype, return_lse)


def softmax_(
    x: Tensor, *, scale: float = 1.0, temperature: Number | None = None, mask: Tensor | None = None, log: bool = False
) -> Tensor:
    """`softmax` (with `log`, `log_softmax`) over the last axis, written over the contiguous `x`, which is returned.

    Not recorded for gradients.  Raises ArgumentError, ProblemError."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ArgumentError("softmax_ records no gradient; call it under torch.no_grad, or take softmax")
    require_contiguous(x, "softmax_")
    _, mask = _rows_last(x, -1, mask)
    _in_place(x, mask, temperature_of(x, temperature), "log_softmax" if log else "softmax", scale)
    return x


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

    The kernels draw the elements, forward and backward alike, from a seed and an offset: these two come from PyTorch's
    generator of x's device, on that device, so that ``torch.manual_seed`` repeats them and a CUDA graph draws anew at
    each replay.  Or `drop` is the two, int64 (2,) (`core.philox`; the offset counts as PyTorch's, in fours); or it
    chooses the elements itself: uint8 of x's shape, 0 to zero and 1 to keep.  Not `training`, or with p = 0, nothing
    is dropped.

    Raises ArgumentError, ProblemError.
    """
    if not 0 <= p < 1:
        raise ArgumentError(f"p={p} is not a probability from 0 up to, and not including, 1")
    if not training or p == 0:
        return softmax(x, dim, scale=scale, mask=mask)
    last, mask = _rows_last(x, dim, mask)
    keep = round(1 - p, 12)  # 0.3, not 0.30000000000000004, is what a bundle is exported for
    if drop is None:
        drop = torch.randint(2**63 - 1, (2,), device=x.device)
    elif last is not x and drop.dtype is not torch.int64:
        drop = drop.movedim(dim, -1)
    output = _dropout_softmax(last, mask, drop, "softmax", scale, keep)[1]
    return output if last is x else output.movedim(-1, dim)


def _forward(
    function: str,
    x: Tensor,
    dim: int,
    scale: float,
    temperature: Number | None,
    mask: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    dtype: torch.dtype | None,
    return_lse: bool,
) -> Any:
    plain = mask is None and lengths is None and temperature is None and dtype is None
    if plain and dim == -1 and x.dim() and not causal and not return_lse:
        return _softmax(x, None, None, function, scale, 0, False)
    if dtype not in (None, x.dtype, torch.float32):
        raise ArgumentError(f"dtype={dtype} is not torch.float32, nor x's, {x.dtype}; convert the result")
    wide = dtype is torch.float32 and x.dtype is not torch.float32
    queries = 0
    if lengths is not None or causal:
        mask, queries = _cut(x, dim, mask, lengths, causal)
        last = x
    else:
        last, mask = _rows_last(x, dim, mask)
    call = _softmax_lse if return_lse else _softmax
    y = call(last, mask, temperature_of(last, temperature), function, scale, queries, wide)
    if last is x:
        return y
    return (y[0].movedim(-1, dim), y[1]) if return_lse else y.movedim(-1, dim)


def _cut(x: Tensor, dim: int, mask: Tensor | None, lengths: Tensor | None, causal: bool) -> tuple[Tensor | None, int]:
    """(lengths of rows, or None; queries of a matrix, or 0), of rows of which only the first elements take part."""
    if dim not in (-1, x.dim() - 1):
        raise ArgumentError(f"dim={dim} is not the last axis, which lengths and causal are along; transpose x")
    if (mask is not None) + (lengths is not None) + causal != 1:
        raise ArgumentError("mask, lengths and causal exclude one another; give one of them")
    if lengths is None:
        if x.dim() < 2:
            raise ArgumentError(f"causal is for (..., queries, keys), not for a tensor of shape {tuple(x.shape)}")
        return None, x.shape[-2]
    return of_rows(x, lengths, "lengths", torch.int32), 0


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


def _wide(wide: bool) -> str:
    return "float32" if wide else "same"


def _bind_softmax(
    x: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    function: str,
    scale: float,
    queries: int,
    wide: bool,
    lse: bool = False,
) -> Launch:
    given = {"x": x, "mask": mask, "temperature": temperature}
    return RowCall.of(function, x.dtype, scale, given, queries=queries, y_dtype=_wide(wide), lse=lse).launch()


def _bind_dropout_softmax(
    x: Tensor, mask: Tensor | None, drop: Tensor, function: str, scale: float, keep: float
) -> Launch:
    return RowCall.of(function, x.dtype, scale, {"x": x, "mask": mask, "drop": drop}, keep=keep).launch()


def _bind_softmax_grad(
    y: Tensor,
    dy: Tensor,
    drop: Tensor | None,
    temperature: Tensor | None,
    dlse: Tensor | None,
    function: str,
    scale: float,
    keep: float,
    dtype: torch.dtype | None,
) -> Launch:
    given = {"y": y, "dy": dy, "drop": drop, "temperature": temperature, "dlse": dlse}
    wide = dtype not in (None, y.dtype)
    made = dtype if wide and dtype else y.dtype
    fields = dict(keep=keep, y_dtype=_wide(wide), lse=dlse is not None)
    return RowCall.of(f"{function}_grad", made, scale, given, **fields).launch()


def _run_in_place(x: Tensor, mask: Tensor | None, temperature: Tensor | None, function: str, scale: float) -> None:
    RowCall.of(function, x.dtype, scale, {"x": x, "mask": mask, "temperature": temperature}).over("y")


def _fake_softmax(
    x: Tensor, mask: Any, temperature: Any, function: str, scale: float, queries: int, wide: bool
) -> Tensor:
    return like(x, dtype=torch.float32 if wide else None)


def _fake_softmax_grad(y: Tensor, *others: Any) -> Tensor:
    return like(y, dtype=others[7])


def _gradients(
    ctx: Any, y: Tensor, dy: Tensor, drop: Tensor | None, keep: float, temperature: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """dx, and the mask's gradient if it is needed: dx before it is multiplied by scale."""
    if ctx.mask_axes is None:
        return _softmax_grad(y, dy, drop, temperature, dlse, ctx.function, ctx.scale, keep, ctx.dtype), None
    dv = _softmax_grad(y, dy, drop, None, dlse, ctx.function, 1.0, keep, ctx.dtype)
    dx = dv * ctx.scale
    if temperature is not None:
        dx = (dx / temperature.view(*dx.shape[:-1], 1)).to(dx.dtype)
    return dx, dv.sum(ctx.mask_axes) if ctx.mask_axes else dv


def _keep_for_gradient(ctx: Any, x: Tensor, mask: Tensor | None, function: str, scale: float) -> None:
    ctx.function, ctx.scale, ctx.dtype = function, scale, x.dtype
    ctx.mask_axes = None  # that the mask's gradient is summed over, if there is one
    if mask is not None and ctx.needs_input_grad[1]:
        ctx.mask_axes = tuple(range(x.dim() - mask.dim()))


def _softmax_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, mask, temperature, function, scale, queries, _ = inputs
    _keep_for_gradient(ctx, x, mask, function, scale)
    # a logarithm of what takes no part hands its gradient on, where that of x has none
    ctx.cut = function == "log_softmax" and (queries > 0 or (mask is not None and mask.dtype is torch.int32))
    x = x if temperature is not None and ctx.needs_input_grad[2] else None
    ctx.save_for_backward(output[0] if isinstance(output, tuple) else output, temperature, x)


def _softmax_backward(ctx: Any, dy: Tensor, dlse: Tensor | None = None) -> tuple[Any, ...]:
    y, temperature, x = ctx.saved_tensors
    dlse = None if dlse is None else dlse.reshape(-1)
    dx, dmask = _gradients(ctx, y, dy, None, 1.0, temperature, dlse)
    dx = dx.masked_fill(y == -math.inf, 0) if ctx.cut else dx
    dtemperature = None
    if x is not None:
        of_row = (dx.float() * x.float()).sum(-1).reshape(-1)
        dtemperature = -of_row / temperature
    return (dx, dmask, dtemperature, *[None] * (len(ctx.needs_input_grad) - 3))


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
            more_x, more_mask = _gradients(ctx, y, gradient, kept, keep, None, None)
            dx = more_x if dx is None else dx + more_x
            dmask = more_mask if dmask is None or more_mask is None else dmask + more_mask
    return dx, dmask, None, None, None, None


_SOFTMAX = "(Tensor x, Tensor? mask, Tensor? temperature, str function, float scale, int queries, bool wide)"
_softmax = custom_operator(
    "softmax",
    f"{_SOFTMAX} -> Tensor",
    _bind_softmax,
    lambda x, mask, temperature, *options: (x.shape, mask is None, temperature is None, *options),
    _fake_softmax,
    _softmax_backward,
    _softmax_context,
    "float32",
)
_softmax_lse = custom_operator(
    "softmax_lse",
    f"{_SOFTMAX} -> (Tensor y, Tensor lse)",
    functools.partial(_bind_softmax, lse=True),
    lambda x, mask, temperature, *options: (x.shape, mask is None, temperature is None, *options),
    lambda x, *others: (_fake_softmax(x, *others), number_a_row(x)),
    _softmax_backward,
    _softmax_context,
    "float32",
)
_dropout_softmax = custom_operator(
    "dropout_softmax",
    "(Tensor x, Tensor? mask, Tensor drop, str function, float scale, float keep) -> (Tensor y, Tensor output)",
    _bind_dropout_softmax,
    lambda x, mask, drop, *options: (x.shape, mask is None, *options),
    lambda x, *others: (like(x), like(x)),
    _dropout_backward,
    _dropout_context,
    "float32",
)
_softmax_grad = custom_operator(
    "softmax_grad",
    "(Tensor y, Tensor dy, Tensor? drop, Tensor? temperature, Tensor? dlse, str function, float scale, float keep, "
    "ScalarType? dtype) -> Tensor",
    _bind_softmax_grad,
    lambda y, dy, drop, temperature, dlse, *options: (
        y.shape,
        drop is None,
        temperature is None,
        dlse is None,
        *options,
    ),
    _fake_softmax_grad,
    no_second_derivative,
)
_in_place = mutating(
    "softmax_",
    "(Tensor(a!) x, Tensor? mask, Tensor? temperature, str function, float scale) -> ()",
    _run_in_place,
    lambda *given: None,
)
