"""NCHW convolution on the CPU: pixels of rows or output channels in vector lanes, register tiles of sums.

A task owns some rows of an image, or some images.  It copies the rows that it reads into a buffer that stays in cache,
where borders end; then it computes one register tile after the other.  With pixels in the lanes, columns that a stride
skips lie apart in that buffer, so that every tap finds its pixels next to each other; filters are broadcast as they
lie, along the reduction.  With channels in the lanes, pixels are broadcast, whatever the stride and the width of the
image; filters are packed by register tiles, once for each call, and the sums of a tile turned on their way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch, physical_cores, vector_unit
from schedules.core.operator import ScheduleSpec
from schedules.definitions.epilogue import ACCUMULATOR
from schedules.definitions.implicit import At, Implicit, at_run_time, stage
from schedules.definitions.padding import select
from schedules.operators.conv2d_nchw.definition import NchwProblem, image_of
from schedules.steps import register_tile
from schedules.steps.register_tile import TileConfig, accumulate, around, check_streaming, past_caches, streamed
from schedules.steps.story import next_step

if TYPE_CHECKING:
    import tvm
    from tvm import tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV
    from tvm.tirx import PrimExpr

LANES = ("x", "co")
VECTORS, ROWS, CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 8, 12)  # of a tile
PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)  # of a tile with channels in the lanes
BEGUN = 16  # elements that a core copies in the time in which it begins a row
TURNED = 1.5  # cycles, about, of a sum that leaves turned


@dataclass(frozen=True)
class CpuConfig(TileConfig):
    lanes: str = "x"  # the axis in vector lanes: x or co
    block_x: int = 2  # of a row in a register tile: vectors, or pixels with channels in the lanes
    block_y: int = 2  # rows
    block_f: int = 6  # output channels, or vectors of them
    streaming: str = "no"  # "stores": the output goes past the caches

    @property
    def block(self) -> tuple[int, int, int]:
        """A register tile's (output channels, rows, pixels of a row)."""
        in_lanes = self.lanes == "co"
        wide, high = (1, self.vector) if in_lanes else (self.vector, 1)
        return high * self.block_f, self.block_y, wide * self.block_x

    @property
    def sums(self) -> int:
        return self.block_x * self.block_y * self.block_f

    def operands(self) -> tuple[int, int]:
        """Vectors that a step of the reduction loads, and elements that it broadcasts."""
        pixels = self.block_x * self.block_y
        return (self.block_f, pixels) if self.lanes == "co" else (pixels, self.block_f)

    def counts(self, problem: NchwProblem) -> tuple[int, int, int]:
        """Register tiles along an image's rows and columns and along the output channels."""
        f, y, x = (-(-size // t) for size, t in zip((problem.co, *image_of(problem).out), self.block, strict=True))
        return y, x, f

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        if self.lanes not in LANES:
            return f"lanes={self.lanes} is not x or co"
        if self.streaming == "stores" and self.lanes == "co":
            return f"streaming={self.streaming} is for lanes=x"
        row = image_of(problem).out[1]
        reason = check_streaming(self.streaming, problem, row, self.block[2], self.vector)
        return self.check_tile(problem, "block_x", "block_y", "block_f") or reason


def graph(problem: NchwProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    """The convolution: ``padded`` (n, ci, row, phase, x) is data with its border, in float32, the column x * phases +
    phase of `image_of`, with as many phases as the stride has where pixels in the lanes are to be next to each other
    under every tap; ``weights``, with channels in the lanes; ``conv`` (n, co, out_h, out_w) the sum over ci, kh, kw;
    ``output``.

    Extents of (co, out_h, out_w) are rounded up to whole register tiles, with zeros in ``padded`` and, beyond the last
    filter, that filter once more: schedules need no test but where ``output`` keeps what was asked for.
    """
    from tvm import te

    p, image = at_run_time(problem), image_of(problem)
    tile, in_lanes = config.block, config.lanes == "co"
    made = Implicit(p, {"co": tile[0]} if in_lanes else {}, wide=in_lanes)
    data = made.given["data"]
    (h, w), (top, left), (down, right) = image.size, image.pad, image.stride
    co, out_h, out_w = (-(-size // t) * t for size, t in zip((p.co, *image.out), tile, strict=True))
    rows = (out_h - 1) * down + (p.kh - 1) * p.dilation[0] + 1
    phases = 1 if in_lanes else right
    columns = (out_w - 1) * (right // phases) + (p.kw - 1) * p.dilation[1] // phases + 1

    def pixel(b: PrimExpr, c: PrimExpr, row: PrimExpr, phase: PrimExpr, column: PrimExpr) -> PrimExpr:
        y, x = row - top, column * phases + phase - left
        tests = [
            (top > 0 or rows > h, te.all(y >= 0, y < h)),
            (left > 0 or columns * phases > w, te.all(x >= 0, x < w)),
        ]
        value = data[b, c, y, x] if h == p.h else data[b, c, x // p.w, x % p.w]
        return select(tests, value).astype(ACCUMULATOR)

    weights = made.weights("co ci kh kw") if in_lanes else None
    padded = te.compute((p.n, p.ci, rows, phases, columns), pixel, name="padded")
    rc, ry, rx = (te.reduce_axis((0, extent), name) for name, extent in (("rc", p.ci), ("ry", p.kh), ("rx", p.kw)))

    def element(b: PrimExpr, f: PrimExpr, y: PrimExpr, x: PrimExpr) -> PrimExpr:
        across = rx * p.dilation[1]
        row, column = y * down + ry * p.dilation[0], x * (right // phases) + across // phases
        value, at = padded[b, rc, row, across % phases, column], {"ci": rc, "kh": ry, "kw": rx}
        if weights:
            return te.sum(value * weights({"co": f, **at}), axis=[rc, ry, rx])
        weight = made.filter({"co": te.min(f, p.co - 1) if co > p.co else f, **at})
        return te.sum(value * weight.astype(ACCUMULATOR), axis=[rc, ry, rx])

    conv = te.compute((p.n, co, out_h, out_w), element, name="conv")

    def finished(at: At) -> PrimExpr:
        b, f, y, x = at.values()
        return made.finish(conv[b, f, y, x] if h == p.h else conv[b, f, 0, y * p.out_w + x], at)

    return made.program(stage("output", p.output_axes, p.shapes()[2], finished))


def is_alone(config: CpuConfig, problem: NchwProblem) -> bool:
    """Whether a task owns all pixels, and so is the only one that reads its channels' filters."""
    rows, columns, _ = config.counts(problem)
    whole = config.tiles_y >= rows and config.tiles_x >= columns
    return whole and config.tiles_n >= problem.n and not problem.n_from


def schedule(problem: NchwProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), output (n, co, out_h, out_w)."""
    from tvm.s_tir import Schedule

    p, image = problem, image_of(problem)
    sch = Schedule(graph(p, config, arch))
    conv, output, padded = (sch.get_sblock(name) for name in ("conv", "output", "padded"))
    next_step(sch, "The pixels of an image in one row, where every output pixel is an input pixel")
    if image.out != (p.out_h, p.out_w):
        sch.transform_block_layout(output, lambda b, f, y, x: [b, f, y * p.out_w + x])

    next_step(sch, "A parallel task for some tiles of an image and of the channels; sums in registers")
    for block in (conv, padded):
        sch.set_scope(block, 0, "local")
    b, f, y, x, rc, ry, rx = sch.get_loops(conv)
    rows, columns, channels = config.counts(p)
    block_f, block_y, block_x = config.block
    chunk, fo, f = sch.split(f, [None, min(config.chunk or channels, channels), block_f])
    images, b = sch.split(b, [None, min(config.tiles_n, p.n)])
    y_task, yo, y = sch.split(y, [None, min(config.tiles_y, rows), block_y])
    x_task, xo, x = sch.split(x, [None, min(config.tiles_x, columns), block_x])
    if config.lanes == "co":
        f, lane = sch.split(f, [None, config.vector])
        tile = (y, x, f)
    else:
        x, lane = sch.split(x, [None, config.vector])
        tile = (f, y, x)
    sch.reorder(images, y_task, x_task, chunk, fo, b, yo, xo, rc, ry, rx, *tile, lane)
    task = sch.fuse(images, y_task, x_task, chunk)
    sch.parallel(task)

    if config.lanes == "co":
        _packed(sch, p, config, fo if is_alone(config, p) else None)
    next_step(sch, "The rows that a task reads, copied into its cache, where borders and strides end")
    sch.compute_at(padded, task, preserve_unit_loops=True)
    next_step(sch, "Register tiles, and the way out of each")
    sch.reverse_compute_at(output, xo, preserve_unit_loops=True)
    accumulate(sch, conv, rc, tile, lane)
    return streamed(sch, output, config.streaming, config.vector)


def _packed(sch: Schedule, problem: NchwProblem, config: CpuConfig, near: LoopRV | None) -> None:
    """The filters of a register tile side by side, and so the sums of a tile; `near` where they are read, if one task
    reads them."""
    where = ", by the task that reads them" if near else ""
    next_step(sch, f"The filters of a register tile side by side, turned a vector at a time{where}")
    conv, weights, panel = sch.get_sblock("conv"), sch.get_sblock("weights"), config.block[0]
    sch.transform_layout(conv, ("write", 0), lambda b, f, y, x: [b, y, x, f])
    sch.transform_layout(weights, ("write", 0), lambda f, c, ry, rx: [f // panel, c, ry, rx, f % panel])
    if near:
        sch.set_scope(weights, 0, "local")
        sch.compute_at(weights, near, preserve_unit_loops=True)
    filters, *reduction = sch.get_loops(weights)[-4:]
    tile, part, each = sch.split(filters, [None, config.block_f, config.vector])
    outer, line = sch.split(sch.fuse(*reduction), [None, min(config.vector, problem.reduction)])
    sch.reorder(tile, outer, part, each, line)
    if not near:
        sch.parallel(sch.fuse(tile, outer))


def default(problem: NchwProblem, arch: Arch) -> CpuConfig:
    return estimated(problem, arch)[1]


@lru_cache
def estimated(problem: NchwProblem, arch: Arch) -> tuple[float, CpuConfig]:
    """About the cycles of a core, and the register tile and the tasks of which that is the least, with pixels or
    channels in the lanes."""
    cycles, found = min((of_lanes(lanes, problem, arch) for lanes in LANES), key=lambda each: each[0])
    return cycles, past_caches(found, problem, arch, _far(problem, found))


def _far(problem: NchwProblem, config: CpuConfig) -> bool:
    """Whether the outputs of the channels of a few tiles drive each other out of the nearest cache, and are more than
    the cores keep in the next: they had better not come there."""
    p = problem
    few = register_tile.crowded(2 * config.block[0], 4 * p.out_h * p.out_w)
    return few and 4 * p.n * p.co * p.out_h * p.out_w > register_tile.cached() / 2 * physical_cores()


def of_lanes(lanes: str, problem: NchwProblem, arch: Arch) -> tuple[float, CpuConfig]:
    """About the cycles of a core, and the register tile that wastes least, with tasks that keep every core busy and
    their rows in its cache."""
    p, image, unit = problem, image_of(problem), vector_unit(arch)
    in_lanes = lanes == "co"

    def stored(config: CpuConfig) -> float:
        turned = TURNED * config.vector * config.sums + register_tile.SEGMENT * config.block[0] * config.block_y
        return turned if in_lanes else register_tile.STORED * config.sums

    def of_tile(config: CpuConfig) -> tuple[float, float]:
        steps = p.reduction * register_tile.step_cycles(unit, config.vector, *config.operands())
        return steps, stored(config) + register_tile.fetched(config.block[0] * p.reduction)

    def cycles(config: CpuConfig) -> float:
        return math.prod(config.counts(p)) * sum(of_tile(config))

    def packed(config: CpuConfig, alone: bool) -> float:
        filters = config.counts(p)[2] * config.block[0] * p.reduction
        whole = p.co % config.block[0] == 0 and p.reduction % config.vector == 0
        return register_tile.packing(filters, whole, alone)

    def prepared(config: CpuConfig, alone: bool) -> float:
        """Cycles of what is packed, or of columns that a stride skips, which are copied apart one by one."""
        apart = p.n * p.ci * p.h * p.w * register_tile.PACKED_ALONE if image.stride[1] > 1 else 0.0
        return packed(config, alone) if in_lanes else apart

    best = min(_tiles(p, arch, lanes), key=lambda tile: p.n * cycles(tile) + prepared(tile, False))
    counts, (block_f, block_y, block_x) = best.counts(p), best.block

    def rows_of(tiles_y: int) -> int:
        return p.ci * ((tiles_y * block_y - 1) * image.stride[0] + (p.kh - 1) * p.dilation[0] + 1)

    def copied(tiles_y: int, tiles_x: int) -> int:
        return rows_of(tiles_y) * (tiles_x * block_x * image.stride[1] + (p.kw - 1) * p.dilation[1])

    # rows of a tile begin and end amid lines, unless they are whole ones
    apart = 1 + BEGUN / (block_x * image.stride[1]) if counts[1] > 1 else 1.0
    task = register_tile.tasks(
        counts,
        p.n,
        physical_cores(),
        register_tile.tile_cycles(unit, *of_tile(best), across=not in_lanes),
        copied,
        block_f * p.reduction,
        together=not p.n_from,
        packed=lambda alone: prepared(best, alone),
        begun=lambda tiles_y, tiles_x: BEGUN * rows_of(tiles_y),
        apart=apart,
    )
    return task.cycles, task.given_to(best)


def _tiles(problem: NchwProblem, arch: Arch, lanes: str) -> Iterator[CpuConfig]:
    """Register tiles that the registers hold and the problem does not fall short of; with pixels in the lanes those
    whose filters, and whose outputs, the nearest cache holds side by side."""
    p, unit, (out_h, out_w), in_lanes = problem, vector_unit(arch), image_of(problem).out, lanes == "co"
    sizes = (PIXELS, ROWS[:2], VECTORS[:4]) if in_lanes else (VECTORS, ROWS, CHANNELS)
    rows = problem.reduction, problem.out_h * problem.out_w
    for vector in register_tile.vectors_for(unit, problem.co if in_lanes else out_w):
        for sides in product(*sizes):
            tile = CpuConfig(vector, 1, 1, 0, 1, lanes, *sides)
            of_lanes, of_rows = (tile.block_f, tile.block_x) if in_lanes else (tile.block_x, tile.block_f)
            extents = (problem.co, out_w) if in_lanes else (out_w, problem.co)
            short = vector * (of_lanes - 1) >= extents[0] or tile.block_y > out_h or of_rows > extents[1]
            short |= not in_lanes and any(register_tile.crowded(tile.block_f, 4 * apart) for apart in rows)
            vectors, broadcasts = tile.operands()
            if not short and register_tile.fits(unit, tile.sums, vectors, broadcasts if in_lanes and p.kw > 1 else 1):
                yield tile


def space(problem: NchwProblem, arch: Arch) -> Iterator[CpuConfig]:
    tiles = [tile for lanes in LANES for tile in _tiles(problem, arch, lanes)]
    return around(default(problem, arch), tiles, arch)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="pixels or channels in vector lanes, register tiles, borders ended in a copy of the rows that a task reads",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
