"""HWCN convolution in float32 on CUDA cores: for each pixel, output channels x batch.

A block computes a tile of (output channels, batch) for one pixel.  Tiles of both operands come by cp.async into stages
of shared memory while earlier ones are multiplied; a thread adds outer products to sums that it keeps in registers.
Its part of the tile is made of 4 x 4 pieces spread over the block's, so that the lanes of a warp read neighbouring
128-bit vectors of shared memory.  Kernel taps that lie in the padding are never fetched nor multiplied.
Sources: CUTLASS's SIMT main loop; the TVM tutorial "How to optimize convolution on GPU" for the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, Pair
from schedules.core.tvm import LoopRV, PrimExpr, Schedule, te, tirx, tvm
from schedules.definitions.implicit import At, Implicit, stage
from schedules.lowering.annotations import AHEAD, ASYNC, INSIDE_FIRST, MIN_BLOCKS, PIPELINE, SKIP
from schedules.operators.conv2d_hwcn.definition import COLUMNS, WEIGHTS, HwcnProblem, inside_window
from schedules.steps.simt import VECTORS
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, cooperative_fetch, widest_vector

PIECE = 4  # outputs of a piece along each axis: a 128-bit vector of either operand


@dataclass(frozen=True)
class SimtConfig(Config):
    """Pairs are (output channels, batch); `step` counts input channels."""

    block: Pair = (128, 64)  # output tile of a block
    tile: Pair = (8, 8)  # outputs of a thread
    lanes: Pair = (4, 8)  # how the 32 threads of a warp lie in the tile, neighbours along the batch ..
    interleave: int = 1  # .. but for this many, which neighbour along the channels
    step: int = 16  # input channels in shared memory at a time
    stages: int = 4  # tiles of both operands in shared memory at once
    ahead: bool = False  # operands of the next channel are loaded into registers before this one's are multiplied
    skip_padding: bool = True  # kernel taps in the padding are left out; else they are multiplied as zeros
    inside_first: bool = (
        True  # pixels whose window lies within the image come first; those with less to do fill the end
    )
    lead: int = 0  # blocks of the others that start before those, so that a multiprocessor's do not end together
    vector: int = 4  # elements of one cp.async, where the layout allows it
    min_blocks: int = 0  # blocks a multiprocessor should hold, for the compiler's register budget; 0 leaves it open

    @property
    def warps(self) -> Pair:
        return tuple(b // (t * w) for b, t, w in zip(self.block, self.tile, self.lanes, strict=True))  # type: ignore

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.step * sum(self.block) * 4

    def pieces(self, axis: int) -> tuple[int, int, int, int]:
        """(pieces of a thread, warps, lanes, outputs of a piece) that make up the block's tile along `axis`."""
        piece = widest_vector(self.tile[axis], PIECE)
        return self.tile[axis] // piece, self.warps[axis], self.lanes[axis], piece

    def registers(self) -> int:
        """An estimate for each thread: sums, one or two sets of operands, and addressing."""
        return self.tile[0] * self.tile[1] + sum(self.tile) * (2 if self.ahead else 1) + 32

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        if problem.dtype != "float32":
            return f"dtype={problem.dtype}: these are float32 multiply-adds; use another schedule"
        if "cp_async" not in arch.features:
            return f"{arch} has no cp.async; use the schedule tutorial"
        for name in ("block", "tile", "lanes"):
            if min(getattr(self, name)) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.lanes[0] * self.lanes[1] != arch.wave:
            return f"lanes={self.lanes} are not the {arch.wave} threads of a warp"
        if self.interleave < 1 or self.lanes[0] % self.interleave:
            return f"interleave={self.interleave} does not divide the {self.lanes[0]} lanes along the channels"
        for axis in (0, 1):
            of_warp = self.tile[axis] * self.lanes[axis]
            if self.block[axis] % of_warp:
                return f"block={self.block[axis]} is not a multiple of tile x lanes={of_warp}"
        if self.vector not in VECTORS:
            return f"vector={self.vector} is not 1, 2 or 4 (128 bits are 4 float32)"
        if self.step < 1 or (self.ahead and self.step % 2):
            return f"step={self.step} must be {'even, with operands loaded ahead' if self.ahead else 'at least 1'}"
        if self.stages < 2:
            return f"stages={self.stages} must be at least 2"
        if self.min_blocks < 0 or self.lead < 0:
            return f"min_blocks={self.min_blocks} and lead={self.lead} must not be negative"
        if self.threads > arch.max_threads:
            return f"block={self.block} has {self.threads} threads, {arch} allows {arch.max_threads}"
        if self.shared_bytes > arch.shared_block:
            return (
                f"stages={self.stages} needs {self.shared_bytes} bytes of shared memory, {arch} has {arch.shared_block}"
            )
        if self.registers() > arch.registers_thread:
            return f"tile={self.tile} needs about {self.registers()} registers, {arch} has {arch.registers_thread}"
        if self.min_blocks * self.threads * (self.registers() - 24) > arch.registers_sm:
            return (
                f"min_blocks={self.min_blocks} of {self.threads} threads leave too few registers for tile={self.tile}"
            )
        if self.min_blocks * (self.shared_bytes + arch.shared_reserved) > arch.shared_sm:
            return f"min_blocks={self.min_blocks} need more shared memory than {arch} has"
        return None


