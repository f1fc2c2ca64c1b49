"""Pooling of int8 over channels in groups of 32, and addition: what is computed.

data and output as of `conv2d_nchw32`: (n, ci/32, h, w, 32) and (n, ci/32, out_h, out_w, 32).  `kind` max takes the
largest of a window of kh x kw, whose border counts for nothing; average takes the sum, whose border counts as zeros,
and finishes it as a convolution:

    output = activation(alpha * sum + gamma * residual)     to nearest even, saturated

alpha and gamma are one float32 each, given at each call: alpha holds the division by the window's pixels.  A window of
one pixel with a residual adds two tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from schedules.core.draws import Draw
from schedules.core.epilogue import ACTIVATIONS, BOUNDS, Activation, Epilogue, Term
from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import Conv2dProblem
from schedules.core.reference import finished
from schedules.core.tvm import PrimExpr, te, tirx
from schedules.definitions.epilogue import finish, operands_at, placeholders
from schedules.definitions.implicit import At, Stage, at_run_time, stage
from schedules.operators.conv2d_nchw32.packing import GROUP, groups, pack_data

KINDS = ("max", "average")
LARGEST_SUM = 2**23  # pixels of a window at most, whose sum an int32 holds and a float32 nearly


@dataclass(frozen=True)
class PoolProblem(Conv2dProblem):
    """The pooling of one tensor; `residual` and `activation` are for averages."""

    dtypes: ClassVar[tuple[str, ...]] = ("int8",)
    kinds: ClassVar[tuple[str, ...]] = KINDS
    activations: ClassVar[tuple[str, ...]] = tuple(name for name in ACTIVATIONS if Activation.parse(name).exact)
    finishing: ClassVar[tuple[str, ...]] = ("residual", "activation")
    data_axes = ("n", "gi", "h", "w", "li")
    filter_axes = ()
    output_axes = ("n", "go", "y", "x", "lo")

    co: int = field(init=False)
    dtype: str = "int8"
    kind: str = "max"
    residual: bool = False
    activation: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "co", self.ci)
        super().__post_init__()
        if self.kind not in KINDS:
            raise ProblemError(f"kind={self.kind} is not {' or '.join(KINDS)}")
        object.__setattr__(self, "activation", str(Activation.parse(self.activation)))
        if self.kind == "max" and (self.residual or self.activation != "none"):
            raise ProblemError("kind=max takes no residual and no activation; use kind=average, or leave them out")
        if self.kh * self.kw > LARGEST_SUM:
            raise ProblemError(f"kh={self.kh} kw={self.kw} is a window of more than {LARGEST_SUM} pixels")
        _ = self.epilogue

    @classmethod
    def draws(cls, large: bool = False) -> dict[str, Draw]:
        """Of averages, half have a residual; a maximum has none of what finishes an average."""
        drawn = super().draws(large)
        return {**drawn, "kind": lambda r: "max" if r.random() < 0.5 else "average"}

    @classmethod
    def drawn(cls, r: Any, large: bool = False) -> dict[str, Any]:
        found = super().drawn(r, large)
        return found if found["kind"] == "average" else found | {"residual": False, "activation": "none"}

    @cached_property
    def extents(self) -> dict[str, int]:
        size = groups(self.ci)
        return super().extents | {"gi": size, "go": size, "li": GROUP, "lo": GROUP}

    @cached_property
    def epilogue(self) -> Epilogue:
        if self.kind == "max":
            return Epilogue("int8")
        alpha, gamma = (Term(name, "tensor", "float32") for name in ("alpha", "gamma"))
        residual = (Term("residual", "element", "int8", gamma),) if self.residual else ()
        return Epilogue("int8", residual, alpha, Activation.parse(self.activation))

    @property
    def flops(self) -> int:
        return self.pixels * self.ci * self.kh * self.kw


def definition(problem: PoolProblem) -> list[te.Tensor]:
    """The TE graph: ``fetched`` (data under each tap; beyond the border what changes nothing), ``pooled``, ``tile``,
    the finished bytes, and ``output``, the same.

    Returns [data, the epilogue's operands, output].
    """
    p = at_run_time(problem)
    given = placeholders(p)
    data, largest = Stage(given["data"], p.data_axes), p.kind == "max"
    (top, left), (down, right) = p.pad, p.stride
    extents = {**p.extents, **dict(zip("hw", p.under(p.out_h, p.out_w), strict=True))}

    def element(at: At) -> PrimExpr:
        y, x = at["h"] - top, at["w"] - left
        tests = [
            (top > 0 or extents["h"] > p.h, te.all(y >= 0, y < p.h)),
            (left > 0 or extents["w"] > p.w, te.all(x >= 0, x < p.w)),
        ]
        needed = [test for is_needed, test in tests if is_needed]
        value = data({**at, "h": y, "w": x})
        if not needed:
            return value
        return te.if_then_else(te.all(*needed), value, tirx.const(BOUNDS["int8"][0] if largest else 0, "int8"))

    fetched = stage("fetched", p.data_axes, [extents[axis] for axis in p.data_axes], element)
    ry, rx = te.reduce_axis((0, p.kh), "ry"), te.reduce_axis((0, p.kw), "rx")

    def total(at: At) -> PrimExpr:
        y, x = at["y"] * down + ry * p.dilation[0], at["x"] * right + rx * p.dilation[1]
        value = fetched({**at, "gi": at["go"], "li": at["lo"], "h": y, "w": x})
        return te.max(value, axis=[ry, rx]) if largest else te.sum(value.astype("int32"), axis=[ry, rx])

    shape = [p.extents[axis] for axis in p.output_axes]
    pooled = stage("pooled", p.output_axes, shape, total)

    def byte(at: At) -> PrimExpr:
        index = [at[axis] for axis in p.output_axes]
        return pooled(at) if largest else finish(p.epilogue, pooled(at), operands_at(p, given, index))

    tile = stage("tile", p.output_axes, shape, byte)
    output = stage("output", p.output_axes, shape, tile)
    return [*given.values(), output.tensor]


def inputs(problem: PoolProblem, rng: np.random.Generator) -> list[Array]:
    """Uniform over the range of int8, packed; an alpha at which averages fill it, and a gamma near 1."""
    p = problem

    def bytes_of(h: int, w: int) -> Array:
        return pack_data(rng.integers(-128, 128, (p.n, p.ci, h, w), dtype="int8"))

    made = {"data": bytes_of(p.h, p.w)}
    for operand in p.epilogue.operands:
        if operand.name == "residual":
            made["residual"] = bytes_of(p.out_h, p.out_w)
        else:
            about = (p.kh * p.kw) ** -0.5 if operand.name == "alpha" else 1.0
            made[operand.name] = np.array([about * rng.uniform(0.5, 1.5)], "float32")
    return list(made.values())


def reference(problem: PoolProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output, exact, tap by tap."""
    p = problem
    data, *operands = arrays
    border = [(0, 0), (0, 0), (p.pad[0],) * 2, (p.pad[1],) * 2, (0, 0)]
    padded = np.pad(data.astype(np.int64), border, constant_values=-128 if p.kind == "max" else 0)
    combine = np.maximum if p.kind == "max" else np.add
    total = None
    for ry in range(p.kh):
        for rx in range(p.kw):
            window = padded[:, :, ry * p.dilation[0] :: p.stride[0], rx * p.dilation[1] :: p.stride[1]]
            window = window[:, :, : p.out_h, : p.out_w]
            total = window if total is None else combine(total, window)
    assert total is not None
    if p.kind == "max":
        return [Expected(total.astype(np.float64), np.zeros((1,) * 5))]
    return [finished(p, total, operands)]
