"""Softmax and cross-entropy for PyTorch: the operators ``schedules::softmax``, ``softmax_lse``, ``dropout_softmax``,
``softmax_grad``, ``cross_entropy`` and ``cross_entropy_grad``, and in place ``softmax_`` and ``cross_entropy_grad_``.

Gradients are the operator's own kernels: of softmax from the output that the forward pass wrote, and the dropout of the
backward pass is the tensor of zeros and ones that the forward pass was given; of cross-entropy from the logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from schedules.core.errors import ArgumentError, DerivativeError
from schedules.operators.softmax import ON_CUDA
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.torch.kernels import DTYPES, TorchKernel, dtype_name, kernel_for, remembered
from schedules.torch.operators import Launch, custom_operator

Shape = Sequence[int]
Number: TypeAlias = float | Tensor
READ_FIRST = ("cpu", *(schedule.name for schedule in ON_CUDA))  # schedules whose rows are read before they are written
OF_ROWS = ("lengths", "temperature", "target", "dloss", "dlse")  # tensors of a number a row


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
    _require_contiguous(x, "softmax_")
    _, mask = _rows_last(x, -1, mask)
    _in_place(x, mask, _temperature(x, temperature), "log_softmax" if log else "softmax", scale)
    return x


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
        _require_contiguous(logits, "cross_entropy(inplace=True)")
    loss = _cross_entropy(
        logits,
        _of_rows(logits, target, "target", torch.int64),
        _constant(logits, temperature),
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
    target = _of_rows(logits, target, "target", torch.int64)
    weights = _numbers(logits, dloss, "dloss")
    options = _constant(logits, temperature), scale, label_smoothing, z_loss, ignore_index
    if inplace:
        _require_contiguous(logits, "cross_entropy_with_grad(inplace=True)")
        return _cross_entropy_in_place(logits, target, weights, *options), logits
    dlogits, loss = _cross_entropy_grad(logits, target, weights, *options)
    return loss, dlogits


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
    y = call(last, mask, _temperature(last, temperature), function, scale, queries, wide)
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
    return _of_rows(x, lengths, "lengths", torch.int32), 0


def _of_rows(x: Tensor, numbers: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a number for each row of x, flat."""
    if numbers.dtype is not dtype or numbers.shape != x.shape[:-1]:
        shapes = f"{numbers.dtype} {tuple(numbers.shape)} beside x of shape {tuple(x.shape)}"
        raise ArgumentError(f"{name} are {dtype}, one for each row of x, not {shapes}")
    return numbers.reshape(-1)


def _numbers(x: Tensor, given: Number, name: str) -> Tensor:
    """A float32 number for each row of x, flat, of one or as many."""
    rows = x.shape[:-1]
    if not isinstance(given, Tensor):
        return torch.full((math.prod(rows),), given, dtype=torch.float32, device=x.device)
    if given.dim() == x.dim() and given.shape[-1] == 1:
        given = given.squeeze(-1)
    if given.numel() == 1:
        given = given.reshape(())
    if given.dim() and given.shape != rows:
        shapes = f"{tuple(given.shape)} beside x of shape {tuple(x.shape)}"
        raise ArgumentError(f"{name} is a number, or one for each row of x, not {shapes}")
    return given.to(torch.float32).expand(rows).reshape(-1)


def _temperature(x: Tensor, given: Number | None) -> Tensor | None:
    return None if given is None else _numbers(x, given, "temperature")


def _constant(x: Tensor, temperature: Number | None) -> Tensor | None:
    """A temperature that has no gradient."""
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        raise ArgumentError("temperature has no gradient here; detach it, or divide logits by it")
    return _temperature(x, temperature)


def _require_contiguous(x: Tensor, what: str) -> None:
    if not x.is_contiguous():
        raise ArgumentError(f"{what} wants a contiguous tensor, not strides {x.stride()}; copy it")


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
def _kernel(problem: SoftmaxProblem, device: torch.device) -> TorchKernel:
    return kernel_for(problem, device)


def problem_of(
    function: str,
    shape: Shape,
    dtype: torch.dtype,
    scale: float = 1.0,
    mask: str = "none",
    keep: float = 1.0,
    **fields: Any,
) -> SoftmaxProblem:
    """The problem of a tensor of this shape, whose last axis is a row.  Raises ProblemError."""
    *outer, cols = shape
    return SoftmaxProblem(math.prod(outer), cols, function, dtype_name(dtype), scale, mask, keep, **fields)


