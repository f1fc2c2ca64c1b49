"""Convolution over NHWC data: what is computed.

data (n, h, w, ci), filter (co, kh, kw, ci), bias (co,) if there is one, output (n, out_h, out_w, co), all in `dtype`;
sums in float32.  The filter has its input channels last, as cuDNN's: then both operands of the implicit product are
rows of contiguous channels, which 16-byte loads and `ldmatrix` take as they lie, and an odd number of output channels
costs no alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem
from schedules.core.reference import convolve, finished, normal_inputs
from schedules.definitions.epilogue import ACCUMULATOR, finish, placeholders, terms_at
from schedules.definitions.padding import select
from schedules.steps.story import next_step

if TYPE_CHECKING:
    from tvm import te
    from tvm.s_tir import Schedule
    from tvm.tirx import PrimExpr

inputs = normal_inputs


@dataclass(frozen=True)
class NhwcProblem(FusedConv2dProblem):
    """A convolution of NHWC data with an OHWI filter."""

    channel_axes = (3,)

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.n * self.out_h * self.out_w

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        output = (self.n, self.out_h, self.out_w, self.co)
        return (self.n, self.h, self.w, self.ci), (self.co, self.kh, self.kw, self.ci), output


def definition(problem: NhwcProblem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv`` (the sum over kh, kw, ci), ``output``.

    Returns [data, filter, bias if there is one, the output].
    """
    from tvm import te

    p = problem
    given = placeholders(p)
    data, weight = given["data"], given["filter"]
    top, left = p.pad
    padded = data
    if p.pad != (0, 0):
        padded = te.compute(
            (p.n, p.h + 2 * top, p.w + 2 * left, p.ci),
            lambda b, y, x, c: select(
                [(top > 0, te.all(y >= top, y - top < p.h)), (left > 0, te.all(x >= left, x - left < p.w))],
                data[b, y - top, x - left, c],
            ),
            name="padded",
        )
    ry, rx, rc = (te.reduce_axis((0, extent), name) for name, extent in (("ry", p.kh), ("rx", p.kw), ("rc", p.ci)))
    conv = te.compute(
        (p.n, p.out_h, p.out_w, p.co),
        lambda b, y, x, f: te.sum(
            padded[b, y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1], rc].astype(
                ACCUMULATOR
            )
            * weight[f, ry, rx, rc].astype(ACCUMULATOR),
            axis=[ry, rx, rc],
        ),
        name="conv",
    )
    output = te.compute(
        conv.shape,
        lambda b, y, x, f: finish(p.epilogue, conv[b, y, x, f], terms_at(p, given, (b, y, x, f))),
        name="output",
    )
    return [*given.values(), output]


def gemm_definition(problem: NhwcProblem, tile: tuple[int, int, int]) -> list[te.Tensor]:
    """The same as one matrix product: ``conv`` (pixels, co) = sum over kh, kw, ci of ``columns`` (kh, kw, pixels, ci) x
    ``weights`` (kh, kw, co, ci).

    A pixel is (image, out_y, out_x).  The extents of (pixels, co, ci) are rounded up to multiples of `tile` with zeros
    in ``columns`` and ``weights``, which schedules inline into their loads.  ``finished`` is ``conv`` after the
    epilogue; ``output`` (pixels, co) keeps what was asked for: `unflatten_output` gives it the problem's shape.

    Returns [data, filter, bias if there is one, the output].
    """
    from tvm import te

    p = problem
    given = placeholders(p)
    data, weight = given["data"], given["filter"]
    image = p.out_h * p.out_w
    pixels, co, ci = (-(-size // t) * t for size, t in zip((p.pixels, p.co, p.ci), tile, strict=True))

    def column(ry: PrimExpr, rx: PrimExpr, pixel: PrimExpr, c: PrimExpr) -> PrimExpr:
        y = pixel % image // p.out_w * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        x = pixel % p.out_w * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        tests = [
            (pixels > p.pixels, pixel < p.pixels),
            (p.pad[0] > 0, te.all(y >= 0, y < p.h)),
            (p.pad[1] > 0, te.all(x >= 0, x < p.w)),
            (ci > p.ci, c < p.ci),
        ]
        return select(tests, data[pixel // image, y, x, c])

    columns = te.compute((p.kh, p.kw, pixels, ci), column, name="columns")
    weights = te.compute(
        (p.kh, p.kw, co, ci),
        lambda ry, rx, f, c: select([(co > p.co, f < p.co), (ci > p.ci, c < p.ci)], weight[f, ry, rx, c]),
        name="weights",
    )
    ry, rx, rc = (te.reduce_axis((0, extent), name) for name, extent in (("ry", p.kh), ("rx", p.kw), ("rc", ci)))
    conv = te.compute(
        (pixels, co),
        lambda pixel, f: te.sum(
            columns[ry, rx, pixel, rc].astype(ACCUMULATOR) * weights[ry, rx, f, rc].astype(ACCUMULATOR),
            axis=[ry, rx, rc],
        ),
        name="conv",
    )

    def element(pixel: PrimExpr, f: PrimExpr) -> PrimExpr:
        # beyond the last pixel and channel there are no terms to read; what stands there is dropped
        m, channel = te.min(pixel, p.pixels - 1), te.min(f, p.co - 1)
        at = (m // image, m % image // p.out_w, m % p.out_w, channel)
        return finish(p.epilogue, conv[pixel, f], terms_at(p, given, at))

    finished = te.compute((pixels, co), element, name="finished")
    output = te.compute((p.pixels, p.co), lambda pixel, f: finished[pixel, f], name="output")
    return [*given.values(), output]


def unflatten_output(sch: Schedule, problem: NhwcProblem) -> None:
    """Give the argument that ``output`` of `gemm_definition` writes the shape (n, out_h, out_w, co)."""
    p = problem
    next_step(sch, "The output as (n, out_h, out_w, co) again, whose pixels the product counts as one axis")
    sch.transform_layout(
        sch.get_sblock("output"),
        ("write", 0),
        lambda pixel, f: [pixel // (p.out_h * p.out_w), pixel % (p.out_h * p.out_w) // p.out_w, pixel % p.out_w, f],
        assume_injective_transform=True,
    )


def reference(problem: NhwcProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64."""
    data, weight, *terms = arrays
    values, magnitude = convolve(problem, data.transpose(0, 3, 1, 2), weight.transpose(0, 3, 1, 2))
    values, magnitude = (array.transpose(0, 2, 3, 1) for array in (values, magnitude))
    return [finished(problem, values, terms, magnitude)]
