"""Convolution over HWCN data: what is computed.

data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n), all in `dtype`.  The batch is the contiguous
axis, so that a large batch coalesces whatever the image.  After the TVM tutorial "How to optimize convolution on GPU".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schedules.operator import Array, Expected
from schedules.problem import Argument, Conv2dProblem, numpy_dtype

if TYPE_CHECKING:
    from tvm import te


@dataclass(frozen=True)
class HwcnProblem(Conv2dProblem):
    """A convolution of HWCN data with an HWIO filter."""

    def arguments(self) -> tuple[Argument, ...]:
        return (
            Argument("data", (self.h, self.w, self.ci, self.n), self.dtype),
            Argument("filter", (self.kh, self.kw, self.ci, self.co), self.dtype),
            Argument("output", (self.out_h, self.out_w, self.co, self.n), self.dtype, output=True),
        )


def definition(problem: HwcnProblem, tile: tuple[int, int, int] | None = None) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), then ``conv``, the sum over kh, kw and ci.

    With `tile` = (ci, co, n), these extents are rounded up to its multiples: ``padded`` and ``weights`` hold zeros
    there, ``conv`` computes whole tiles without a test, and ``output`` keeps what was asked for.  Schedules inline both
    into their fetch, so that only the first load and the last store are predicated.

    Returns [data, filter, the output].
    """
    import tvm
    from tvm import te

    p = problem
    multiple = tile or (1, 1, 1)
    ci, co, n = (-(-extent // m) * m for extent, m in zip((p.ci, p.co, p.n), multiple, strict=True))
    zero = tvm.tirx.const(0, p.dtype)
    data = te.placeholder((p.h, p.w, p.ci, p.n), name="data", dtype=p.dtype)
    weight = te.placeholder((p.kh, p.kw, p.ci, p.co), name="filter", dtype=p.dtype)

    def inside(tests: list[tuple[bool, tvm.tirx.PrimExpr]], value: tvm.tirx.PrimExpr) -> tvm.tirx.PrimExpr:
        needed = [test for is_needed, test in tests if is_needed]
        return te.if_then_else(te.all(*needed), value, zero) if needed else value

    top, left = p.pad
    padded = weights = None
    if p.pad != (0, 0) or (ci, n) != (p.ci, p.n):
        padded = te.compute(
            (p.h + 2 * top, p.w + 2 * left, ci, n),
            lambda y, x, c, b: inside(
                [
                    (top > 0, te.all(y >= top, y - top < p.h)),
                    (left > 0, te.all(x >= left, x - left < p.w)),
                    (ci > p.ci, c < p.ci),
                    (n > p.n, b < p.n),
                ],
                data[y - top, x - left, c, b],
            ),
            name="padded",
        )
    if (ci, co) != (p.ci, p.co):
        weights = te.compute(
            (p.kh, p.kw, ci, co),
            lambda y, x, c, f: inside([(ci > p.ci, c < p.ci), (co > p.co, f < p.co)], weight[y, x, c, f]),
            name="weights",
        )
    source, filters = (data if padded is None else padded), (weight if weights is None else weights)
    ry = te.reduce_axis((0, p.kh), name="ry")
    rx = te.reduce_axis((0, p.kw), name="rx")
    rc = te.reduce_axis((0, ci), name="rc")
    conv = te.compute(
        (p.out_h, p.out_w, co, n),
        lambda y, x, f, b: te.sum(
            source[y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1], rc, b]
            * filters[ry, rx, rc, f],
            axis=[ry, rx, rc],
        ),
        name="conv",
    )
    if tile is None:
        return [data, weight, conv]
    return [data, weight, te.compute((p.out_h, p.out_w, p.co, p.n), lambda *at: conv(*at), name="output")]


def inputs(problem: HwcnProblem, rng: np.random.Generator) -> list[Array]:
    """Normal data and filter of the problem's dtype."""
    return [
        rng.standard_normal(argument.shape, dtype=np.float32).astype(numpy_dtype(argument.dtype))
        for argument in problem.arguments()
        if not argument.output
    ]


def reference(problem: HwcnProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64: one matrix product (co, ci) x (ci, n) for each tap and pixel."""
    p = problem
    data, weight = (array.astype(np.float64) for array in arrays)
    border = [(p.pad[0],) * 2, (p.pad[1],) * 2, (0, 0), (0, 0)]
    shape = (p.out_h, p.out_w, p.co, p.n)

    def conv(data: Array, weight: Array) -> Array:
        padded = np.pad(data, border)
        out = np.zeros(shape)
        for ry in range(p.kh):
            for rx in range(p.kw):
                y, x = ry * p.dilation[0], rx * p.dilation[1]
                window = padded[
                    y : y + p.out_h * p.stride[0] : p.stride[0], x : x + p.out_w * p.stride[1] : p.stride[1]
                ]
                out += np.matmul(weight[ry, rx].T, window[: p.out_h, : p.out_w])
        return out

    return [Expected(conv(data, weight), conv(np.abs(data), np.abs(weight)))]
