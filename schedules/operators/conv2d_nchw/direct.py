"""Direct convolution for few channels: no matrices, each input pixel is fetched once for a tile of outputs.

A block computes `block` output pixels of one image for `filters` output channels.  The input under them with its halo
lies in shared memory, `channels_per_stage` channels at a time; the next channels are on their way while these are
multiplied: to registers, or by cp.async to other `stages` of shared memory.  A thread keeps all filters of its `pixels`
in registers.

The halo's rows start at an aligned column and are fetched in whole vectors, so that a vector is either inside the image
or all border.  Source: Pegessi, "CUDA convolution by hand" (zhihu 613538649), with padding, stride, dilation and batch
added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, Pair, numpy_dtype
from schedules.definitions.epilogue import ACCUMULATOR
from schedules.definitions.implicit import Implicit, Stage, at_run_time
from schedules.definitions.padding import select
from schedules.lowering.annotations import ASYNC, AT_ONCE, PIPELINE, TURNS_APART
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.steps.launch import MinBlocks
from schedules.steps.story import next_step
from schedules.steps.tiles import bind_grid, widest_vector

if TYPE_CHECKING:
    import tvm
    from tvm import te, tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import SBlockRV
    from tvm.tirx import PrimExpr

ALIGNMENT = 64  # bytes at which TVM lets a buffer start in dynamic shared memory


@dataclass(frozen=True)
class DirectConfig(MinBlocks, Config):
    """Pairs are (height, width)."""

    block: Pair = (12, 64)  # output pixels of a block
    pixels: Pair = (1, 4)  # output pixels of a thread
    filters: int = 6  # output channels of a thread and of a block
    channels_per_stage: int = 0  # input channels that are fetched at a time; 0: all of them, fetched once
    stages: int = 1  # fetches in shared memory at once, by cp.async; 1: each comes through registers when it is needed
    exchange: bool = False  # the output leaves through shared memory, neighbouring pixels by neighbouring threads
    vector: int = 4  # elements of one global load or store, where the rows' lengths allow it
    unroll_rows: bool = True  # unroll the loop over the kernel's rows
    min_blocks: int = 0  # blocks that a multiprocessor must hold, which bounds the registers; 0: no bound

    @property
    def num_thread(self) -> Pair:
        return self.block[0] // self.pixels[0], self.block[1] // self.pixels[1]

    @property
    def threads(self) -> int:
        return self.num_thread[0] * self.num_thread[1]

    def channels(self, problem: NchwProblem) -> int:
        """Input channels of a stage."""
        return min(self.channels_per_stage or problem.ci, problem.ci)

    def steps(self, problem: NchwProblem) -> int:
        """Fetches that the reduction takes."""
        return -(-problem.ci // self.channels(problem))

    def lanes(self, problem: NchwProblem) -> int:
        """Elements of one load: no row and no tile may start inside a vector."""
        return widest_vector(math.gcd(problem.w, self.block[1] * problem.stride[1]), self.vector)

    def shift(self, problem: NchwProblem) -> int:
        """Columns by which the border on the left is widened to whole vectors."""
        return -problem.pad[1] % self.lanes(problem)

    def halo(self, problem: NchwProblem) -> Pair:
        """Rows and columns of the input under a tile, whole vectors."""
        p, lanes = problem, self.lanes(problem)
        rows, columns = p.under(*self.block)
        return rows, -(-(columns + self.shift(p)) // lanes) * lanes

    def weight_row(self, problem: NchwProblem) -> int:
        """Weights of one kernel row and channel for all filters, rounded up so that rows start at 16 bytes."""
        return -(-self.filters * problem.kw // 4) * 4

    def fetchers(self, problem: NchwProblem) -> int:
        """Threads that fetch the halo: with cp.async as many as make whole rows, so that the rounds of a thread lie
        equally far apart."""
        row = self.halo(problem)[1] // self.lanes(problem)
        return self.threads if self.stages == 1 or self.threads < row else self.threads // row * row

    def rounds(self, problem: NchwProblem) -> Pair:
        """Loads of each thread for a stage: vectors of the halo, and weights."""
        rows, columns = self.halo(problem)
        vectors = self.channels(problem) * rows * columns // self.lanes(problem)
        weights = self.channels(problem) * problem.kh * self.weight_row(problem)
        return -(-vectors // self.fetchers(problem)), -(-weights // self.threads)

    def shared_bytes(self, problem: NchwProblem) -> int:
        """Shared memory of a block; with cp.async the output's tile takes the place of the halos."""
        vectors, weights = self.rounds(problem)
        halo, weights = self.fetchers(problem) * vectors * self.lanes(problem), self.threads * weights
        item = numpy_dtype(problem.dtype).itemsize
        output = self.filters * self.block[0] * self.block[1] * item if self.exchange else 0
        if self.stages == 1:
            return (halo + weights) * 4 + output
        return -(-self.stages * weights * item // ALIGNMENT) * ALIGNMENT + max(self.stages * halo * item, output)

    def registers(self, problem: NchwProblem) -> int:
        """An estimate for each thread: sums, a row of the halo, loads on their way, and addressing."""
        sums = self.filters * self.pixels[0] * self.pixels[1]
        window = (self.pixels[1] - 1) * problem.stride[1] + problem.kw
        if self.stages > 1:
            return sums + window + 32
        vectors, weights = self.rounds(problem)
        loads = vectors * self.lanes(problem) + weights
        return (max(sums, loads) if self.steps(problem) == 1 else sums + loads) + window + 32

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        for name in ("block", "pixels"):
            if min(getattr(self, name)) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        for axis in (0, 1):
            if self.block[axis] % self.pixels[axis]:
                return f"block={self.block[axis]} is not a multiple of pixels={self.pixels[axis]}"
        if self.filters < 1:
            return f"filters={self.filters} must be at least 1"
        if self.channels_per_stage < 0 or self.min_blocks < 0:
            return f"channels_per_stage={self.channels_per_stage} and min_blocks={self.min_blocks} must not be negative"
        if self.vector not in (1, 2, 4):
            return f"vector={self.vector} is not 1, 2 or 4 (128 bits are 4 float32)"
        if self.stages < 1:
            return f"stages={self.stages} must be at least 1"
        if self.stages > 1 and "cp_async" not in arch.features:
            return f"stages={self.stages}: {arch} has no cp.async, only stages=1 is possible"
        if self.threads > arch.max_threads:
            return f"block={self.block} makes blocks of {self.threads} threads, {arch} allows {arch.max_threads}"
        shared, limit = self.shared_bytes(problem), arch.shared_static if self.stages == 1 else arch.shared_block
        if shared > limit:
            return f"block={self.block} needs {shared} bytes of shared memory, {arch} has {limit}"
        if self.registers(problem) > arch.registers_thread:
            return (
                f"filters={self.filters} x pixels={self.pixels} and the loads of a stage need about "
                f"{self.registers(problem)} registers, {arch} has {arch.registers_thread}"
            )
        return None


def graph(problem: NchwProblem, config: DirectConfig, arch: Arch) -> tirx.PrimFunc:
    """The TE graph in the form the schedule wants.

    ``halo`` (n, tile y, tile x, stage, round, thread, lane) and ``weights`` (co blocks, stage, round, thread) are the
    operands of each tile and stage in the order in which a block's threads fetch them: of the tile's (channel, row,
    vector), or (channel, kernel row, filter and kernel column), thread i % threads fetches element i in round
    i / threads.  ``halo_registers`` and ``weights_registers`` are the same on their way, in float32; what cp.async
    fetches comes as it is.
    ``conv`` (n, co, out_h, out_w) has its extents rounded up to whole tiles, as has ``finished``, which is ``conv``
    after the epilogue, if the output is exchanged; ``output`` keeps what was asked for.
    """
    from tvm import te

    p = at_run_time(problem)
    lanes, channels, steps, filters = config.lanes(p), config.channels(p), config.steps(p), config.filters
    fetchers, by_registers = config.fetchers(p), config.stages == 1
    rows, columns = config.halo(p)
    vectors, width, rounds = columns // lanes, config.weight_row(p), config.rounds(p)
    tiles = [-(-size // tile) for size, tile in zip((p.out_h, p.out_w), config.block, strict=True)]
    blocks = -(-p.co // filters)
    made = Implicit(p, {"co": filters, "y": config.block[0], "x": config.block[1]})
    top, shift = p.pad[0], config.shift(p)
    left = (p.pad[1] + shift) // lanes  # vectors of border
    ragged = steps * channels > p.ci

    def halo_at(
        b: PrimExpr, ty: PrimExpr, tx: PrimExpr, stage: PrimExpr, turn: PrimExpr, thread: PrimExpr, lane: PrimExpr
    ) -> PrimExpr:
        i = turn * fetchers + thread
        # a single channel's rows beyond the last are tested for: without the remainder all rounds lie equally far apart
        row = i // vectors % rows if channels > 1 else i // vectors
        c = stage * channels + (i // (rows * vectors) if channels > 1 else 0)
        y = ty * (config.block[0] * p.stride[0]) + row - top
        x = tx * (config.block[1] * p.stride[1] // lanes) + i % vectors - left
        bottom = ((tiles[0] - 1) * config.block[0]) * p.stride[0] + rows - top
        right = ((tiles[1] - 1) * config.block[1]) * p.stride[1] // lanes + vectors - left
        tests = [
            (rounds[0] * fetchers > channels * rows * vectors, i < channels * rows * vectors),
            (ragged, c < p.ci),
            (top > 0, y >= 0),
            (bottom > p.h, y < p.h),
            (left > 0, x >= 0),
            (right > p.w // lanes, x < p.w // lanes),
        ]
        return select(tests, made.data({"n": b, "ci": c, "h": y, "w": x * lanes + lane}))

    def weights_at(block: PrimExpr, stage: PrimExpr, turn: PrimExpr, thread: PrimExpr) -> PrimExpr:
        i = turn * config.threads + thread
        c, ry, z = stage * channels + i // (p.kh * width), i // width % p.kh, i % width
        f = block * filters + z // p.kw
        tests = [
            (rounds[1] * config.threads > channels * p.kh * width, i < channels * p.kh * width),
            (ragged, c < p.ci),
            (width > filters * p.kw, z < filters * p.kw),
            (blocks * filters > p.co, f < p.co),
        ]
        return select(tests, made.filter({"co": f, "ci": c, "kh": ry, "kw": z % p.kw}))

    def fetched(name: str, shape: tuple[int, ...], element: Callable[..., PrimExpr]) -> te.Tensor:
        if not by_registers:
            return te.compute(shape, element, name=name)
        registers = te.compute(shape, lambda *at: element(*at).astype(ACCUMULATOR), name=f"{name}_registers")
        return te.compute(shape, lambda *at: registers(*at), name=name)

    halo = fetched("halo", (p.n, *tiles, steps, rounds[0], fetchers, lanes), halo_at)
    weights = fetched("weights", (blocks, steps, rounds[1], config.threads), weights_at)
    rc, ry, rx = (
        te.reduce_axis((0, extent), name) for name, extent in (("rc", steps * channels), ("ry", p.kh), ("rx", p.kw))
    )

    def product_at(b: PrimExpr, f: PrimExpr, y: PrimExpr, x: PrimExpr) -> PrimExpr:
        c, (block_y, block_x) = rc % channels, config.block
        row = y % block_y * p.stride[0] + ry * p.dilation[0]
        column = x % block_x * p.stride[1] + rx * p.dilation[1] + shift
        i = (c * rows + row) * vectors + column // lanes
        j = (c * p.kh + ry) * width + f % filters * p.kw + rx
        stage, threads = rc // channels, config.threads
        pixel = halo[b, y // block_y, x // block_x, stage, i // fetchers, i % fetchers, column % lanes]
        weight = weights[f // filters, stage, j // threads, j % threads]
        return te.sum(pixel.astype(ACCUMULATOR) * weight.astype(ACCUMULATOR), axis=[rc, ry, rx])

    extents = (p.n, blocks * filters, tiles[0] * config.block[0], tiles[1] * config.block[1])
    conv = Stage(te.compute(extents, product_at, name="conv"), p.output_axes)
    return made.program(made.output(conv, staged=config.exchange))


def schedule(problem: NchwProblem, config: DirectConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), output (n, co, out_h, out_w)."""
    from tvm.s_tir import Schedule

    sch = Schedule(graph(problem, config, arch))
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")
    by_registers = config.stages == 1

    next_step(sch, "Memory hierarchy: operands go into shared memory, the sums stay in registers")
    scope = "shared" if by_registers else "shared.dyn"
    registers = [sch.get_sblock(f"{name}_registers") for name in ("halo", "weights")] if by_registers else []
    shared = [sch.get_sblock(name) for name in ("halo", "weights")]
    finished = [sch.get_sblock("finished")] if config.exchange else []
    for blocks, place in (([*registers, conv], "local"), ([*shared, *finished], scope)):
        for block in blocks:
            sch.set_scope(block, 0, place)

    next_step(sch, "Blocks and threads, and a thread's loops from the slowest to the fastest")
    b, f, y, x, rc, ry, rx = sch.get_loops(conv)
    (threads_y, threads_x), (pixels_y, pixels_x) = config.num_thread, config.pixels
    block_f, f = sch.split(f, [None, config.filters])
    block_y, ty, y = sch.split(y, [None, threads_y, pixels_y])
    block_x, tx, x = sch.split(x, [None, threads_x, pixels_x])
    stage, rc = sch.split(rc, [None, config.channels(problem)])
    sch.reorder(b, block_f, block_y, block_x, ty, tx, stage, rc, ry, rx, f, y, x)
    bind_grid(sch, sch.fuse(b, block_f), block_y, block_x)
    thread = sch.fuse(ty, tx)
    sch.bind(thread, "threadIdx.x")
    if not config.unroll_rows:
        sch.annotate(ry, TURNS_APART, 1)
    for loop in (*((ry,) if config.unroll_rows else ()), rx, f, y, x):
        sch.unroll(loop)

    next_step(sch, "The way out: from registers, or through shared memory to all threads along the output's rows")
    for block in finished:
        sch.reverse_compute_at(block, thread, preserve_unit_loops=True)
        _vectorize(sch, block, widest_vector(pixels_x, 4))
    sch.reverse_compute_at(output, block_x if config.exchange else thread, preserve_unit_loops=True)
    if config.exchange:
        _store_rows(sch, output, config.threads, widest_vector(problem.out_w, config.vector))
    else:
        _vectorize(sch, output, widest_vector(problem.out_w, min(config.vector, widest_vector(pixels_x, 4))))

    next_step(sch, "All threads fetch the operands of a stage")
    for block in shared:
        sch.compute_at(block, stage, preserve_unit_loops=True)
    for block in registers:  # at the front, so that all loads are under way before the first is stored
        sch.compute_at(block, stage, preserve_unit_loops=True, index=-2)
    for halo, weights in (registers, shared) if by_registers else (shared,):
        _deal_out(sch, halo, config.threads, vector=True)
        _deal_out(sch, weights, config.threads, vector=False)
    sch.decompose_reduction(conv, stage)

    next_step(sch, "Pipeline: the next stage's operands are on their way while this stage is computed")
    if not by_registers:
        for annotation, value in ((PIPELINE, config.stages), (ASYNC, 1), (AT_ONCE, 1)):
            sch.annotate(stage, annotation, value)
    elif config.steps(problem) > 1:
        sch.annotate(stage, "software_pipeline_stage", [0, 0, 0, 0, 1])
        sch.annotate(stage, "software_pipeline_order", [0, 1, 3, 4, 2])

    return config.finish(sch.mod)


def _vectorize(sch: Schedule, block: SBlockRV, lanes: int) -> None:
    """Store `lanes` elements of a row at once."""
    if lanes > 1:
        _, lane = sch.split(sch.get_loops(block)[-1], [None, lanes])
        sch.vectorize(lane)


def _store_rows(sch: Schedule, block: SBlockRV, threads: int, lanes: int) -> None:
    """Deal the loops (channel, row, column) of a store out to the threads, each channel from its start."""
    channel, row, column = sch.get_loops(block)[-3:]
    column, lane = sch.split(column, [None, lanes])
    turn, thread = sch.split(sch.fuse(row, column), [None, threads])
    for loop in (channel, turn):
        sch.unroll(loop)
    sch.bind(thread, "threadIdx.x")
    if lanes > 1:
        sch.vectorize(lane)


def _deal_out(sch: Schedule, block: SBlockRV, threads: int, vector: bool) -> None:
    """Bind the loops (round, thread) of a fetch, and the lane after them if there is a vector."""
    *_, turn, thread, lane = sch.get_loops(block) if vector else (*sch.get_loops(block), None)
    if int(sch.get(thread).extent) < threads:  # some threads have nothing to fetch
        _, thread = sch.split(thread, [None, threads])
    sch.unroll(turn)
    sch.bind(thread, "threadIdx.x")
    if lane is not None:
        sch.vectorize(lane)


# Channels, fewest blocks to a multiprocessor, and most taps of a kernel by its filters, for which channels ahead were
# measured
CHANNELS_AHEAD = range(4, 17)
BLOCKS_AHEAD = 1.9
TAPS_AHEAD = ((8, 36), (16, 9))


def _ahead(problem: NchwProblem, arch: Arch) -> DirectConfig | None:
    """Channels ahead by cp.async where they were measured to be faster; None elsewhere.

    That is on an H200, of four problems like this one in float32, with whole vectors in each row
    (`tuning_logs/nvidia-h200/conv2d_nchw.jsonl`): the article's takes 30.5 us, the fastest without 33.1.
    """
    p = problem
    taps = next((taps for filters, taps in TAPS_AHEAD if p.co <= filters), 0)
    plain = p.dtype == "float32" and (p.stride, p.dilation) == ((1, 1), (1, 1))
    if "cp_async" not in arch.features or not plain or p.ci not in CHANNELS_AHEAD or p.kh * p.kw > taps:
        return None
    exchange = widest_vector(p.out_w, 4) < 4
    if p.kh * p.kw > 9:
        config = DirectConfig((16, 64), (2, 4), p.co, 1, 4, exchange, min_blocks=3)
    elif p.co <= 8:
        config = DirectConfig((24, 64), (2, 4), p.co, 1, 3, exchange)
    else:
        config = DirectConfig((16, 64), (2, 4), p.co, 2, 3, exchange)
    blocks = p.n * math.prod(-(-size // tile) for size, tile in zip((p.out_h, p.out_w), config.block, strict=True))
    fits = (
        p.out_w > config.block[1] // 2
        and config.lanes(p) == 4
        and blocks >= BLOCKS_AHEAD * arch.device.multiprocessors
        and config.check(p, arch) is None
    )
    return config if fits else None


# weights of a kernel's row for all filters of a thread, of AMD GPUs: LLVM loads them all before it multiplies, and more
# leave registers for few waves; and registers of a thread, which LLVM is held to
ROW_WEIGHTS = 66
REGISTERS_AMD = 128


def default(problem: NchwProblem, arch: Arch) -> DirectConfig:
    """Channels ahead by cp.async for what was measured to gain by them (`_ahead`).

    Else up to eight filters a thread; a tile as wide as the image allows, with all channels at once where they fit in
    the registers that they pass through, else as many as leave most registers to the sums.

    For AMD GPUs (by counts: never timed) a stage has one channel, and a loop runs over the kernel's rows that LLVM may
    not unroll: it loads most of what is unrolled before it multiplies.  It is held to as many blocks as 128 registers
    of a thread leave room for.
    """
    ahead = _ahead(problem, arch)
    if ahead:
        return ahead
    p = problem
    on_amd = arch.kind == "rocm"
    most = max(min(8, ROW_WEIGHTS // p.kw), 1) if on_amd else 8
    filters = -(-p.co // -(-p.co // most))
    width = next((width for width in (64, 32, 16) if p.out_w > width // 2), 8)
    for height in (12, 8, 4, 2, 1):
        for channels in (1,) if on_amd else (0, 8, 4, 3, 2, 1):
            config = DirectConfig((height, width), (1, 4), filters, channels, unroll_rows=not on_amd)
            if on_amd:
                waves = arch.simds * (arch.registers_simd // REGISTERS_AMD)
                config = replace(config, min_blocks=max(1, waves // -(-config.threads // arch.wave)))
            vectors, weights = config.rounds(p)
            loads = vectors * config.lanes(p) + weights
            if loads <= (56 if config.steps(p) == 1 else 32) and config.check(p, arch) is None:
                return config
    return DirectConfig((1, width), (1, 4), filters, 1, vector=1)


def space(problem: NchwProblem, arch: Arch) -> Iterator[DirectConfig]:
    p = problem
    parts = {-(-p.co // count) for count in (1, 2, 3)} | {4, 8}
    filters = sorted(count for count in parts if count <= 16 and count <= p.co)
    vectors = (4, 1) if DirectConfig().lanes(p) > 1 else (1,)
    for fields in product(
        product((4, 8, 12, 16, 24), (16, 32, 64, 128)),
        ((1, 2), (1, 4), (1, 8), (2, 4), (4, 4)),
        filters,
        [0, *(count for count in (1, 2, 4) if count < p.ci)],
        vectors,
        (True, False),
        (0, 4),
    ):
        block, pixels, count, channels, vector, unroll, least = fields
        yield DirectConfig(block, pixels, count, channels, vector=vector, unroll_rows=unroll, min_blocks=least)
    if "cp_async" not in arch.features:
        return
    exchanges = (False,) if widest_vector(p.out_w, 4) == 4 else (False, True)
    for block, pixels, count, channels, stages, exchange, least in product(
        product((8, 12, 16, 24), (32, 64, 128)),
        ((1, 4), (2, 2), (2, 4), (3, 4), (4, 4)),
        [count for count in filters if 2 * count >= min(p.co, 8)],
        [count for count in (1, 2) if count <= p.ci],
        (2, 3, 4),
        exchanges,
        (0, 3),
    ):
        if stages <= -(-p.ci // channels) + 1 and (block[0] * block[1]) % (32 * pixels[0] * pixels[1]) == 0:
            # more stages would stay empty; warps are whole
            yield DirectConfig(block, pixels, count, channels, stages, exchange, min_blocks=least)


SCHEDULE = ScheduleSpec(
    name="direct",
    summary="few channels: input tile with its halo in shared memory, several filters a thread in registers",
    kinds=("cuda", "rocm"),
    config=DirectConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
