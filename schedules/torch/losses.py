"""Cross-entropy for PyTorch: the operators ``schedules::cross_entropy``, ``cross_entropy_grad`` and, over the logits,
``cross_entropy_grad_``.  Gradients are the operator's own kernel, from the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedules.core.errors import ArgumentError
from schedules.torch.operators import Launch, custom_operator
from schedules.torch.rows import (
    Number,
    RowCall,
    constant_temperature,
    like,
    mutating,
    no_second_derivative,
    number_a_row,
    numbers_of_rows,
    of_rows,
    require_contiguous,
)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    temperature: Number | None = None,
    inplace: bool = False,
) -> Tensor:
    """The cross-entropy of softmax(scale * logits / temperature) over the last axis, as PyTorch's of classes there.

    `logits` (..., classes) are float32, float16 or bfloat16, `target` (...) int64.  `reduction` is "none", "mean", over
    targets that are not `ignore_index`, or "sum".  The result is float32; of a target that is no class it is NaN.  To
    each loss `z_loss` times the square of its log sum exp is added.  The forward pass reads logits once and writes only
    the losses; the backward pass reads them once more and writes their gradient: with `inplace` over the logits, which
    must be contiguous and which nothing may read after it.

    Differentiable in `logits`.  Raises ArgumentError, ProblemError.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ArgumentError(f"reduction={reduction} is not one of none, mean, sum")
    if inplace:
        require_contiguous(logits, "cross_entropy(inplace=True)")
    loss = _cross_entropy(
        logits,
        of_rows(logits, target, "target", torch.int64),
        constant_temperature(logits, temperature),
        scale,
        label_smoothing,
        z_loss,
        ignore_index,
        inplace,
    )
    if reduction == "none":
        return loss  # type: ignore[no-any-return]
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def cross_entropy_with_grad(
    logits: Tensor,
    target: Tensor,
    dloss: Number = 1.0,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    temperature: Number | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """(losses, gradient of `logits`), in one kernel that reads logits once: for training loops that go on from the
    gradient themselves, as Liger-Kernel's do.

    `dloss` is the gradient of the losses: a number, 1 / count for their mean, or a tensor of one or of one for each
    row.  With `inplace` the gradient is written over the contiguous logits.  The others are `cross_entropy`'s.

    Raises ArgumentError, ProblemError.
    """
    target = of_rows(logits, target, "target", torch.int64)
    weights = numbers_of_rows(logits, dloss, "dloss")
    options = constant_temperature(logits, temperature), scale, label_smoothing, z_loss, ignore_index
    if inplace:
        require_contiguous(logits, "cross_entropy_with_grad(inplace=True)")
        return _cross_entropy_in_place(logits, target, weights, *options), logits
    dlogits, loss = _cross_entropy_grad(logits, target, weights, *options)
    return loss, dlogits


def _loss_call(
    function: str,
    given: dict[str, Tensor | None],
    scale: float,
    smoothing: float,
    z: float,
    ignore_index: int,
) -> RowCall:
    logits = given["x"]
    assert logits is not None
    return RowCall.of(function, logits.dtype, scale, given, smoothing=smoothing, z=z, ignore_index=ignore_index)


def _bind_cross_entropy(logits: Tensor, target: Tensor, temperature: Tensor | None, *options: Any) -> Launch:
    given = {"x": logits, "temperature": temperature, "target": target}
    launch = _loss_call("cross_entropy", given, *options[:4]).launch()
    return _in_order(launch, (0, 2, 1) if temperature is not None else (0, 1))


def _given_to_gradient(
    logits: Tensor, target: Tensor, dloss: Tensor, temperature: Tensor | None
) -> dict[str, Tensor | None]:
    return {"x": logits, "temperature": temperature, "target": target, "dloss": dloss}


def _bind_cross_entropy_grad(
    logits: Tensor, target: Tensor, dloss: Tensor, temperature: Tensor | None, *options: Any
) -> Launch:
    given = _given_to_gradient(logits, target, dloss, temperature)
    launch = _loss_call("cross_entropy_grad", given, *options).launch()
    return _in_order(launch, (0, 3, 1, 2) if temperature is not None else (0, 1, 2))


def _in_order(launch: Launch, order: tuple[int, ...]) -> Launch:
    return lambda *tensors: launch(*[tensors[k] for k in order])


def _run_cross_entropy_grad_in_place(
    logits: Tensor, target: Tensor, dloss: Tensor, temperature: Tensor | None, *options: Any
) -> Tensor:
    given = _given_to_gradient(logits, target, dloss, temperature)
    (loss,) = _loss_call("cross_entropy_grad", given, *options).over("dx")
    return loss


def _cross_entropy_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, temperature, *ctx.options, ctx.inplace = inputs
    ctx.save_for_backward(logits, target, temperature)


def _cross_entropy_backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
    logits, target, temperature = ctx.saved_tensors
    given = logits, target, dloss.reshape(-1), temperature, *ctx.options
    if ctx.inplace:
        _cross_entropy_in_place(*given)
        dlogits = logits
    else:
        dlogits, _ = _cross_entropy_grad(*given)
    return (dlogits, *[None] * 7)


_cross_entropy = custom_operator(
    "cross_entropy",
    "(Tensor logits, Tensor target, Tensor? temperature, float scale, float smoothing, float z, int ignore_index, "
    "bool inplace) -> Tensor",
    _bind_cross_entropy,
    lambda logits, target, temperature, *options: (logits.shape, temperature is None, *options),
    number_a_row,
    _cross_entropy_backward,
    _cross_entropy_context,
    "float32",
)
_LOSS = "Tensor target, Tensor dloss, Tensor? temperature, float scale, float smoothing, float z, int ignore_index)"
_cross_entropy_grad = custom_operator(
    "cross_entropy_grad",
    f"(Tensor logits, {_LOSS} -> (Tensor dlogits, Tensor loss)",
    _bind_cross_entropy_grad,
    lambda logits, target, dloss, temperature, *options: (logits.shape, temperature is None, *options),
    lambda logits, *others: (like(logits), number_a_row(logits)),
    no_second_derivative,
)
_cross_entropy_in_place = mutating(
    "cross_entropy_grad_", f"(Tensor(a!) logits, {_LOSS} -> Tensor", _run_cross_entropy_grad_in_place, number_a_row
)