@dataclass(frozen=True)
class _Call:
    """A function of tensors by their names in the problem: of one shape (..., cols), but for a mask that may be (cols,)
    and those that are flat, of a number a row."""

    inputs: dict[str, Tensor]
    problem: SoftmaxProblem

    @classmethod
    def of(
        cls, function: str, dtype: torch.dtype, scale: float, given: dict[str, Tensor | None], **fields: Any
    ) -> _Call:
        """Raises ArgumentError for tensors that do not fit, ProblemError."""
        if (mask := given.get("mask")) is not None and mask.dtype is torch.int32:
            given = {("lengths" if name == "mask" else name): tensor for name, tensor in given.items()}
        inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
        x, kind = next(iter(inputs.values())), "causal" if fields.get("queries") else "none"
        for name, tensor in inputs.items():
            wanted = tuple(x.shape)
            if name in OF_ROWS:
                wanted = (math.prod(wanted[:-1]),)
            elif name == "mask" and tensor.dim() == 1:
                wanted = wanted[-1:]
            if tuple(tensor.shape) != wanted:
                raise ArgumentError(f"a tensor of shape {tuple(tensor.shape)} beside one of {tuple(x.shape)}")
        if "lengths" in inputs:
            kind = "lengths"
        elif "mask" in inputs:
            kind = "cols" if inputs["mask"].dim() == 1 else "full"
        sizes = [max(1, size) for size in x.shape]
        temperature = "temperature" in inputs
        problem = problem_of(function, sizes, dtype, scale, kind, temperature=temperature, **fields)
        return cls(inputs, problem)

    @property
    def kernel(self) -> TorchKernel:
        return _kernel(self.problem, next(iter(self.inputs.values())).device)

    def launch(self) -> Launch:
        """A function of tensors like the inputs that returns the outputs, one or a tuple."""
        x = next(iter(self.inputs.values()))
        shape, device, names = x.shape, x.device, tuple(self.inputs)
        as_rows = math.prod(shape[:-1]), shape[-1]
        outputs = [argument for argument in self.problem.arguments() if argument.output]
        shapes = [shape if len(argument.shape) == 2 else shape[:-1] for argument in outputs]
        if not x.numel():
            made = [(size, DTYPES[argument.dtype]) for size, argument in zip(shapes, outputs, strict=True)]
            return lambda *_: _one_or_more([torch.zeros(size, dtype=dtype, device=device) for size, dtype in made])
        flat = [as_rows if len(argument.shape) == 2 else as_rows[:1] for argument in outputs]
        launch = self.kernel.launch(
            device, *[(size, DTYPES[argument.dtype]) for size, argument in zip(flat, outputs, strict=True)]
        )
        if len(shape) == 2:
            return launch
        of_shape = [name not in OF_ROWS and not (name == "mask" and self.problem.mask == "cols") for name in names]

        def viewed(*tensors: Tensor) -> Any:
            made = launch(*[t.view(as_rows) if rows else t for t, rows in zip(tensors, of_shape, strict=True)])
            if len(shapes) == 1:
                return made.view(shapes[0])
            return tuple([each.view(size) for each, size in zip(made, shapes, strict=True)])

        return viewed

    def over(self, output: str) -> list[Tensor]:
        """Run with the first input for the argument `output`; returns the other outputs."""
        x, *others = self.inputs.values()
        rows = math.prod(x.shape[:-1]), x.shape[-1]
        numbers = [
            torch.empty(rows[:1], dtype=DTYPES[argument.dtype], device=x.device)
            for argument in self.problem.arguments()
            if argument.output and argument.name != output
        ]
        if x.numel():
            kernel, view = self.kernel, x.view(rows)
            # what the loss is of may be read when it is written over, but by these
            late = self.problem.is_loss and kernel.made.partition(" ")[0] not in READ_FIRST
            made = torch.empty_like(view) if late else view
            of_rows = [(t.reshape(rows) if t.shape == x.shape else t).contiguous() for t in others]
            outputs = [made if a.name == output else numbers[0] for a in self.problem.arguments() if a.output]
            kernel(view, *of_rows, *outputs)
            if late:
                view.copy_(made)
        return [number.view(x.shape[:-1]) for number in numbers]


