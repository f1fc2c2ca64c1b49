"""Depthwise convolution on a GPU: a thread reads the window under a tile of outputs into registers, once.

A thread computes `tile` outputs (rows, columns) of `vector` channels where channels are last, else of one channel, one
tile below the other for `steps` tiles; its filter stays in registers.  Neighbouring threads have neighbouring channels,
or columns, so that a warp's loads are contiguous; windows overlap in the first-level cache.  Nothing is shared and no
thread waits for another: what counts are bytes from memory and instructions for each output.

Where columns are last, a window begins at a multiple of the vectors that rows keep aligned, so that a vector is either
inside the image or all border.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from schedules.core.arch import Arch, occupancy
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, Pair, numpy_dtype
from schedules.core.space import ProductSpace, axis
from schedules.core.tvm import LoopRV, PrimExpr, Schedule, te, tirx, tvm
from schedules.definitions.implicit import At, Implicit, stage
from schedules.definitions.padding import select
from schedules.definitions.program import begun
from schedules.operators.depthwise_conv2d.cost import COSTS, LINE, Costs, memory, us
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem, outer_axes
from schedules.steps.dot import PACK, dot_taps
from schedules.steps.intrinsics import tensorize
from schedules.steps.launch import MinBlocks
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, widest, widest_vector


@dataclass(frozen=True)
class WindowsConfig(MinBlocks, Config):
    """Pairs are (height, width)."""

    tile: Pair = (4, 4)  # outputs of a thread and step, of each channel
    vector: int = 2  # channels of a thread, or columns of one load, as far as the problem's rows keep them aligned
    steps: int = 1  # tiles of a thread, one below the other
    threads: int = 256  # of a block
    by_rows: bool = False  # one kernel row of window and filter in registers at a time, for kernels too large for more
    min_blocks: int = 0  # blocks that a multiprocessor must hold, which bounds the registers; 0: as many as have room

    def channels(self, problem: DepthwiseProblem) -> int:
        """Channels of a thread."""
        return widest_vector(problem.extents["co"], self.vector) if problem.channels_last else 1

    def columns(self, problem: DepthwiseProblem) -> int:
        """Columns of one load: no row and no tile may start inside a vector."""
        return 1 if problem.channels_last else widest_vector(math.gcd(problem.w, self.across(problem)[1]), self.vector)

    def stored(self, problem: DepthwiseProblem) -> int:
        """Elements of one store; an epilogue's tests of more are more than CUDA has vectors for."""
        if in_words(problem):
            return min(self.channels(problem), widest(problem.epilogue.out_dtype))
        if problem.channels_last:
            return min(self.channels(problem), 4)
        return widest_vector(math.gcd(problem.out_w, self.tile[1]), min(self.vector, 4))

    def weight_vector(self, problem: DepthwiseProblem) -> int:
        """Weights of one load: a thread's channels lie together, each with all its taps, or those of a kernel row.  Of
        an even number of taps TVM 0.27 does not see that they are neighbours."""
        if words := in_words(problem):
            return min(self.channels(problem) * words, widest(problem.dtype))
        taps, most = problem.kh * problem.kw, widest(problem.dtype)
        return widest_vector(self.channels(problem) * taps, most) if taps % 2 and not self.by_rows else 1

    def across(self, problem: DepthwiseProblem) -> Pair:
        """Input rows and columns from a tile to the next."""
        return self.tile[0] * problem.stride[0], self.tile[1] * problem.stride[1]

    def shift(self, problem: DepthwiseProblem) -> int:
        """Columns by which the border on the left is widened to whole vectors."""
        return -problem.pad[1] % self.columns(problem)

    def window(self, problem: DepthwiseProblem) -> Pair:
        """Rows and vectors of columns under a tile."""
        p, (down, right) = problem, self.across(problem)
        rows = down - p.stride[0] + (p.kh - 1) * p.dilation[0] + 1
        columns = right - p.stride[1] + ((in_words(p) or p.kw) - 1) * p.dilation[1] + 1 + self.shift(p)
        return rows, -(-columns // self.columns(p))

    def loaded(self, problem: DepthwiseProblem) -> Pair:
        """Those of them that are loaded: beyond the last tap in a word there is none."""
        rows, vectors = self.window(problem)
        beyond = max(0, in_words(problem) - problem.kw) * problem.dilation[1]
        return rows, vectors - beyond

    def in_pairs(self, problem: DepthwiseProblem) -> bool:
        """Whether two neighbouring outputs read the same words, by filters of which one is shifted by a tap."""
        p = problem
        return in_words(p) > p.kw and p.stride[1] == p.dilation[1] == 1 and self.tile[1] % 2 == 0

    def fetched(self, problem: DepthwiseProblem) -> Pair:
        """Rows and vectors of the window that are in registers at once."""
        rows, vectors = self.loaded(problem)
        return rows - (problem.kh - 1) * problem.dilation[0] if self.by_rows else rows, vectors

    def tiles(self, problem: DepthwiseProblem) -> Pair:
        """Threads along an image's rows and columns."""
        return -(-problem.out_h // (self.tile[0] * self.steps)), -(-problem.out_w // self.tile[1])

    def all_threads(self, problem: DepthwiseProblem) -> int:
        return problem.n * math.prod(self.tiles(problem)) * problem.extents["co"] // self.channels(problem)

    def registers(self, problem: DepthwiseProblem) -> int:
        """An estimate for each thread: sums, window and filter as they lie in memory, and addressing."""
        rows, vectors = self.fetched(problem)
        taps = (in_words(problem) or problem.kw) * (1 if self.by_rows else problem.kh)
        elements = rows * vectors * self.columns(problem) + taps
        words = max(1, self.channels(problem) * numpy_dtype(problem.dtype).itemsize / 4)
        return self.channels(problem) * math.prod(self.tile) + math.ceil(elements * words) + 24

    def held(self, problem: DepthwiseProblem) -> int:
        """The same by LLVM, which keeps the filter in float32 from step to step."""
        wide = problem.kh * problem.kw * self.channels(problem) * (4 - numpy_dtype(problem.dtype).itemsize) // 4
        return self.registers(problem) + (wide if self.steps > 1 and not self.by_rows else 0)

    def resident(self, problem: DepthwiseProblem, arch: Arch) -> int:
        """Blocks that a multiprocessor holds.  Without such a bound CUDA's compiler saves registers for more of them,
        and loads what lies under a tile bit by bit, each time waiting for memory."""
        if self.min_blocks:
            return self.min_blocks
        registers = min(self.registers(problem), arch.registers_thread)
        return max(1, occupancy(arch, self.threads, registers, 0)[0])

    def check(self, problem: DepthwiseProblem, arch: Arch) -> str | None:
        for name in ("tile", "steps", "threads"):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,)) < 1:
                return f"{name}={value} must be at least 1"
        most = widest(problem.dtype)
        if self.vector not in (1, 2, 4, 8) or self.vector > most:
            return f"vector={self.vector} is no power of two up to {most}, the widest access"
        if in_words(problem) and self.vector < PACK:
            return f"vector={self.vector} is less than the {PACK} channels whose taps are put into words together"
        if self.threads > arch.max_threads:
            return f"threads={self.threads} is over {arch.max_threads}, the most of a block of {arch}"
        if self.min_blocks < 0:
            return f"min_blocks={self.min_blocks} must not be negative"
        if self.registers(problem) > arch.registers_thread:
            return (
                f"tile={self.tile} of {self.channels(problem)} channels needs about {self.registers(problem)} "
                f"registers, {arch} has {arch.registers_thread}; use a smaller tile or vector, or by_rows=true"
            )
        return None


