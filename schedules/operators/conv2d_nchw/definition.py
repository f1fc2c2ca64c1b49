"""Convolution over NCHW data: what is computed.

data (n, ci, h, w), filter (co, ci, kh, kw), bias (co,) if there is one, output (n, co, out_h, out_w), all in `dtype`;
sums in float32.  With ``filter_layout=hwoi`` the filter comes packed, (kh, kw, co, ci), as `packing.pack_filter` makes
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem
from schedules.core.reference import convolve, finished, normal_inputs
from schedules.definitions.epilogue import ACCUMULATOR, finish, terms_at
from schedules.definitions.epilogue import placeholders as inputs_of
from schedules.definitions.padding import select
from schedules.definitions.scatter import scatter
from schedules.operators.conv2d_nchw.packing import unpack_filter
from schedules.steps.tiles import widest_vector

if TYPE_CHECKING:
    from tvm import te, tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import SBlockRV
    from tvm.tirx import PrimExpr

inputs = normal_inputs


@dataclass(frozen=True)
class NchwProblem(FusedConv2dProblem):
    """A convolution of NCHW data; `filter_layout` is oihw, (co, ci, kh, kw), or packed hwoi, (kh, kw, co, ci)."""

    channel_axes = (1,)
    filter_layouts: ClassVar[tuple[str, ...]] = ("oihw", "hwoi")

    filter_layout: str = "oihw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter_layout not in self.filter_layouts:
            raise ProblemError(f"filter_layout={self.filter_layout} is not {' or '.join(self.filter_layouts)}")

    @property
    def packed(self) -> bool:
        """Whether the filter is packed."""
        return self.filter_layout == "hwoi"

    @property
    def reduction(self) -> int:
        """Products in one output element."""
        return self.ci * self.kh * self.kw

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.n * self.out_h * self.out_w

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        packed, plain = (self.kh, self.kw, self.co, self.ci), (self.co, self.ci, self.kh, self.kw)
        output = (self.n, self.co, self.out_h, self.out_w)
        return (self.n, self.ci, self.h, self.w), packed if self.packed else plain, output


@dataclass(frozen=True)
class Placeholders:
    """The tensors that every TE graph of this operator starts from."""

    problem: NchwProblem
    given: dict[str, te.Tensor]

    @property
    def data(self) -> te.Tensor:
        return self.given["data"]

    def filter_at(self, f: PrimExpr, c: PrimExpr, ry: PrimExpr, rx: PrimExpr) -> PrimExpr:
        """The weight of output channel `f`, input channel `c` and a tap, whatever the filter's layout."""
        weight = self.given["filter"]
        return weight[ry, rx, f, c] if self.problem.packed else weight[f, c, ry, rx]

    def finish(self, total: PrimExpr, *at: PrimExpr) -> PrimExpr:
        """The element (b, f, y, x) of the output, of the sum `total`."""
        return finish(self.problem.epilogue, total, terms_at(self.problem, self.given, at))

    def finish_flat(self, total: PrimExpr, f: PrimExpr, pixel: PrimExpr) -> PrimExpr:
        """The same of a pixel of all images.  Beyond the last channel and pixel there are no terms to read; what stands
        there is dropped."""
        from tvm import te

        p = self.problem
        image, m = p.out_h * p.out_w, te.min(pixel, p.pixels - 1)
        return self.finish(total, m // image, te.min(f, p.co - 1), m % image // p.out_w, m % p.out_w)

    @property
    def tensors(self) -> list[te.Tensor]:
        return list(self.given.values())


def placeholders(problem: NchwProblem) -> Placeholders:
    """The inputs of the TE graph."""
    return Placeholders(problem, inputs_of(problem))


def definition(problem: NchwProblem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv`` (the sum over ci, kh, kw), ``output``.

    Returns [data, filter, bias if there is one, the output].
    """
    from tvm import te

    p = problem
    given = placeholders(p)
    top, left = p.pad
    padded = given.data
    if p.pad != (0, 0):
        padded = te.compute(
            (p.n, p.ci, p.h + 2 * top, p.w + 2 * left),
            lambda b, c, y, x: select(
                [(top > 0, te.all(y >= top, y - top < p.h)), (left > 0, te.all(x >= left, x - left < p.w))],
                given.data[b, c, y - top, x - left],
            ),
            name="padded",
        )
    rc, ry, rx = (te.reduce_axis((0, extent), name) for name, extent in (("rc", p.ci), ("ry", p.kh), ("rx", p.kw)))
    conv = te.compute(
        (p.n, p.co, p.out_h, p.out_w),
        lambda b, f, y, x: te.sum(
            padded[b, rc, y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1]].astype(
                ACCUMULATOR
            )
            * given.filter_at(f, rc, ry, rx).astype(ACCUMULATOR),
            axis=[rc, ry, rx],
        ),
        name="conv",
    )
    output = te.compute(conv.shape, lambda b, f, y, x: given.finish(conv[b, f, y, x], b, f, y, x), name="output")
    return [*given.tensors, output]


@dataclass(frozen=True)
class Matrices:
    """The operands of implicit GEMM: ``weights`` (co, k) x ``columns`` (k, pixels).

    A column of pixels is (image, out_y, out_x), k is (ci, kh, kw), as a filter lies in memory unless it is packed.
    The extents of (co, pixels, k) are rounded up to multiples of `tile` with zeros, which schedules inline into their
    loads, so that the product is free of tests.
    """

    problem: NchwProblem
    given: Placeholders
    tile: tuple[int, int, int]

    @property
    def extents(self) -> tuple[int, int, int]:
        """(co, pixels, k) in whole tiles."""
        p = self.problem
        co, pixels, k = (-(-size // t) * t for size, t in zip((p.co, p.pixels, p.reduction), self.tile, strict=True))
        return co, pixels, k

    def column(self, k: PrimExpr, pixel: PrimExpr) -> PrimExpr:
        from tvm import te, tirx

        p = self.problem
        image, taps = p.out_h * p.out_w, p.kh * p.kw
        _, pixels, depth = self.extents
        # a main loop that counts k in a variable cannot prove it positive, hence division towards zero
        c, ry = tirx.truncdiv(k, taps), tirx.truncdiv(tirx.truncmod(k, taps), p.kw)
        y = pixel % image // p.out_w * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        x = pixel % p.out_w * p.stride[1] + tirx.truncmod(k, p.kw) * p.dilation[1] - p.pad[1]
        tests = [
            (p.pad[0] > 0, te.all(y >= 0, y < p.h)),
            (p.pad[1] > 0, te.all(x >= 0, x < p.w)),
            (depth > p.reduction, k < p.reduction),
            (pixels > p.pixels, pixel < p.pixels),
        ]
        return select(tests, self.given.data[pixel // image, c, y, x])

    def weight(self, f: PrimExpr, k: PrimExpr) -> PrimExpr:
        p = self.problem
        co, _, depth = self.extents
        value = self.given.filter_at(f, k // (p.kh * p.kw), k % (p.kh * p.kw) // p.kw, k % p.kw)
        return select([(depth > p.reduction, k < p.reduction), (co > p.co, f < p.co)], value)


def gemm_definition(problem: NchwProblem, tile: tuple[int, int, int]) -> list[te.Tensor]:
    """The same as one matrix product in float32: ``conv`` (co, pixels) = sum over k of ``weights`` (k, co) x
    ``columns`` (k, pixels), see `Matrices`; ``output`` keeps what was asked for.

    Returns [data, filter, bias if there is one, the output].
    """
    from tvm import te

    p = problem
    given = placeholders(p)
    matrices = Matrices(p, given, tile)
    co, pixels, depth = matrices.extents
    columns = te.compute(
        (depth, pixels), lambda k, pixel: matrices.column(k, pixel).astype(ACCUMULATOR), name="columns"
    )
    weights = te.compute((depth, co), lambda k, f: matrices.weight(f, k).astype(ACCUMULATOR), name="weights")
    k = te.reduce_axis((0, depth), "k")
    conv = te.compute((co, pixels), lambda f, pixel: te.sum(weights[k, f] * columns[k, pixel], axis=[k]), name="conv")

    def finished(b: PrimExpr, f: PrimExpr, y: PrimExpr, x: PrimExpr) -> PrimExpr:
        return given.finish(conv[f, (b * p.out_h + y) * p.out_w + x if p.pixels > 1 else x], b, f, y, x)

    return [*given.tensors, te.compute((p.n, p.co, p.out_h, p.out_w), finished, name="output")]


@dataclass(frozen=True)
class Image:
    """The pixels of one channel of one image as a convolution sees them: those of 1x1 kernels are one row."""

    size: tuple[int, int]  # (h, w)
    out: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]


def image_of(problem: NchwProblem) -> Image:
    """The image of `problem`; where every output pixel is an input pixel, all of them in one row."""
    p = problem
    if p.kh == p.kw == 1 and p.stride == (1, 1) and p.pad == (0, 0):
        return Image((1, p.h * p.w), (1, p.h * p.w), p.stride, p.pad)
    return Image((p.h, p.w), (p.out_h, p.out_w), p.stride, p.pad)


def rows_definition(problem: NchwProblem, tile: tuple[int, int, int]) -> list[te.Tensor]:
    """The same with the pixels of a row next to each other under every tap: ``padded`` (n, ci, row, phase, x) is data
    with its border, in float32, the column x * stride + phase of `image_of`; ``conv`` (n, co, out_h, out_w) the sum
    over ci, kh, kw; ``output``.

    Extents of (co, out_h, out_w) are rounded up to multiples of `tile`, with zeros in ``padded`` and, beyond the last
    filter, that filter once more: schedules need no test but where ``output`` keeps what was asked for.

    Returns [data, filter, bias if there is one, the output].
    """
    from tvm import te

    p, image = problem, image_of(problem)
    given = placeholders(p)
    (h, w), (top, left), (down, right) = image.size, image.pad, image.stride
    co, out_h, out_w = (-(-size // t) * t for size, t in zip((p.co, *image.out), tile, strict=True))
    rows = (out_h - 1) * down + (p.kh - 1) * p.dilation[0] + 1
    columns = out_w + (p.kw - 1) * p.dilation[1] // right

    def pixel(b: PrimExpr, c: PrimExpr, row: PrimExpr, phase: PrimExpr, column: PrimExpr) -> PrimExpr:
        y, x = row - top, column * right + phase - left
        tests = [
            (top > 0 or rows > h, te.all(y >= 0, y < h)),
            (left > 0 or columns * right > w, te.all(x >= 0, x < w)),
        ]
        value = given.data[b, c, y, x] if h == p.h else given.data[b, c, x // p.w, x % p.w]
        return select(tests, value).astype(ACCUMULATOR)

    padded = te.compute((p.n, p.ci, rows, right, columns), pixel, name="padded")
    rc, ry, rx = (te.reduce_axis((0, extent), name) for name, extent in (("rc", p.ci), ("ry", p.kh), ("rx", p.kw)))

    def element(b: PrimExpr, f: PrimExpr, y: PrimExpr, x: PrimExpr) -> PrimExpr:
        across = rx * p.dilation[1]
        value = padded[b, rc, y * down + ry * p.dilation[0], across % right, x + across // right]
        last = te.min(f, p.co - 1) if co > p.co else f
        return te.sum(value * given.filter_at(last, rc, ry, rx).astype(ACCUMULATOR), axis=[rc, ry, rx])

    conv = te.compute((p.n, co, out_h, out_w), element, name="conv")

    def finished(b: PrimExpr, f: PrimExpr, y: PrimExpr, x: PrimExpr) -> PrimExpr:
        return given.finish(conv[b, f, y, x] if h == p.h else conv[b, f, 0, y * p.out_w + x], b, f, y, x)

    return [*given.tensors, te.compute((p.n, p.co, p.out_h, p.out_w), finished, name="output")]


def flatten_output(sch: Schedule, problem: NchwProblem) -> SBlockRV:
    """The stage ``output`` of `gemm_definition` with the loops of ``conv``, (co, pixels), so that it can be computed at
    one of them."""
    p = problem
    output = sch.get_sblock("output")
    if p.pixels > 1:  # the transform would make a lone pixel a constant, which every thread then stores
        sch.transform_block_layout(output, lambda b, f, y, x: [f, (b * p.out_h + y) * p.out_w + x])
    return output


def product_definition(problem: NchwProblem, tile: tuple[int, int, int]) -> list[te.Tensor]:
    """The same in the form of `steps.tensor_core`: ``conv`` (co, pixels) = sum over k of ``weights`` (co, k) x
    ``columns`` (k, pixels), operands in the problem's dtype; ``finished`` is ``conv`` after the epilogue; ``output``
    (co, pixels) keeps what was asked for, and `product_program` stores it in the problem's shape.

    Returns [data, filter, bias if there is one, the output].
    """
    from tvm import te

    p = problem
    given = placeholders(p)
    matrices = Matrices(p, given, tile)
    co, pixels, depth = matrices.extents
    columns = te.compute((depth, pixels), matrices.column, name="columns")
    weights = te.compute((co, depth), matrices.weight, name="weights")
    k = te.reduce_axis((0, depth), "k")
    conv = te.compute(
        (co, pixels),
        lambda f, pixel: te.sum(weights[f, k].astype(ACCUMULATOR) * columns[k, pixel].astype(ACCUMULATOR), axis=[k]),
        name="conv",
    )
    finished = te.compute(conv.shape, lambda f, pixel: given.finish_flat(conv[f, pixel], f, pixel), name="finished")
    output = te.compute((p.co, p.pixels), lambda f, pixel: finished[f, pixel], name="output")
    return [*given.tensors, output]


def product_program(problem: NchwProblem, tensors: Sequence[te.Tensor]) -> tirx.PrimFunc:
    """The program of a graph whose ``output`` is (co, pixels), which writes (n, co, out_h, out_w).

    The pixels of an image stay one index, of the last axis: taken apart into y and x, the pixels of one vector no
    longer look like neighbours to TVM, which then stores them one by one and by indices that CUDA has no vectors for.
    """
    from tvm import te, tirx

    p = problem
    image = p.out_h * p.out_w

    def place(f: PrimExpr, pixel: PrimExpr) -> tuple[None, tuple[PrimExpr, ...]]:
        return None, (pixel // image, f, tirx.const(0, str(pixel.ty)), pixel % image)

    return scatter(te.create_prim_func(list(tensors)), p.arguments()[-1].shape, place)


def weight_vector(problem: NchwProblem, limit: int) -> int:
    """How many neighbouring weights along k one load may bring: of a packed filter, one."""
    return 1 if problem.packed else widest_vector(problem.reduction, limit)


def pixel_vector(problem: NchwProblem, limit: int) -> int:
    """How many neighbouring pixels one load may bring: more than one only if output pixels are input pixels."""
    p = problem
    plain = p.kh == p.kw == 1 and p.stride == (1, 1) and p.pad == (0, 0)
    return widest_vector(p.out_w, limit) if plain else 1


def reference(problem: NchwProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64."""
    data, weight, *terms = arrays
    weight = unpack_filter(weight) if problem.packed else weight
    values, magnitude = convolve(problem, data, weight)
    return [finished(problem, values, terms, magnitude)]
