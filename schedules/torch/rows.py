"""What softmax and losses share of their calls from PyTorch: rows, numbers of rows, kernels of both."""

from __future__ import annotations

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
from schedules.torch.operators import Launch

Shape = Sequence[int]
Number: TypeAlias = float | Tensor
READ_FIRST = ("cpu", *(schedule.name for schedule in ON_CUDA))  # schedules whose rows are read before they are written
OF_ROWS = ("lengths", "temperature", "target", "dloss", "dlse")  # tensors of a number a row


def of_rows(x: Tensor, numbers: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a number for each row of x, flat."""
    if numbers.dtype is not dtype or numbers.shape != x.shape[:-1]:
        shapes = f"{numbers.dtype} {tuple(numbers.shape)} beside x of shape {tuple(x.shape)}"
        raise ArgumentError(f"{name} are {dtype}, one for each row of x, not {shapes}")
    return numbers.reshape(-1)


def numbers_of_rows(x: Tensor, given: Number, name: str) -> Tensor:
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


def temperature_of(x: Tensor, given: Number | None) -> Tensor | None:
    """The temperature of each row, one number for all or one for each; None if none is given."""
    return None if given is None else numbers_of_rows(x, given, "temperature")


def constant_temperature(x: Tensor, temperature: Number | None) -> Tensor | None:
    """A temperature that has no gradient."""
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        raise ArgumentError("temperature has no gradient here; detach it, or divide logits by it")
    return temperature_of(x, temperature)


def require_contiguous(x: Tensor, what: str) -> None:
    """Raise ArgumentError if `x`, which `what` writes in place, has gaps or another order."""
    if not x.is_contiguous():
        raise ArgumentError(f"{what} wants a contiguous tensor, not strides {x.stride()}; copy it")


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
class RowCall:
    """A function of tensors by their names in the problem: of one shape (..., cols), but for a mask that may be (cols,)
    and those that are flat, of a number a row."""

    inputs: dict[str, Tensor]
    problem: SoftmaxProblem

    @classmethod
    def of(
        cls, function: str, dtype: torch.dtype, scale: float, given: dict[str, Tensor | None], **fields: Any
    ) -> RowCall:
        """Raises ArgumentError for tensors that do not fit, ProblemError."""
        names = {}
        if (mask := given.get("mask")) is not None and mask.dtype is torch.int32:
            names["mask"] = "lengths"
        if (drop := given.get("drop")) is not None and drop.dtype is torch.int64:
            names["drop"], fields = "philox", {**fields, "drop": "drawn"}
        given = {names.get(name, name): tensor for name, tensor in given.items()}
        inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
        x, kind = next(iter(inputs.values())), "causal" if fields.get("queries") else "none"
        for name, tensor in inputs.items():
            wanted = tuple(x.shape)
            if name in OF_ROWS:
                wanted = (math.prod(wanted[:-1]),)
            elif name == "philox":
                wanted = (2,)
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
        of_shape = [
            name not in (*OF_ROWS, "philox") and not (name == "mask" and self.problem.mask == "cols") for name in names
        ]

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


def like(x: Tensor, *others: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A new contiguous tensor of x's shape, not filled."""
    return torch.empty_like(x, memory_format=torch.contiguous_format, dtype=dtype)


def number_a_row(x: Tensor, *others: Any) -> Tensor:
    """A new float32 tensor with an element for each row of `x`, not filled."""
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    """Raise DerivativeError: the gradients have none of their own."""
    raise DerivativeError("softmax has no second derivative here; use torch.softmax where one is needed")


def mutating(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``schedules::name``, which writes over its first tensor and is not recorded; returns it."""
    torch.library.define(f"schedules::{name}", schema)
    torch.library.impl(f"schedules::{name}", ["cpu", "cuda"], run)
    torch.library.register_fake(f"schedules::{name}", fake)
    registered: Callable[..., Any] = getattr(torch.ops.schedules, name).default
    return registered
