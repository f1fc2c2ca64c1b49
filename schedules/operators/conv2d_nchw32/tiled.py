"""The convolution as a matrix product, the form that every GPU schedule here starts from.

Rows are output pixels, columns output channels, the sum runs over (ci/32, kh, kw, 32).  A schedule rounds both up to
its tiles; only the fetch and the last store are predicated.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.epilogue import Term
from schedules.core.tvm import LoopRV, PrimExpr, Schedule, te, tirx
from schedules.definitions.epilogue import finish
from schedules.definitions.implicit import At, Implicit, at_run_time
from schedules.definitions.padding import select
from schedules.definitions.program import program_of
from schedules.definitions.scatter import scatter
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.steps.tiles import bind

CHANNELS = 8  # neighbouring channels that one thread finishes and stores
QUADS = GROUP // CHANNELS  # threads that share the channels of a pixel's group


def stage_of(term: Term) -> str:
    """The stage that an operand of the epilogue comes by: as threads hold it, with zeros beyond the problem."""
    return f"{term.name}_values"


@dataclass(frozen=True)
class Rounding:
    """How a schedule cuts the product: tiles of `pixels` x `channels`, `chunk` groups of input channels a step, `lanes`
    neighbouring pixels in neighbouring lanes.

    A thread finishes eight neighbouring channels.  Of one instruction's result it holds `slots` of a pixel, `run`
    neighbouring columns at a time, and `quads` threads share the pixel.  The columns are ordered so that over 8 / slots
    instructions a thread collects its eight channels, and a warp stores whole pixels without exchanging anything (the
    improvement that the article leaves open).
    """

    pixels: int
    channels: int
    chunk: int
    run: int
    lanes: int
    quads: int = QUADS
    slots: int = 0  # as many as `run`, if unsaid

    @property
    def held(self) -> int:
        return self.slots or self.run

    def channel(self, position: PrimExpr) -> PrimExpr:
        """The channel of column `position`."""
        unit, columns = self.quads * CHANNELS, self.quads * self.held
        instruction, column = position % unit // columns, position % columns
        lane = column // self.run % self.quads
        slot = column // (self.run * self.quads) * self.run + column % self.run
        return position // unit * unit + lane * CHANNELS + instruction * self.held + slot

    def column(self, group: PrimExpr, quad: PrimExpr, channel: PrimExpr) -> PrimExpr:
        """The column of the `channel` of `quad` of a group of 32."""
        slot = channel % self.held
        place = slot // self.run * (self.run * self.quads) + quad % self.quads * self.run + slot % self.run
        outer = group * GROUP + quad // self.quads * (self.quads * CHANNELS)
        return outer + channel // self.held * (self.quads * self.held) + place


def tiled_definition(problem: Nchw32Problem, rounding: Rounding, transposed: bool = False) -> tirx.PrimFunc:
    """The TE program: ``rows`` (ci/32, kh, kw, pixel, 32), data gathered by the taps; ``columns`` (ci/32, kh, kw,
    column, 32), filters; ``conv`` (pixel, column), or (column, pixel) if `transposed`; ``result``, with the epilogue;
    ``output``, which stores what lies inside the problem.

    The epilogue's operands come as stages (`stage_of`).  After ``conv``, channels have axes (group, quad, 8)
    and pixels (many, lane), `rounding.lanes` of them in neighbouring lanes: TVM can then tell what one thread needs.
    """
    p, r = at_run_time(problem), rounding
    made = Implicit(p, {"pixel": r.pixels, "co": r.channels, "gi": r.chunk})
    given, pixels, channels = made.given, made.extent("pixel"), made.extent("co")

    def within(m: PrimExpr, g: PrimExpr) -> list[tuple[bool, PrimExpr]]:
        return [(made.ragged("pixel"), m < p.pixels), (channels > p.co_groups * GROUP, g < p.co_groups)]

    def place(m: PrimExpr, g: PrimExpr, f: PrimExpr) -> tuple[PrimExpr, ...]:
        at = made.apart({"pixel": m})
        return at["n"], g, at["y"], at["x"], f

    def ordered(at: At) -> PrimExpr:
        return made.filter({**at, "co": r.channel(at["co"])})

    rows, columns = made.columns("gi kh kw pixel li", "rows"), made.weights("gi kh kw co li", "columns", ordered)
    axes, pair = ("co pixel", (columns, rows)) if transposed else ("pixel co", (rows, columns))
    conv = made.conv(axes, pair)
    shape = (pixels // r.lanes, r.lanes, channels // GROUP, QUADS, CHANNELS)

    def staged(term: Term) -> te.Tensor:
        source = given[term.name]
        if term.axis == "tensor":
            return te.compute((1,), lambda one: source[one], name=stage_of(term))
        if term.axis == "channel":
            return te.compute(
                shape[2:],
                lambda g, q, c: select(within(0, g)[1:], source[g * GROUP + q * CHANNELS + c]),
                name=stage_of(term),
            )
        return te.compute(
            shape,
            lambda m, lane, g, q, c: select(
                within(m * r.lanes + lane, g), source[place(m * r.lanes + lane, g, q * CHANNELS + c)]
            ),
            name=stage_of(term),
        )

    operands = [(operand.axis, staged(operand)) for operand in p.epilogue.operands]

    def element(m: PrimExpr, lane: PrimExpr, g: PrimExpr, q: PrimExpr, c: PrimExpr) -> PrimExpr:
        row, column = m * r.lanes + lane, r.column(g, q, c)
        index = {"tensor": (0,), "channel": (g, q, c), "element": (m, lane, g, q, c)}
        values = [stage[index[axis]] for axis, stage in operands]
        return finish(p.epilogue, conv({"pixel": row, "co": column}), values)

    result = te.compute(shape, element, name="result")
    output = te.compute(shape, lambda *at: result(*at), name="output")
    program = program_of([*given.values(), output])

    def destination(
        m: PrimExpr, lane: PrimExpr, g: PrimExpr, q: PrimExpr, c: PrimExpr
    ) -> tuple[PrimExpr, tuple[PrimExpr, ...]]:
        pixel = m * r.lanes + lane
        tests = [test for is_needed, test in within(pixel, g) if is_needed]
        return te.all(*tests) if tests else tirx.const(True, "bool"), place(pixel, g, q * CHANNELS + c)

    return scatter(program, p.arguments()[-1].shape, destination)


def schedule_output(
    sch: Schedule, problem: Nchw32Problem, rounding: Rounding, warps: tuple[int, int], quads_first: bool
) -> None:
    """Blocks, warps (pixels, channels) and lanes (pixels, quads), or (quads, pixels) if `quads_first`, of the store;
    the epilogue in each lane's registers; ``conv`` in the block."""
    conv, output, result = (sch.get_sblock(name) for name in ("conv", "output", "result"))
    m, lane, g, quad, c = sch.get_loops(output)
    block_m, warp_m, m = sch.split(m, [None, warps[0], rounding.pixels // rounding.lanes // warps[0]])
    block_n, warp_n, g = sch.split(g, [None, warps[1], rounding.channels // GROUP // warps[1]])
    several, quad = sch.split(quad, [None, rounding.quads])
    lanes = (quad, lane) if quads_first else (lane, quad)
    sch.reorder(block_m, block_n, warp_m, warp_n, *lanes, g, several, m, c)
    g = sch.fuse(g, several)
    sch.compute_at(result, m, preserve_unit_loops=True)
    sch.set_scope(result, 0, "local")
    sch.unroll(sch.get_loops(result)[-1])
    for operand in reversed(problem.epilogue.operands):
        stage = sch.get_sblock(stage_of(operand))
        at = {"tensor": lanes[-1], "channel": g, "element": m}[operand.axis]
        sch.compute_at(stage, at, preserve_unit_loops=True)
        sch.set_scope(stage, 0, "local")
        if operand.axis != "tensor":
            _vectorize(sch, sch.get_loops(stage)[-1], operand.dtype)
    _vectorize(sch, c, problem.epilogue.out_dtype)
    sch.compute_at(conv, block_n, preserve_unit_loops=True)
    # channels fastest: blocks that run together share their pixels, and all of the filter stays in the L2 cache
    sch.bind(sch.fuse(block_m, block_n), "blockIdx.x")
    bind(sch, (sch.fuse(warp_m, warp_n), "threadIdx.y"), (sch.fuse(*lanes), "threadIdx.x"))
    sch.unroll(g)
    sch.unroll(m)


def _vectorize(sch: Schedule, loop: LoopRV, dtype: str) -> None:
    """`loop` over a thread's eight channels in vectors as wide as `dtype` allows."""
    _, vector = sch.split(loop, [None, CHANNELS if dtype == "int8" else 4])
    sch.vectorize(vector)
