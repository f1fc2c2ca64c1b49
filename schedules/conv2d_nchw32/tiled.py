"""The convolution as a matrix product, the form that every GPU schedule here starts from.

Rows are output pixels, columns output channels, the sum runs over (ci/32, kh, kw, 32).  A schedule rounds both up to
its tiles; only the fetch and the last store are predicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedules.conv2d_nchw32.definition import Nchw32Problem, placeholders
from schedules.conv2d_nchw32.epilogue import epilogue
from schedules.conv2d_nchw32.packing import GROUP
from schedules.primitives.padding import select
from schedules.primitives.scatter import scatter
from schedules.primitives.tiles import block_exists

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV
    from tvm.tirx import PrimExpr

CHANNELS = 8  # neighbouring channels that one thread finishes and stores
QUADS = GROUP // CHANNELS  # threads that share the channels of a pixel's group


@dataclass(frozen=True)
class Rounding:
    """How a schedule cuts the product: tiles of `pixels` x `channels`, `chunk` groups of input channels a step.

    `run` is how many neighbouring channels of a pixel a thread holds in one instruction's result.  The columns of each
    group of 32 are ordered (8 / run, 4, run) where channels are (4, 8 / run, run): over 8 / run instructions a thread
    then collects 8 neighbouring channels, and a warp stores whole pixels without exchanging anything (the improvement
    that the article leaves open).  run=8 keeps the order of the channels.
    """

    pixels: int
    channels: int
    chunk: int
    run: int

    def position(self, channel: PrimExpr) -> PrimExpr:
        """The column of `channel`."""
        inner = channel % GROUP
        return channel // GROUP * GROUP + inner % 8 // self.run * (4 * self.run) + inner // 8 * self.run + inner % self.run

    def channel(self, position: PrimExpr) -> PrimExpr:
        """The channel of column `position`."""
        inner = position % GROUP
        quad = 4 * self.run
        return position // GROUP * GROUP + inner % quad // self.run * 8 + inner // quad * self.run + inner % self.run


def tiled_definition(problem: Nchw32Problem, rounding: Rounding, transposed: bool = False) -> tirx.PrimFunc:
    """The TE program with ``rows`` (ci/32, kh, kw, pixel, 32), data gathered by the taps; ``columns`` (ci/32, kh, kw,
    column, 32), filters; ``conv`` (pixel, column), or (column, pixel) if `transposed`; ``result`` (pixel, channel), with
    the epilogue; ``output``, which stores what lies inside the problem.

    Bias and residual come as stages ``biases`` (channel,) and ``residuals`` (pixel, channel).
    """
    from tvm import te, tirx

    p, r = problem, rounding
    given = placeholders(p)
    pixels = -(-p.pixels // r.pixels) * r.pixels
    channels = -(-p.co_groups * GROUP // r.channels) * r.channels
    ci_groups = -(-p.ci_groups // r.chunk) * r.chunk
    image = p.out_h * p.out_w

    def within(m: PrimExpr, f: PrimExpr) -> list[tuple[bool, PrimExpr]]:
        return [(pixels > p.pixels, m < p.pixels), (channels > p.co_groups * GROUP, f // GROUP < p.co_groups)]

    def place(m: PrimExpr, f: PrimExpr) -> tuple[PrimExpr, ...]:
        return m // image, f // GROUP, m % image // p.out_w, m % p.out_w, f % GROUP

    def row(g: PrimExpr, ky: PrimExpr, kx: PrimExpr, m: PrimExpr, c: PrimExpr) -> PrimExpr:
        y = m % image // p.out_w * p.stride[0] + ky * p.dilation[0] - p.pad[0]
        x = m % p.out_w * p.stride[1] + kx * p.dilation[1] - p.pad[1]
        tests = [
            (p.pad[0] > 0, te.all(y >= 0, y < p.h)),
            (p.pad[1] > 0, te.all(x >= 0, x < p.w)),
            (pixels > p.pixels, m < p.pixels),
            (ci_groups > p.ci_groups, g < p.ci_groups),
        ]
        return select(tests, given.data[m // image, g, y, x, c])

    def column(g: PrimExpr, ky: PrimExpr, kx: PrimExpr, n: PrimExpr, c: PrimExpr) -> PrimExpr:
        tests = [
            (channels > p.co_groups * GROUP, n // GROUP < p.co_groups),
            (ci_groups > p.ci_groups, g < p.ci_groups),
        ]
        return select(tests, given.weight[g, ky, kx, r.channel(n), c])

    taps = {"rg": ci_groups, "ry": p.kh, "rx": p.kw}
    rows = te.compute((*taps.values(), pixels, GROUP), row, name="rows")
    columns = te.compute((*taps.values(), channels, GROUP), column, name="columns")
    rg, ry, rx, rc = (te.reduce_axis((0, extent), name=name) for name, extent in {**taps, "rc": GROUP}.items())

    def product(i: PrimExpr, j: PrimExpr) -> PrimExpr:
        first, second = (columns, rows) if transposed else (rows, columns)
        terms = (source[rg, ry, rx, at, rc].astype("int32") for source, at in ((first, i), (second, j)))
        return te.sum(next(terms) * next(terms), axis=[rg, ry, rx, rc])

    conv = te.compute((channels, pixels) if transposed else (pixels, channels), product, name="conv")
    biases = residuals = None
    if given.bias is not None:
        biases = te.compute((channels,), lambda f: select(within(0, f)[1:], given.bias[f]), name="biases")
    if given.residual is not None:
        residuals = te.compute(
            (pixels, channels), lambda m, f: select(within(m, f), given.residual[place(m, f)]), name="residuals"
        )

    def finish(m: PrimExpr, f: PrimExpr) -> PrimExpr:
        at = (r.position(f), m) if transposed else (m, r.position(f))
        bias = biases[f] if biases is not None else None
        return epilogue(p, conv[at], bias, residuals[m, f] if residuals is not None else None)

    result = te.compute((pixels, channels), finish, name="result")
    output = te.compute((pixels, channels), lambda m, f: result[m, f], name="output")
    program = te.create_prim_func([*given.tensors(), output])

    def destination(m: PrimExpr, f: PrimExpr) -> tuple[PrimExpr, tuple[PrimExpr, ...]]:
        tests = [test for is_needed, test in within(m, f) if is_needed]
        return te.all(*tests) if tests else tirx.const(True, "bool"), place(m, f)

    return scatter(program, p.arguments()[-1].shape, destination)


def vectorize_channels(sch: Schedule, loop: LoopRV, dtype: str) -> None:
    """`loop` over a thread's eight channels in vectors as wide as `dtype` allows."""
    _, vector = sch.split(loop, [None, CHANNELS if dtype == "int8" else 4])
    sch.vectorize(vector)


def finish_in_registers(sch: Schedule, problem: Nchw32Problem, group: LoopRV, pixel: LoopRV) -> None:
    """Put the epilogue under loop `pixel` of the store, inside loop `group` over a thread's channel groups, and what it
    adds into registers."""
    result = sch.get_sblock("result")
    sch.compute_at(result, pixel, preserve_unit_loops=True)
    sch.set_scope(result, 0, "local")
    for name, loop, dtype in (("residuals", pixel, problem.out_dtype), ("biases", group, "int32")):
        if block_exists(sch, name):
            sch.compute_at(sch.get_sblock(name), loop, preserve_unit_loops=True)
            sch.set_scope(name, 0, "local")
            vectorize_channels(sch, sch.get_loops(sch.get_sblock(name))[-1], dtype)
