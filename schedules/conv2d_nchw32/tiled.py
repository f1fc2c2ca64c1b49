"""The convolution as a matrix product in tiles, the form that every GPU schedule here starts from.

Rows are output pixels, columns output channels, the sum runs over (ci/32, kh, kw, 32).  Both are split into axes of
their own, so that what one thread holds and what its neighbours hold are never mixed in one index:

rows      (mo, mr, ml): `mr` of one thread, `ml` across threads; a warp's rows are (mr, ml), neighbouring threads hold
          neighbouring pixels
columns   (fo, fg, j, fq, e): channel ``(fo*fgs + fg)*32 + fq*8 + j*es + e``; a thread holds the eight channels (j, e)
          of its `fq` in each of its `fg` groups

The order of the column axes is that of the rows in shared memory.  A matrix instruction takes the columns (fq, e) of
one j together: a thread's share of its result, over all j, is then eight neighbouring channels of a pixel, and a warp
stores contiguous pixels without exchanging anything (the improvement the article leaves open).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from schedules.conv2d_nchw32.definition import GROUP, Nchw32Problem, placeholders
from schedules.conv2d_nchw32.epilogue import epilogue

from schedules.primitives.scatter import scatter

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.tirx import PrimExpr

QUADS = 4  # threads that share a group of 32 channels
CHANNELS = 8  # neighbouring channels of one thread


@dataclass(frozen=True)
class Tile:
    """One warp's tile: mr x ml pixels times fg groups of 32 channels; `chunk` groups of input channels a step."""

    mr: int
    ml: int
    fg: int
    j: int
    chunk: int

    @property
    def e(self) -> int:
        return CHANNELS // self.j

    @property
    def rows(self) -> int:
        return self.mr * self.ml

    @property
    def columns(self) -> int:
        return self.fg * GROUP


def tiled_definition(problem: Nchw32Problem, tile: Tile, block_m: int, block_n: int) -> tirx.PrimFunc:
    """The TE graph in tiles: ``rows`` (data gathered by the taps), ``columns`` (filters), ``conv``, ``output``.

    Pixels are rounded up to `block_m`, channels to `block_n` and input groups to `tile.chunk`, with zeros in `rows` and
    `columns`, so that `conv` computes whole tiles without a test.  ``result`` applies the epilogue,
    ``output`` stores what lies inside the problem.
    """
    from tvm import te, tirx

    p, t = problem, tile
    given = placeholders(p)
    zero = tirx.const(0, "int8")
    mo = -(-p.pixels // block_m) * block_m // t.rows
    fo = -(-p.co_groups * GROUP // block_n) * block_n // t.columns
    ci_groups = -(-p.ci_groups // t.chunk) * t.chunk
    image = p.out_h * p.out_w

    def guarded(tests: list[tuple[bool, PrimExpr]], value: PrimExpr) -> PrimExpr:
        needed = [test for is_needed, test in tests if is_needed]
        return te.if_then_else(te.all(*needed), value, zero) if needed else value

    def pixel(a: PrimExpr, r: PrimExpr, b: PrimExpr) -> PrimExpr:
        return (a * t.mr + r) * t.ml + b

    def row(g: PrimExpr, ky: PrimExpr, kx: PrimExpr, a: PrimExpr, r: PrimExpr, b: PrimExpr, c: PrimExpr) -> PrimExpr:
        m = pixel(a, r, b)
        # without padding or strides a row of outputs is a row of inputs
        y = m % image // p.out_w * p.stride[0] + ky * p.dilation[0] - p.pad[0]
        x = m % p.out_w * p.stride[1] + kx * p.dilation[1] - p.pad[1]
        return guarded(
            [
                (p.pad[0] > 0, te.all(y >= 0, y < p.h)),
                (p.pad[1] > 0, te.all(x >= 0, x < p.w)),
                (p.pixels % block_m > 0, m < p.pixels),
                (ci_groups > p.ci_groups, g < p.ci_groups),
            ],
            given.data[m // image, g, y, x, c],
        )

    def channel(
        o: PrimExpr, g: PrimExpr, j: PrimExpr, q: PrimExpr, e: PrimExpr
    ) -> PrimExpr:
        return (o * t.fg + g) * GROUP + q * CHANNELS + j * t.e + e

    def column(g: PrimExpr, ky: PrimExpr, kx: PrimExpr, *at: PrimExpr) -> PrimExpr:
        *f, c = at
        return guarded(
            [
                (p.co_groups * GROUP % block_n > 0, channel(*f) < p.co_groups * GROUP),
                (ci_groups > p.ci_groups, g < p.ci_groups),
            ],
            given.weight[g, ky, kx, channel(*f), c],
        )

    taps = (ci_groups, p.kh, p.kw)
    across = (fo, t.fg, t.j, QUADS, t.e)
    rows = te.compute((*taps, mo, t.mr, t.ml, GROUP), row, name="rows")
    columns = te.compute((*taps, *across, GROUP), column, name="columns")
    extents = {"rg": ci_groups, "ry": p.kh, "rx": p.kw, "rc": GROUP}
    rg, ry, rx, rc = (te.reduce_axis((0, extent), name=name) for name, extent in extents.items())
    conv = te.compute(
        (mo, t.mr, t.ml, *across),
        lambda *at: te.sum(
            rows[rg, ry, rx, at[0], at[1], at[2], rc].astype("int32")
            * columns[(rg, ry, rx, *at[3:], rc)].astype("int32"),
            axis=[rg, ry, rx, rc],
        ),
        name="conv",
    )

    def position(m: PrimExpr, f: PrimExpr) -> tuple[PrimExpr, ...]:
        return (m // image, f // GROUP, m % image // p.out_w, m % p.out_w, f % GROUP)

    def inside(m: PrimExpr, f: PrimExpr) -> PrimExpr:
        return te.all(m < p.pixels, f // GROUP < p.co_groups)

    def split(at: tuple[PrimExpr, ...]) -> tuple[PrimExpr, PrimExpr]:
        """Pixel and channel of the element (mo, mr, ml, fo, fg, fq, c)."""
        a, r, b, o, g, q, c = at
        return pixel(a, r, b), (o * t.fg + g) * GROUP + q * CHANNELS + c

    shape = (mo, t.mr, t.ml, fo, t.fg, QUADS, CHANNELS)
    bias = addend = None
    if given.bias is not None:
        bias = te.compute(
            (fo, t.fg, QUADS, CHANNELS),
            lambda o, g, q, c: te.if_then_else(
                (o * t.fg + g) < p.co_groups, given.bias[(o * t.fg + g) * GROUP + q * CHANNELS + c], tirx.const(0, "int32")
            ),
            name="addends",
        )
    if given.residual is not None:
        addend = te.compute(
            shape,
            lambda *at: te.if_then_else(
                inside(*split(at)), given.residual[position(*split(at))], tirx.const(0, p.out_dtype)
            ),
            name="residuals",
        )

    def finish(*at: PrimExpr) -> PrimExpr:
        a, r, b, o, g, q, c = at
        return epilogue(
            p,
            conv[a, r, b, o, g, c // t.e, q, c % t.e],
            bias[o, g, q, c] if bias is not None else None,
            addend[at] if addend is not None else None,
        )

    result = te.compute(shape, finish, name="result")
    output = te.compute(shape, lambda *at: result(*at), name="output")
    func = te.create_prim_func([*given.tensors(), output])
    return scatter(func, p.arguments()[-1].shape, lambda *at: (inside(*split(at)), position(*split(at))))
