"""Convolution over HWCN data: what is computed.

data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n), all in `dtype`; sums in float32.  The batch
is the contiguous axis, so that a large batch coalesces whatever the image.  After the TVM tutorial "How to optimize
convolution on GPU".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedules.core.epilogue import Epilogue
from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem
from schedules.core.reference import convolve, finished, normal_inputs
from schedules.definitions.epilogue import ACCUMULATOR, finish, placeholders, terms_at
from schedules.definitions.padding import select

if TYPE_CHECKING:
    from tvm import te
    from tvm.tirx import PrimExpr

inputs = normal_inputs


@dataclass(frozen=True)
class HwcnProblem(FusedConv2dProblem):
    """A convolution of HWCN data with an HWIO filter."""

    channel_axes = (2,)
    later = ("bias", "activation", "residual")

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        output = (self.out_h, self.out_w, self.co, self.n)
        return (self.h, self.w, self.ci, self.n), (self.kh, self.kw, self.ci, self.co), output


def definition(problem: HwcnProblem, tile: tuple[int, int, int] | None = None) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv``, the sum over kh, kw and ci, and, where the
    dtype is another than the sum's, ``output``.

    With `tile` = (ci, co, n), these extents are rounded up to its multiples: ``padded`` and ``weights`` hold zeros
    there, ``conv`` computes whole tiles without a test, and ``output`` keeps what was asked for.  Schedules inline both
    into their fetch, so that only the first load and the last store are predicated.

    Returns [data, filter, the output].
    """
    from tvm import te

    p = problem
    multiple = tile or (1, 1, 1)
    ci, co, n = (-(-extent // m) * m for extent, m in zip((p.ci, p.co, p.n), multiple, strict=True))
    given = placeholders(p)
    data, weight = given["data"], given["filter"]

    top, left = p.pad
    padded = weights = None
    if p.pad != (0, 0) or (ci, n) != (p.ci, p.n):
        padded = te.compute(
            (p.h + 2 * top, p.w + 2 * left, ci, n),
            lambda y, x, c, b: select(
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
            lambda y, x, c, f: select([(ci > p.ci, c < p.ci), (co > p.co, f < p.co)], weight[y, x, c, f]),
            name="weights",
        )
    source, filters = (data if padded is None else padded), (weight if weights is None else weights)
    ry = te.reduce_axis((0, p.kh), name="ry")
    rx = te.reduce_axis((0, p.kw), name="rx")
    rc = te.reduce_axis((0, ci), name="rc")
    conv = te.compute(
        (p.out_h, p.out_w, co, n),
        lambda y, x, f, b: te.sum(
            source[y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1], rc, b].astype(
                ACCUMULATOR
            )
            * filters[ry, rx, rc, f].astype(ACCUMULATOR),
            axis=[ry, rx, rc],
        ),
        name="conv",
    )
    if tile is None and p.epilogue == Epilogue(ACCUMULATOR):
        return [data, weight, conv]
    return [*given.values(), te.compute(p.shapes()[2], lambda *at: finish_at(p, given, conv(*at), at), name="output")]


def finish_at(
    problem: HwcnProblem, given: Mapping[str, te.Tensor], total: PrimExpr, at: Sequence[PrimExpr]
) -> PrimExpr:
    """The element `at` of the output, of the sum `total`; what stands beyond the end is dropped."""
    from tvm import te

    inside = [te.min(index, size - 1) for index, size in zip(at, problem.shapes()[2], strict=True)]
    return finish(problem.epilogue, total, terms_at(problem, given, inside))


@dataclass(frozen=True)
class Operands:
    """What a pixel's matrix product is made of: the `given` inputs, ``weights`` (kh, kw, ci, co) and
    ``columns`` (out_h, out_w, kh, kw, ci, n), where data lies under a tap.

    The extents of (co, n, ci) are rounded up with zeros, in ``columns`` and ``weights``; in the padding ``columns``
    are zero.
    """

    given: dict[str, te.Tensor]
    weights: te.Tensor
    columns: te.Tensor


def gemm_operands(problem: HwcnProblem, tile: tuple[int, int, int]) -> Operands:
    """The operands with the extents of (co, n, ci) rounded up to multiples of `tile`."""
    given = placeholders(problem)
    return Operands(given, weights_of(problem, given["filter"], tile), columns_of(problem, given["data"], tile))


def columns_of(problem: HwcnProblem, data: te.Tensor, tile: tuple[int, int, int], name: str = "columns") -> te.Tensor:
    """The stage `name` (out_h, out_w, kh, kw, ci, n): `data` (h, w, ci, n) under each tap; see `Operands`."""
    from tvm import te

    p = problem
    n, ci = (-(-size // t) * t for size, t in zip((p.n, p.ci), tile[1:], strict=True))

    def column(oy: PrimExpr, ox: PrimExpr, ry: PrimExpr, rx: PrimExpr, c: PrimExpr, b: PrimExpr) -> PrimExpr:
        y = oy * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        x = ox * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        tests = [
            (p.pad[0] > 0, te.all(y >= 0, y < p.h)),
            (p.pad[1] > 0, te.all(x >= 0, x < p.w)),
            (ci > p.ci, c < p.ci),
            (n > p.n, b < p.n),
        ]
        return select(tests, data[y, x, c, b])

    return te.compute((p.out_h, p.out_w, p.kh, p.kw, ci, n), column, name=name)


def weights_of(problem: HwcnProblem, weight: te.Tensor, tile: tuple[int, int, int], name: str = "weights") -> te.Tensor:
    """The stage `name` (kh, kw, ci, co): the filter `weight` with its extents rounded up; see `Operands`."""
    from tvm import te

    p = problem
    co, ci = (-(-size // t) * t for size, t in zip((p.co, p.ci), tile[::2], strict=True))
    return te.compute(
        (p.kh, p.kw, ci, co),
        lambda ry, rx, c, f: select([(ci > p.ci, c < p.ci), (co > p.co, f < p.co)], weight[ry, rx, c, f]),
        name=name,
    )


def gemm_definition(problem: HwcnProblem, tile: tuple[int, int, int]) -> list[te.Tensor]:
    """The same as a matrix product for each pixel: ``conv`` (out_h, out_w, co, n) = sum over kh, kw, ci of ``weights``
    (kh, kw, ci, co) x ``columns`` (out_h, out_w, kh, kw, ci, n).

    The extents of (co, n, ci) are rounded up to multiples of `tile` with zeros in ``columns`` and ``weights``, which
    schedules inline into their loads.  ``finished`` is ``conv`` in the problem's dtype, ``output`` the part asked for.

    Returns [data, filter, the output].
    """
    from tvm import te

    p, operands = problem, gemm_operands(problem, tile)
    weights, columns = operands.weights, operands.columns
    ci, co, n = (int(extent) for extent in (weights.shape[2], weights.shape[3], columns.shape[5]))
    ry, rx, rc = (te.reduce_axis((0, extent), name) for name, extent in (("ry", p.kh), ("rx", p.kw), ("rc", ci)))
    conv = te.compute(
        (p.out_h, p.out_w, co, n),
        lambda y, x, f, b: te.sum(
            weights[ry, rx, rc, f].astype(ACCUMULATOR) * columns[y, x, ry, rx, rc, b].astype(ACCUMULATOR),
            axis=[ry, rx, rc],
        ),
        name="conv",
    )
    finished = te.compute(conv.shape, lambda *at: finish_at(p, operands.given, conv(*at), at), name="finished")
    output = te.compute(p.shapes()[2], lambda *at: finished(*at), name="output")
    return [*operands.given.values(), output]


def blocked_definition(problem: HwcnProblem, tile: tuple[int, int, int]) -> list[te.Tensor]:
    """The same with the extents of (out_w, co, n) rounded up to multiples of `tile`: ``padded`` (row, column, ci, n),
    data with its border, and ``weights`` (kh, kw, ci, co), both in float32 and zero beyond their ends; ``conv``
    (out_h, out_w, co, n); ``output``, the part asked for.

    Returns [data, filter, the output].
    """
    from tvm import te

    p = problem
    given = placeholders(p)
    data, weight = given["data"], given["filter"]
    out_w, co, n = (-(-size // t) * t for size, t in zip((p.out_w, p.co, p.n), tile, strict=True))
    top, left = p.pad
    rows = (p.out_h - 1) * p.stride[0] + (p.kh - 1) * p.dilation[0] + 1
    columns = (out_w - 1) * p.stride[1] + (p.kw - 1) * p.dilation[1] + 1

    def pixel(y: PrimExpr, x: PrimExpr, c: PrimExpr, b: PrimExpr) -> PrimExpr:
        tests = [
            (top > 0, te.all(y >= top, y - top < p.h)),
            (left > 0 or columns > p.w, te.all(x >= left, x - left < p.w)),
            (n > p.n, b < p.n),
        ]
        return select(tests, data[y - top, x - left, c, b]).astype(ACCUMULATOR)

    padded = te.compute((rows, columns, p.ci, n), pixel, name="padded")
    weights = te.compute(
        (p.kh, p.kw, p.ci, co),
        lambda ry, rx, c, f: select([(co > p.co, f < p.co)], weight[ry, rx, c, f]).astype(ACCUMULATOR),
        name="weights",
    )
    ry, rx, rc = (te.reduce_axis((0, extent), name) for name, extent in (("ry", p.kh), ("rx", p.kw), ("rc", p.ci)))
    conv = te.compute(
        (p.out_h, out_w, co, n),
        lambda y, x, f, b: te.sum(
            padded[y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1], rc, b]
            * weights[ry, rx, rc, f],
            axis=[ry, rx, rc],
        ),
        name="conv",
    )
    output = te.compute(p.shapes()[2], lambda *at: finish_at(p, given, conv(*at), at), name="output")
    return [*given.values(), output]


def inside_window(problem: HwcnProblem) -> tuple[int, ...] | None:
    """(first row, rows, first column, columns) of the output pixels that see no padding; None if all or none do."""
    p, window = problem, tuple[int, ...]()
    for size, out, pad, k, stride, dilation in zip(
        (p.h, p.w), (p.out_h, p.out_w), p.pad, (p.kh, p.kw), p.stride, p.dilation, strict=True
    ):
        first = min(out, -(-pad // stride))
        end = max(first, min(out, (size - 1 + pad - (k - 1) * dilation) // stride + 1))
        window += (first, end - first)
    return window if 0 < window[1] * window[3] < p.out_h * p.out_w else None


def reference(problem: HwcnProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64."""
    data, weight, *terms = arrays
    found = convolve(problem, data.transpose(3, 2, 0, 1), weight.transpose(3, 2, 0, 1))
    values, magnitude = (array.transpose(2, 3, 1, 0) for array in found)
    return [finished(problem, values, terms, magnitude)]
