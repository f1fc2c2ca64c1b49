"""Packing into groups of 32 channels, quantised to int8, and the way back: what is computed.

By `layout`, the plain tensor is (n, ci, h, w) or (n, h, w, ci), of `dtype`; the packed one is (n, ci/32, h, w, 32) of
int8, ci/32 rounded up, with zeros in the channels added; of few channels it may have 4, 8 or 16 `lanes` in place of 32,
as `conv2d_nchw32` takes them.  `scale` is one float32 that is given at each call:

    packed = round(scale * plain)       to nearest even, saturated
    plain = scale * packed              with `unpack`

The product is rounded to float32, so that what is packed is exact to the bit.  A NaN has no int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from schedules.core.epilogue import BOUNDS, Epilogue, Term
from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import Argument, Conv2dProblem, Pair, numpy_dtype
from schedules.core.tvm import PrimExpr, te
from schedules.definitions.epilogue import finish, placeholders
from schedules.definitions.implicit import at_run_time
from schedules.definitions.padding import select
from schedules.operators.conv2d_nchw32.packing import GROUP, LANES, pack_data, unpack_output

LAYOUTS = {"nchw": ("n", "ci", "h", "w"), "nhwc": ("n", "h", "w", "ci")}
PACKED = ("n", "gi", "h", "w", "li")


@dataclass(frozen=True)
class PackProblem(Conv2dProblem):
    """The packing of one tensor, or with `unpack` the way back: a convolution of one tap without a filter."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    layouts: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)
    later = ("n_from", "lanes")

    co: int = field(init=False)
    kh: int = field(init=False, default=1)
    kw: int = field(init=False, default=1)
    stride: Pair = field(init=False, default=(1, 1))
    pad: Pair = field(init=False, default=(0, 0))
    dilation: Pair = field(init=False, default=(1, 1))
    layout: str = "nchw"
    unpack: bool = False
    lanes: int = GROUP

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ProblemError(f"layout={self.layout} is not {' or '.join(LAYOUTS)}")
        if self.lanes not in LANES:
            raise ProblemError(f"lanes={self.lanes} is not {' or '.join(map(str, LANES))}")
        axes = (LAYOUTS[self.layout], PACKED)
        for name, value in zip(("data_axes", "output_axes"), axes[::-1] if self.unpack else axes, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "co", self.ci)
        super().__post_init__()

    @property
    def filter_axes(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def extents(self) -> dict[str, int]:
        return super().extents | {"gi": -(-self.ci // self.lanes), "li": self.lanes}

    @property
    def channels_last(self) -> bool:
        return self.layout == "nhwc"

    @property
    def flops(self) -> int:
        return self.n * self.ci * self.h * self.w

    @cached_property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.dtype if self.unpack else "int8", scale=Term("scale", "tensor", "float32"))

    @cached_property
    def _arguments(self) -> tuple[Argument, ...]:
        data, *rest = super()._arguments
        return (replace(data, dtype="int8" if self.unpack else self.dtype), *rest)


def definition(problem: PackProblem) -> list[te.Tensor]:
    """The TE graph: ``output``.  Returns [data, scale, output]."""
    p = at_run_time(problem)
    data, scale = placeholders(p).values()

    def element(*index: PrimExpr) -> PrimExpr:
        at = dict(zip(p.output_axes, index, strict=True))
        if p.unpack:
            at |= {"gi": at["ci"] // p.lanes, "li": at["ci"] % p.lanes}
        else:
            at["ci"] = at["gi"] * p.lanes + at["li"]
        value = finish(p.epilogue, data(*(at[axis] for axis in p.data_axes)), [scale[0]])
        return select([(not p.unpack and p.ci % p.lanes > 0, at["ci"] < p.ci)], value)

    return [data, scale, te.compute(p.shapes()[2], element, name="output")]


def inputs(problem: PackProblem, rng: np.random.Generator) -> list[Array]:
    """Normal data with a scale at which some of it saturates, or bytes and a scale that brings them near 1."""
    p = problem
    shape = (p.n, p.ci, p.h, p.w)
    if p.unpack:
        packed = pack_data(rng.integers(-128, 128, shape, dtype="int8"), p.lanes)
        return [packed, np.array([rng.uniform(0.5, 2) / 128], "float32")]
    plain = rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(p.dtype))
    data = np.ascontiguousarray(plain.transpose(0, 2, 3, 1)) if p.channels_last else plain
    return [data, np.array([rng.uniform(60, 90)], "float32")]


def reference(problem: PackProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output; packed it is exact."""
    p, (data, (scale,)) = problem, arrays
    if p.unpack:
        plain = unpack_output(data, p.ci).astype(np.float32) * scale
        values = plain.transpose(0, 2, 3, 1) if p.channels_last else plain
        return [Expected(values.astype(np.float64), np.zeros((1,) * 4))]
    plain = data.astype(np.float32)
    plain = plain.transpose(0, 3, 1, 2) if p.channels_last else plain
    packed = pack_data(np.rint(np.clip(plain * scale, *BOUNDS["int8"])), p.lanes)
    return [Expected(packed.astype(np.float64), np.zeros((1,) * 5))]
