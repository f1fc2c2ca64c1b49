"""NCHW convolution on the CPU: pixels of rows in vector lanes, sums of a few output channels in registers.

A task owns some rows of an image.  It copies the rows that it reads into a buffer that stays in cache, where borders
end and columns that a stride skips lie apart, so that every tap finds its pixels next to each other; then it computes
one register tile after the other, of channels x rows x vectors of pixels.  Filters are read as they lie: along the
reduction.
"""

from __future__ import annotations

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
from schedules.steps.register_tile import TileConfig, accumulate, check_streaming, past_caches, streamed
from schedules.steps.story import next_step

if TYPE_CHECKING:
    import tvm
    from tvm import tirx
    from tvm.tirx import PrimExpr

VECTORS, ROWS, CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 8, 12)  # of a tile


@dataclass(frozen=True)
class CpuConfig(TileConfig):
    block_x: int = 2  # vectors of a row in a register tile
    block_y: int = 2  # rows
    block_f: int = 6  # output channels
    streaming: str = "no"  # "stores": the output goes past the caches

    @property
    def panel(self) -> int:
        """Pixels of a row in a register tile."""
        return self.vector * self.block_x

    @property
    def sums(self) -> int:
        return self.block_x * self.block_y * self.block_f

    def counts(self, problem: NchwProblem) -> tuple[int, int, int]:
        """Register tiles along an image's rows and columns and along the output channels."""
        sizes = (*image_of(problem).out, problem.co)
        y, x, f = (-(-size // t) for size, t in zip(sizes, (self.block_y, self.panel, self.block_f), strict=True))
        return y, x, f

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        row = image_of(problem).out[1]
        reason = check_streaming(self.streaming, problem, row, self.panel, self.vector)
        return self.check_tile("block_x", "block_y", "block_f") or reason


def graph(problem: NchwProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    """The convolution with the pixels of a row next to each other under every tap: ``padded`` (n, ci, row, phase, x)
    is data with its border, in float32, the column x * stride + phase of `image_of`; ``conv`` (n, co, out_h, out_w)
    the sum over ci, kh, kw; ``output``.

    Extents of (co, out_h, out_w) are rounded up to whole register tiles, with zeros in ``padded`` and, beyond the last
    filter, that filter once more: schedules need no test but where ``output`` keeps what was asked for.
    """
    from tvm import te

    p, image = at_run_time(problem), image_of(problem)
    tile = config.block_f, config.block_y, config.panel
    made = Implicit(p)
    data = made.given["data"]
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
        value = data[b, c, y, x] if h == p.h else data[b, c, x // p.w, x % p.w]
        return select(tests, value).astype(ACCUMULATOR)

    padded = te.compute((p.n, p.ci, rows, right, columns), pixel, name="padded")
    rc, ry, rx = (te.reduce_axis((0, extent), name) for name, extent in (("rc", p.ci), ("ry", p.kh), ("rx", p.kw)))

    def element(b: PrimExpr, f: PrimExpr, y: PrimExpr, x: PrimExpr) -> PrimExpr:
        across = rx * p.dilation[1]
        value = padded[b, rc, y * down + ry * p.dilation[0], across % right, x + across // right]
        last = te.min(f, p.co - 1) if co > p.co else f
        weight = made.filter({"co": last, "ci": rc, "kh": ry, "kw": rx})
        return te.sum(value * weight.astype(ACCUMULATOR), axis=[rc, ry, rx])

    conv = te.compute((p.n, co, out_h, out_w), element, name="conv")

    def finished(at: At) -> PrimExpr:
        b, f, y, x = at.values()
        return made.finish(conv[b, f, y, x] if h == p.h else conv[b, f, 0, y * p.out_w + x], at)

    return made.program(stage("output", p.output_axes, p.shapes()[2], finished))


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
    chunk, fo, f = sch.split(f, [None, min(config.chunk or channels, channels), config.block_f])
    y_task, yo, y = sch.split(y, [None, min(config.tiles_y, rows), config.block_y])
    x_task, xo, x, lane = sch.split(x, [None, min(config.tiles_x, columns), config.block_x, config.vector])
    sch.reorder(b, y_task, x_task, chunk, fo, yo, xo, rc, ry, rx, f, y, x, lane)
    task = sch.fuse(b, y_task, x_task, chunk)
    sch.parallel(task)

    next_step(sch, "The rows that a task reads, copied into its cache, where borders and strides end")
    sch.compute_at(padded, task, preserve_unit_loops=True)
    next_step(sch, "Register tiles, pixels in vector lanes, and the way out of each")
    sch.reverse_compute_at(output, xo, preserve_unit_loops=True)
    accumulate(sch, conv, rc, (f, y, x), lane)
    return streamed(sch, output, config.streaming, config.vector)


@lru_cache
def default(problem: NchwProblem, arch: Arch) -> CpuConfig:
    """The register tile that wastes least, and tasks that keep every core busy and their rows in its cache."""
    p, image, unit = problem, image_of(problem), vector_unit(arch)

    def cycles(config: CpuConfig) -> float:
        step = register_tile.step_cycles(unit, config.vector, config.block_x * config.block_y, config.block_f)
        rows, columns, channels = config.counts(p)
        return rows * columns * channels * step

    best = min(_tiles(p, arch), key=cycles)
    counts = best.counts(p)

    def copied(tiles_y: int, tiles_x: int) -> int:
        rows = (tiles_y * best.block_y - 1) * image.stride[0] + (p.kh - 1) * p.dilation[0] + 1
        columns = tiles_x * best.panel * image.stride[1] + (p.kw - 1) * p.dilation[1]
        return p.ci * rows * columns

    tile = cycles(best) / (counts[0] * counts[1] * counts[2]) * p.reduction + register_tile.STORED * best.sums
    task = register_tile.tasks(counts, p.n, physical_cores(), tile, copied, best.block_f * p.reduction)
    found = CpuConfig(best.vector, task.tiles_x, task.tiles_y, task.chunk, best.block_x, best.block_y, best.block_f)
    return past_caches(found, p, arch)


def _tiles(problem: NchwProblem, arch: Arch) -> Iterator[CpuConfig]:
    """Register tiles that the registers hold and the problem does not fall short of, whose filters the nearest cache
    holds side by side."""
    unit, (out_h, out_w) = vector_unit(arch), image_of(problem).out
    for vector in register_tile.vectors_for(unit, out_w):
        for block_x, block_y, block_f in product(VECTORS, ROWS, CHANNELS):
            short = vector * (block_x - 1) >= out_w or block_y > out_h or block_f > problem.co
            short |= register_tile.crowded(block_f, 4 * problem.reduction)
            if not short and register_tile.fits(unit, block_x * block_y * block_f, block_x * block_y):
                yield CpuConfig(vector, block_x=block_x, block_y=block_y, block_f=block_f)


def space(problem: NchwProblem, arch: Arch) -> Iterator[CpuConfig]:
    """The default, and tiles of half the sums that the registers hold at least, where the problem has as many."""
    tiles = list(_tiles(problem, arch))
    enough = min(vector_unit(arch).registers // 2, max(tile.sums for tile in tiles))
    found = [
        CpuConfig(tile.vector, tiles_x, tiles_y, chunk, tile.block_x, tile.block_y, tile.block_f)
        for tile in tiles
        if tile.sums >= enough
        for tiles_x, tiles_y, chunk in product((1, 4), (1, 4, 16), (0, 1, 4))
    ]
    yield from dict.fromkeys([default(problem, arch), *found])


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="rows of pixels in vector lanes, register tiles, borders ended in a copy of the rows that a task reads",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