def in_words(problem: DepthwiseProblem) -> int:
    """Taps of a kernel row with those that make whole words of it; 0 where the filter is not in words."""
    return problem.extents.get("kt", 0)


def graph(problem: DepthwiseProblem, config: WindowsConfig, arch: Arch) -> tirx.PrimFunc:
    """The TE graph: ``window``, the input under each tile, zero in the border; ``conv``, the sum over kh and kw of
    whole tiles; ``output``, the part that was asked for."""
    p, lanes, (rows, vectors) = problem, config.columns(problem), config.window(problem)
    added = tuple(term.name for term in p.epilogue.terms if term.factor is None)
    made = Implicit(p, {"y": config.tile[0] * config.steps, "x": config.tile[1]}, begun=added)
    (down, right), top, left = config.across(p), p.pad[0], (p.pad[1] + config.shift(p)) // lanes
    tiles = made.extent("y") // config.tile[0], made.extent("x") // config.tile[1]
    loaded = config.loaded(p)[1]
    bottom, last = (tiles[0] - 1) * down + rows - top, (tiles[1] - 1) * right // lanes + loaded - left

    def element(at: At) -> PrimExpr:
        y, x = at["tile_y"] * down + at["row"] - top, at["tile_x"] * (right // lanes) + at["vector"] - left
        inside = [
            (top > 0, y >= 0), (bottom > p.h, y < p.h), (left > 0, x >= 0), (last > p.w // lanes, x < p.w // lanes),
            (loaded < vectors, at["vector"] < loaded),
        ]  # fmt: skip
        if in_words(p):  # tests one after the other are branches, in each of which CUDA's compiler finds the place anew
            needed = [test.astype("int32") for is_needed, test in inside if is_needed]
            inside = [(len(needed) > 0, functools.reduce(operator.and_, needed, 1) != 0)]
        return select(inside, made.data({**at, "h": y, "w": x * lanes + at.get("lane", 0)}))

    outer, channel = outer_axes(p)
    extents = {axis: p.extents[axis] for axis in outer}
    extents |= {"tile_y": tiles[0], "tile_x": tiles[1], "row": rows, "vector": vectors}
    extents |= {channel: p.extents[channel]} if p.channels_last else {"lane": lanes}
    window = stage("window", list(extents), list(extents.values()), element)
    ry, rx = te.reduce_axis((0, p.kh), "ry"), te.reduce_axis((0, in_words(p) or p.kw), "rx")

    def shifted(at: At) -> PrimExpr:
        place = at["kt"] - at["shift"]
        return select([(True, place >= 0)], made.filter({**at, "kt": te.max(place, 0)}))

    filters, pairs = made.filter, config.in_pairs(p)
    if pairs:
        filters = stage("shifted", ("shift", *p.filter_axes), (2, *p.shapes()[1]), shifted)

    def channel_of(at: Sequence[PrimExpr]) -> PrimExpr:
        return made.apart(dict(zip(p.output_axes, at, strict=True)))["co"]

    def total(at: At) -> PrimExpr:
        shift = at["x"] % 2 if pairs else 0
        column = (at["x"] % config.tile[1] - shift) * p.stride[1] + rx * p.dilation[1] + config.shift(p)
        of_window = {
            **{"tile_y": at["y"] // config.tile[0], "row": at["y"] % config.tile[0] * p.stride[0] + ry * p.dilation[0]},
            **{"tile_x": at["x"] // config.tile[1], "vector": column // lanes, "lane": column % lanes},
        }
        value, weight = window({**at, **of_window}), filters(made.apart({**at, "kh": ry, "kw": rx}) | {"shift": shift})
        first = made.given[added[0]](channel_of(list(at.values()))) if added else None
        return te.sum(value.astype(made.accumulator) * weight.astype(made.accumulator), axis=[ry, rx], init=first)

    conv = stage("conv", p.output_axes, [made.extent(axis) for axis in p.output_axes], total)
    func = made.program(made.output(conv, staged=in_words(p) > 0))
    return begun(func, added[0], lambda at: [channel_of(at)]) if added else func


def schedule(problem: DepthwiseProblem, config: WindowsConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, filter, the epilogue's terms, output."""
    sch, words = Schedule(graph(problem, config, arch)), in_words(problem) > 0
    dots = words and arch.kind == "cuda"
    window, conv, output = (sch.get_sblock(name) for name in ("window", "conv", "output"))
    next_step(sch, "A thread for each tile of outputs and its channels; sums, window and filter in registers")
    for block in (window, conv):
        sch.set_scope(block, 0, "local")
    shifted = sch.get_sblock("shifted") if config.in_pairs(problem) else None
    weights = sch.cache_read(shifted or conv, 0 if shifted else 1, "local")
    at = dict(zip(problem.output_axes, sch.get_loops(conv), strict=False))
    ry, rx = sch.get_loops(conv)[-2:]
    rows, step, y = sch.split(at["y"], [None, config.steps, config.tile[0]])
    columns, x = sch.split(at["x"], [None, config.tile[1]])
    outer, channel = outer_axes(problem)
    at[channel], c = sch.split(at[channel], [None, config.channels(problem)])
    across = [*(at[axis] for axis in outer), rows, columns, *((at[channel],) if problem.channels_last else ())]
    in_word = [c]
    if words:
        rx, tap = sch.split(rx, [None, PACK])
        c, of_word = sch.split(c, [None, PACK])
        in_word = [of_word, tap]
    inner = [ry, rx, y, x, *((c,) if words else ()), *in_word]
    sch.reorder(*across, step, *inner)
    _unroll(sch, inner[:-2][int(config.by_rows) :] if dots else inner[int(config.by_rows) :])
    # of loops that threads share TVM 0.27 sees no blocks any more
    summed = sch.blockize(in_word[0]) if dots else conv
    # of a loop of one, TVM 0.27 forgets at the way out that other threads have no tile
    threads = min(config.threads, config.all_threads(problem))
    block, thread = sch.split(sch.fuse(*across), [None, threads])
    bind(sch, (block, "blockIdx.x"), (thread, "threadIdx.x"))

    next_step(sch, "The filter once, the window of each step, and the way out, by vectors")
    if shifted:
        sch.set_scope(shifted, 0, "local")
        sch.compute_at(shifted, ry if config.by_rows else thread, preserve_unit_loops=True)
        _unroll(sch, sch.get_loops(shifted)[3 if config.by_rows else 2 :])
    sch.compute_at(weights, ry if config.by_rows else thread, preserve_unit_loops=True)
    sch.compute_at(window, ry if config.by_rows else step, preserve_unit_loops=True)
    if words:
        finished = sch.get_sblock("finished")
        sch.set_scope(finished, 0, "local")
        sch.reverse_compute_at(finished, step, preserve_unit_loops=True)
        _unroll(sch, sch.get_loops(finished)[3:])
    sch.reverse_compute_at(output, step, preserve_unit_loops=True)
    *kernel_row, lo, kw = sch.get_loops(weights)[-3:]
    run = [*kernel_row, sch.fuse(lo, kw)] if words else [sch.fuse(*kernel_row, lo, kw)]
    _unroll(sch, run, config.weight_vector(problem))
    around = 4 if config.by_rows else 3  # block, thread, step, and the kernel's rows
    _unroll(sch, sch.get_loops(window)[around:], max(config.channels(problem), config.columns(problem)))
    _unroll(sch, sch.get_loops(output)[3:], config.stored(problem))
    sch.decompose_reduction(summed, ry)
    if dots:
        tensorize(sch, in_word[0], dot_taps(problem.dilation[1]))
    if (
        arch.kind == "cuda"
    ):  # by the compiler: of large windows there are thousands of lines, and LLVM stops short of them
        sch.annotate(thread, "pragma_unroll_explicit", 0)
    least = config.resident(problem, arch) if arch.kind == "cuda" else config.min_blocks
    return replace(config, min_blocks=least).finish(sch.mod)


def _unroll(sch: Schedule, loops: Sequence[LoopRV], lanes: int = 1) -> None:
    """Unroll `loops`, the last of which goes by vectors of `lanes`."""
    *outer, last = loops
    if lanes > 1:
        last, lane = sch.split(last, [None, lanes])
        sch.vectorize(lane)
    for loop in (*outer, last):
        sch.unroll(loop)


def estimate(problem: DepthwiseProblem, config: WindowsConfig, arch: Arch, costs: Costs = COSTS) -> float:
    """The busiest multiprocessor issues instructions, reads its cache, and waits for memory."""
    p, item = problem, numpy_dtype(problem.dtype).itemsize
    (rows, vectors), lanes, channels = config.fetched(p), config.columns(p), config.channels(p)
    outputs, taps = channels * math.prod(config.tile), p.kh * p.kw
    (down, right), stores = config.across(p), outputs / config.stored(p)
    loads = rows * vectors * (p.kh if config.by_rows else 1)
    if words := in_words(p) / PACK:
        made = words * channels * config.window(p)[0] * config.tile[1] * (0.875 if config.in_pairs(p) else 1.75)
        multiplied, filters = (p.kh * words + FINISHED) * outputs + made, p.kh * words * channels / 4
    else:
        multiplied = outputs * taps + (0 if item == 4 else loads * lanes * channels + outputs // 2)
        filters = taps * channels * (2 if item < 4 else 1)
    each = multiplied + costs.fetch * loads + stores + 1
    if config.min_blocks:  # what has no room in registers is stored and loaded again
        left = arch.registers_sm // (config.min_blocks * config.threads)
        each += SPILLED * max(0, config.registers(p) - left)
    blocks = -(-config.all_threads(p) // config.threads)
    busiest = -(-blocks // arch.device.multiprocessors)
    warps = busiest * -(-config.threads // arch.wave)
    issued = warps / 4 * (config.steps * each + filters + costs.rest)
    lines = loads * _lines(p, config, right, down * p.w, arch)
    lines += stores * _lines(p, config, config.tile[1], config.tile[0] * p.out_w, arch)
    cached = warps * config.steps * lines * costs.cached
    again = max(0.0, (config.window(p)[0] - down) / (down * config.steps)) if p.channels_last else 0.0
    moved = memory(p, arch, costs, costs.farther * again * p.n * p.h * p.w * p.ci * item)
    turns = -(-busiest // config.resident(p, arch)) * config.steps * (p.kh if config.by_rows else 1)
    waited = turns * (costs.latency + costs.chain * each / (p.kh if config.by_rows else 1))
    return us(costs, issued, cached, moved, waited)


def _lines(p: DepthwiseProblem, config: WindowsConfig, right: int, down: int, arch: Arch) -> float:
    """Lines of the cache that an access of a warp touches, where tiles begin `right` elements apart along a row, and
    `down` from one row of tiles to the next."""
    item, across = numpy_dtype(p.dtype).itemsize, config.tiles(p)[1]
    if p.channels_last:
        return max(1.0, arch.wave * config.channels(p) * item / LINE)
    along = max(1.0, min(arch.wave, across) * right * item / LINE)
    apart = min(1.0, down * config.steps * item / LINE)
    return max(1.0, arch.wave / min(arch.wave, across) * max(apart, min(along, across * right * item / LINE)))


TILES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (4, 8), (7, 1), (7, 2), (8, 2), (8, 4))
SPILLED = 8  # instructions of a register too many, with what it waits
FINISHED = 7  # instructions of an int8 result, from its sum to its byte in a word
WIDER = ((2, 8), (7, 4), (14, 2))  # of bytes, four of which share a register


# registers of a thread, as `WindowsConfig.held` counts them, that LLVM finds for AMD GPUs without memory for others (by
# counts: never timed)
HELD_AMD = 208


@lru_cache
def default(problem: DepthwiseProblem, arch: Arch) -> WindowsConfig:
    """The config that takes least by the estimate, by rows only where registers hold no window; where none is legal,
    the smallest."""
    most = HELD_AMD if arch.kind == "rocm" else math.inf
    for by_rows in (False, True):
        every = _configs(problem, (128,), (by_rows,))
        if legal := [each for each in every if each.check(problem, arch) is None and each.held(problem) <= most]:
            return min(legal, key=lambda config: estimate(problem, config, arch))
    return WindowsConfig((1, 1), PACK if in_words(problem) else 1, by_rows=True)


def space(problem: DepthwiseProblem, arch: Arch) -> Sequence[WindowsConfig]:
    return _configs(problem, (64, 128, 256), (False, True))


def _configs(problem: DepthwiseProblem, threads: Sequence[int], by_rows: Sequence[bool]) -> Sequence[WindowsConfig]:
    # of four 16-bit elements TVM 0.27 selects each one by itself, and so does the compiler of one
    vectors = {"float32": (1, 2, 4), "int8": (4, 8)}.get(problem.dtype, (2, 8))
    return ProductSpace(
        WindowsConfig,
        axis("tile", TILES + (WIDER if problem.dtype == "int8" else ())),
        axis("vector", vectors),
        axis("steps", (1, 2, 4, 8)),
        axis("threads", threads),
        axis("by_rows", by_rows),
    )


SCHEDULE = ScheduleSpec(
    name="windows",
    summary="a thread reads the window under a tile of outputs into registers once; no shared memory",
    kinds=("cuda", "rocm"),
    config=WindowsConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