def graph(problem: HwcnProblem, config: SimtConfig, arch: Arch) -> tirx.PrimFunc:
    """The product of `definition.pixel_product` in the form the schedule wants: the axes of the tile as (block, piece,
    warp, lane, output).

    ``weights_pieces`` (kh, kw, ci, *co's five) and ``columns_pieces`` (out_h, out_w, kh, kw, ci, *n's five) are the
    operands as threads hold them, ``conv`` (out_h, out_w, *co's five, *n's five) the sums.
    """
    p = problem
    made = Implicit(p, dict(zip(("co", "n", "ci"), (*config.block, config.step), strict=True)))
    weights, columns = made.weights(WEIGHTS).tensor, made.columns(COLUMNS).tensor
    ci, co, n = (made.extent(axis) for axis in ("ci", "co", "n"))
    of_f, of_n = ((size // config.block[axis], *config.pieces(axis)) for axis, size in enumerate((co, n)))

    def joined(at: Sequence[PrimExpr], extents: tuple[int, ...]) -> PrimExpr:
        index = at[0]
        for extent, inner in zip(extents[1:], at[1:], strict=True):
            index = index * extent + inner
        return index

    def apart(index: PrimExpr, extents: tuple[int, ...]) -> list[PrimExpr]:
        at: list[PrimExpr] = []
        for extent in extents[:0:-1]:
            at, index = [index % extent, *at], index // extent
        return [index, *at]

    weights_pieces = te.compute(
        (p.kh, p.kw, ci, *of_f), lambda ry, rx, c, *f: weights[ry, rx, c, joined(f, of_f)], name="weights_pieces"
    )
    columns_pieces = te.compute(
        (p.out_h, p.out_w, p.kh, p.kw, ci, *of_n),
        lambda y, x, ry, rx, c, *b: columns[y, x, ry, rx, c, joined(b, of_n)],
        name="columns_pieces",
    )
    ry, rx, rc = (te.reduce_axis((0, extent), name) for name, extent in (("ry", p.kh), ("rx", p.kw), ("rc", ci)))
    conv = te.compute(
        (p.out_h, p.out_w, *of_f, *of_n),
        lambda y, x, *at: te.sum(
            weights_pieces(ry, rx, rc, *at[: len(of_f)]) * columns_pieces(y, x, ry, rx, rc, *at[len(of_f) :]),
            axis=[ry, rx, rc],
        ),
        name="conv",
    )

    def element(at: At) -> PrimExpr:
        return made.finish(conv(at["y"], at["x"], *apart(at["co"], of_f), *apart(at["n"], of_n)), at)

    return made.program(stage("output", p.output_axes, p.shapes()[2], element))


def schedule(problem: HwcnProblem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    sch = Schedule(graph(problem, config, arch))
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")

    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    shared = [sch.get_sblock(name) for name in ("weights", "columns")]
    pieces = [sch.get_sblock(f"{name}_pieces") for name in ("weights", "columns")]
    for blocks, scope in ((shared, "shared.dyn"), (pieces, "local"), ([conv], "local")):
        for block in blocks:
            sch.set_scope(block, 0, scope)

    next_step(sch, "Blocks, warps and lanes, and tiles of the reduction")
    y, x, block_f, vf, wf, lf, f, block_n, vn, wn, ln, n, ry, rx, rc = sch.get_loops(conv)
    tile, step = sch.split(rc, [None, config.step])
    sch.reorder(y, x, block_f, block_n, wf, wn, lf, ln, ry, rx, tile, step, vf, f, vn, n)
    grid = sch.fuse(y, x, block_f, block_n)
    sch.bind(grid, "blockIdx.x")
    if config.skip_padding and config.inside_first:
        window = inside_window(problem)
        if window:
            of_pixel = -(-problem.co // config.block[0]) * -(-problem.n // config.block[1])
            others = (problem.out_h * problem.out_w - window[1] * window[3]) * of_pixel
            sch.annotate(grid, INSIDE_FIRST, [of_pixel, problem.out_w, *window, min(config.lead, others)])
    _bind_threads(sch, (wf, wn), (lf, ln), config)

    next_step(sch, "Where each stage lives: all threads fetch both tiles ahead of their use, each loads its own pieces")
    for block in pieces:
        sch.compute_at(block, step, preserve_unit_loops=True)
        *_, piece, _, _, vector = sch.get_loops(block)
        sch.unroll(piece)
        sch.vectorize(vector)
    for block, size in zip(shared, (problem.co, problem.n), strict=True):
        sch.compute_at(block, tile, preserve_unit_loops=True)
        cooperative_fetch(sch, block, 2, (config.threads // 32, 32), widest_vector(size, config.vector))
    for annotation, value in (
        (PIPELINE, config.stages),
        (ASYNC, 1),
        (AHEAD, config.ahead),
        (SKIP, config.skip_padding),
    ):
        sch.annotate(ry, annotation, int(value))
    for loop in (vf, f, vn, n, *sch.get_loops(sch.decompose_reduction(conv, ry))[-4:]):
        sch.unroll(loop)

    next_step(sch, "The way out: every thread stores its own sums")
    sch.reverse_compute_at(output, grid, preserve_unit_loops=True)
    f, n = sch.get_loops(output)[-2:]
    vf, wf, lf, f = sch.split(f, [None, *config.pieces(0)[1:]])
    vn, wn, ln, n = sch.split(n, [None, *config.pieces(1)[1:]])
    n, vector = sch.split(n, [None, widest_vector(problem.n, config.pieces(1)[3])])
    sch.reorder(wf, wn, lf, ln, vf, f, vn, n, vector)
    _bind_threads(sch, (wf, wn), (lf, ln), config)
    sch.vectorize(vector)
    for loop in (vf, f, vn, n):
        sch.unroll(loop)
    if config.min_blocks:
        sch.mod.update_func(sch.mod.get_global_var("main"), sch.mod["main"].with_attr(MIN_BLOCKS, config.min_blocks))
    return sch.mod


def _bind_threads(sch: Schedule, warps: Sequence[LoopRV], lanes: Sequence[LoopRV], config: SimtConfig) -> None:
    """Bind adjacent loops over (channels, batch) of warps, then of lanes."""
    f, n = lanes
    f, neighbour = sch.split(f, [None, config.interleave])
    sch.reorder(f, n, neighbour)
    bind(sch, (sch.fuse(*warps), "threadIdx.y"), (sch.fuse(f, n, neighbour), "threadIdx.x"))


# (block, tile, lanes) that defaults are chosen from, in the order of preference
SHAPES: tuple[tuple[Pair, Pair, Pair], ...] = (
    ((64, 64), (8, 8), (4, 8)),
    ((128, 64), (8, 8), (4, 8)),
    ((64, 128), (8, 8), (4, 8)),
    ((64, 64), (8, 4), (4, 8)),
    ((128, 32), (8, 4), (4, 8)),
    ((32, 128), (4, 8), (4, 8)),
    ((64, 32), (8, 4), (4, 8)),
    ((32, 64), (4, 8), (4, 8)),
    ((32, 32), (4, 4), (4, 8)),
    ((128, 16), (8, 2), (4, 8)),
    ((16, 128), (2, 8), (4, 8)),
    ((128, 8), (8, 1), (4, 8)),
    ((8, 128), (1, 8), (4, 8)),
    ((128, 4), (4, 1), (8, 4)),
    ((4, 128), (1, 4), (4, 8)),
    ((64, 1), (2, 1), (32, 1)),
    ((32, 1), (1, 1), (32, 1)),
)
LOAD = 2.0  # what a 128-bit load of shared memory costs, in multiply-adds
REST = 9.0  # what fetching, waiting and counting cost a thread for each input channel


def default(problem: HwcnProblem, arch: Arch) -> SimtConfig:
    """The tile with the least work on the busiest multiprocessor; three stages of sixteen channels, or of as few as
    there are.  A thread with few sums has registers for the next operands."""
    p = problem

    def cost(shape: tuple[Pair, Pair, Pair]) -> float:
        (block_f, block_n), (f, n), _ = shape
        blocks = -(-p.co // block_f) * -(-p.n // block_n) * p.out_h * p.out_w
        loads = -(-f // PIECE) + -(-n // PIECE)
        busiest = max(1.0, blocks / arch.device.multiprocessors)
        return busiest * block_f * block_n * (1 + (LOAD * loads + REST) / (f * n))

    block, tile, lanes = min(SHAPES, key=cost)
    step = next((step for step in (4, 8) if p.ci <= step), 16)
    return SimtConfig(block, tile, lanes, step=step, stages=3, ahead=tile[0] * tile[1] < 64)


def space(problem: HwcnProblem, arch: Arch) -> Iterator[SimtConfig]:
    # a thread's tile; the blocks that it fills; register budgets, 0 for none
    shapes = (
        ((8, 8), ((64, 64), (128, 64), (64, 128), (128, 128), (256, 64), (64, 256)), (0, 96, 128)),
        ((16, 8), ((128, 64), (128, 128), (256, 64), (256, 128)), (0, 168)),
        ((8, 16), ((64, 128), (128, 128), (64, 256), (128, 256)), (0, 168)),
        ((8, 4), ((64, 64), (128, 64), (64, 128), (128, 32)), (0,)),
        ((4, 8), ((64, 64), (128, 64), (64, 128), (32, 128)), (0,)),
        ((4, 4), ((32, 32), (64, 32), (32, 64), (64, 64)), (0,)),
    )
    lanes = (((4, 8), 1), ((4, 8), 2), ((8, 4), 1))
    depths = ((8, 4), (8, 5), (16, 2), (16, 3), (16, 4), (16, 5), (32, 2), (32, 3))
    skips = (True,) if problem.pad == (0, 0) else (True, False)
    uneven = inside_window(problem) is not None
    several = (0, arch.device.multiprocessors)  # blocks that may start first
    for tile, blocks, budgets in shapes:
        for block, (lane, interleave), (step, stages), ahead, skip in product(
            blocks, lanes, depths, (False, True), skips
        ):
            config = SimtConfig(block, tile, lane, interleave, step, stages, ahead, skip)
            if config.threads:
                counts = {arch.registers_sm // (budget * config.threads) if budget else 0 for budget in budgets}
                leads = several if skip and uneven and step == 32 else (0,)
                yield from (replace(config, min_blocks=m, lead=lead) for m, lead in product(sorted(counts), leads))


SCHEDULE = ScheduleSpec(
    name="simt",
    summary="float32 on CUDA cores: multi-stage cp.async, sums in registers, no work in the padding",
    kinds=("cuda",),
    config=SimtConfig,
    apply=schedule,
    default=default,
    space=space,
    channels_along_rows=True,
    graph=graph,
)