def _one_or_more(made: list[Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)


def _wide(wide: bool) -> str:
    return "float32" if wide else "same"


def _bind_softmax(
    x: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    function: str,
    scale: float,
    queries: int = 0,
    wide: bool = False,
    lse: bool = False,
) -> Launch:
    given = {"x": x, "mask": mask, "temperature": temperature}
    return _Call.of(function, x.dtype, scale, given, queries=queries, y_dtype=_wide(wide), lse=lse).launch()


def _bind_dropout_softmax(
    x: Tensor, mask: Tensor | None, drop: Tensor, function: str, scale: float, keep: float
) -> Launch:
    return _Call.of(function, x.dtype, scale, {"x": x, "mask": mask, "drop": drop}, keep=keep).launch()


def _bind_softmax_grad(
    y: Tensor,
    dy: Tensor,
    drop: Tensor | None,
    temperature: Tensor | None,
    dlse: Tensor | None,
    function: str,
    scale: float,
    keep: float,
    dtype: torch.dtype | None = None,
) -> Launch:
    given = {"y": y, "dy": dy, "drop": drop, "temperature": temperature, "dlse": dlse}
    wide = dtype not in (None, y.dtype)
    made = dtype if wide and dtype else y.dtype
    fields = dict(keep=keep, y_dtype=_wide(wide), lse=dlse is not None)
    return _Call.of(f"{function}_grad", made, scale, given, **fields).launch()


def _loss_call(
    function: str,
    given: dict[str, Tensor | None],
    scale: float,
    smoothing: float,
    z: float,
    ignore_index: int,
) -> _Call:
    logits = given["x"]
    assert logits is not None
    return _Call.of(function, logits.dtype, scale, given, smoothing=smoothing, z=z, ignore_index=ignore_index)


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


def _run_in_place(x: Tensor, mask: Tensor | None, temperature: Tensor | None, function: str, scale: float) -> None:
    _Call.of(function, x.dtype, scale, {"x": x, "mask": mask, "temperature": temperature}).over("y")


def _like(x: Tensor, *others: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype)


def _of_each_row(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_softmax(
    x: Tensor, mask: Any, temperature: Any, function: str, scale: float, queries: int = 0, wide: bool = False
) -> Tensor:
    return _like(x, dtype=torch.float32 if wide else None)


def _fake_softmax_grad(y: Tensor, *others: Any) -> Tensor:
    return _like(y, dtype=others[7] if len(others) > 7 else None)


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
    x, mask, temperature, function, scale, *queries = inputs  # PyTorch leaves out what is as by default
    _keep_for_gradient(ctx, x, mask, function, scale)
    # a logarithm of what takes no part hands its gradient on, where that of x has none
    ctx.cut = function == "log_softmax" and (any(queries[:1]) or (mask is not None and mask.dtype is torch.int32))
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


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    raise DerivativeError("softmax has no second derivative here; use torch.softmax where one is needed")


def _mutating(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``schedules::name``, which writes over its first tensor and is not recorded; returns it."""
    torch.library.define(f"schedules::{name}", schema)
    torch.library.impl(f"schedules::{name}", ["cpu", "cuda"], run)
    torch.library.register_fake(f"schedules::{name}", fake)
    registered: Callable[..., Any] = getattr(torch.ops.schedules, name).default
    return registered


_SOFTMAX = "(Tensor x, Tensor? mask, Tensor? temperature, str function, float scale, int queries=0, bool wide=False)"
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
    lambda x, *others: (_fake_softmax(x, *others), _of_each_row(x)),
    _softmax_backward,
    _softmax_context,
    "float32",
)
_dropout_softmax = custom_operator(
    "dropout_softmax",
    "(Tensor x, Tensor? mask, Tensor drop, str function, float scale, float keep) -> (Tensor y, Tensor output)",
    _bind_dropout_softmax,
    lambda x, mask, drop, *options: (x.shape, mask is None, *options),
    lambda x, *others: (_like(x), _like(x)),
    _dropout_backward,
    _dropout_context,
    "float32",
)
_softmax_grad = custom_operator(
    "softmax_grad",
    "(Tensor y, Tensor dy, Tensor? drop, Tensor? temperature, Tensor? dlse, str function, float scale, float keep, "
    "ScalarType? dtype=None) -> Tensor",
    _bind_softmax_grad,
    lambda y, dy, drop, temperature, dlse, *options: (
        y.shape,
        drop is None,
        temperature is None,
        dlse is None,
        *options,
    ),
    _fake_softmax_grad,
    _no_second_derivative,
)
_cross_entropy = custom_operator(
    "cross_entropy",
    "(Tensor logits, Tensor target, Tensor? temperature, float scale, float smoothing, float z, int ignore_index, "
    "bool inplace) -> Tensor",
    _bind_cross_entropy,
    lambda logits, target, temperature, *options: (logits.shape, temperature is None, *options),
    _of_each_row,
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
    lambda logits, *others: (_like(logits), _of_each_row(logits)),
    _no_second_derivative,
)
_cross_entropy_in_place = _mutating(
    "cross_entropy_grad_", f"(Tensor(a!) logits, {_LOSS} -> Tensor", _run_cross_entropy_grad_in_place, _of_each_row
)
_in_place = _mutating(
    "softmax_",
    "(Tensor(a!) x, Tensor? mask, Tensor? temperature, str function, float scale) -> ()",
    _run_in_place,
    lambda *given: None,
)
