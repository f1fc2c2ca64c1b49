"""HWCN convolution on the CPU: the batch or filters in vector lanes, sums of a few pixels of a row in registers.

With a batch to fill the lanes, weights are broadcast against vectors of the batch, a few filters and pixels at a time;
filters come packed by register tiles, once for each call.  With a small batch, pixels are broadcast against vectors of
filters.  A task copies the data that it reads into a buffer that stays in cache, where borders end; where there is no
border and no tile is ragged, data is read as it lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from schedules.core.arch import Arch, physical_cores, vector_unit
from schedules.core.operator import ScheduleSpec
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.implicit import textbook
from schedules.definitions.program import program_of
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.steps import register_tile
from schedules.steps.register_tile import TileConfig, accumulate, around
from schedules.steps.story import next_step

LANES = ("n", "co")
FILTERS = (1, 2, 3, 4)  # broadcast at a time: of more, which lie side by side, LLVM 22 spills sums
IMAGES = (1, 2, 3, 4, 6, 8)
TURNED = 1.5  # cycles of an element that leaves a vector of filters for a batch of several
PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)


@dataclass(frozen=True)
class CpuConfig(TileConfig):
    lanes: str = "n"  # the axis in vector lanes: n or co
    block_lanes: int = 1  # vectors of it in a register tile
    block_rows: int = 3  # elements of the other axis
    block_x: int = 7  # pixels of a row
    packed: bool = True  # filters are copied tile by tile first

    @property
    def block(self) -> tuple[int, int]:
        """A register tile's (output channels, batch)."""
        lanes = self.vector * self.block_lanes
        return (self.block_rows, lanes) if self.lanes == "n" else (lanes, self.block_rows)

    @property
    def sums(self) -> int:
        return self.block_x * self.block_rows * self.block_lanes

    def counts(self, problem: HwcnProblem) -> tuple[int, int, int, int]:
        """Register tiles along an image's rows and columns, the output channels and the batch."""
        block_f, block_n = self.block
        return problem.out_h, -(-problem.out_w // self.block_x), -(-problem.co // block_f), -(-problem.n // block_n)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        if self.lanes not in LANES:
            return f"lanes={self.lanes} is not n or co"
        return self.check_tile(problem, "block_lanes", "block_rows", "block_x")


def copies(problem: HwcnProblem, config: CpuConfig) -> bool:
    """Whether tasks copy their data: for a border, a ragged tile, or taps that read it several times."""
    p = problem
    ragged = p.n % config.block[1] or p.out_w % config.block_x
    return bool(ragged) or p.pad != (0, 0) or p.kh * p.kw > 1


def graph(problem: HwcnProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    """The definition with (x, co, n) in whole register tiles; ``padded`` and ``weights`` are float32."""
    co, n = config.block
    return program_of(textbook(problem, {"x": config.block_x, "co": co, "n": n}, wide=True))


def schedule(problem: HwcnProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    p, (block_f, block_n) = problem, config.block
    sch = Schedule(graph(p, config, arch))
    conv, output, padded, weights = (sch.get_sblock(name) for name in ("conv", "output", "padded", "weights"))

    next_step(sch, "The filters of a register tile side by side, and so the lanes in the buffers")
    sch.set_scope(conv, 0, "local")
    if config.packed:
        sch.transform_layout(weights, ("write", 0), lambda ry, rx, c, f: [f // block_f, ry, rx, c, f % block_f])
        ry, rx, _, f = sch.get_loops(weights)
        _, lane = sch.split(f, [None, block_f])
        sch.parallel(sch.fuse(ry, rx))
        sch.vectorize(lane)
    else:
        sch.compute_inline(weights)
    if copies(p, config):
        sch.set_scope(padded, 0, "local")
        if config.lanes == "co":
            sch.transform_layout(padded, ("write", 0), lambda y, x, c, b: [y, x, b, c])
    else:
        sch.compute_inline(padded)
    if config.lanes == "co":
        sch.transform_layout(conv, ("write", 0), lambda y, x, f, b: [y, x, b, f])

    next_step(sch, "A parallel task for some rows and columns of a part of the batch, and some channels")
    y, x, f, n, ry, rx, rc = sch.get_loops(conv)
    _, columns, channels, batches = config.counts(p)
    chunk, fo, f = sch.split(f, [None, min(config.chunk or channels, channels), block_f])
    n_task, no, n = sch.split(n, [None, min(config.tiles_n, batches), block_n])
    y_task, y = sch.split(y, [None, min(config.tiles_y, p.out_h)])
    x_task, xo, x = sch.split(x, [None, min(config.tiles_x, columns), config.block_x])
    vectors, row = (n, f) if config.lanes == "n" else (f, n)
    vectors, lane = sch.split(vectors, [None, config.vector])
    # what is longer along the reduction stays in cache for all tiles of the other operand
    order = (no, y, xo, fo) if config.lanes == "n" else (fo, no, y, xo)
    sch.reorder(y_task, x_task, n_task, chunk, *order, ry, rx, rc, x, row, vectors, lane)
    task = sch.fuse(y_task, x_task, n_task, chunk)
    sch.parallel(task)

    next_step(sch, "The data that a task reads, copied into its cache, where borders end")
    if copies(p, config):
        sch.compute_at(padded, task, preserve_unit_loops=True)
    next_step(sch, "Register tiles, and the way out of each")
    sch.reverse_compute_at(output, order[-1], preserve_unit_loops=True)
    accumulate(sch, conv, ry, (x, row, vectors), lane)
    return sch.mod


def default(problem: HwcnProblem, arch: Arch) -> CpuConfig:
    return estimated(problem, arch)[1]


@lru_cache
def estimated(problem: HwcnProblem, arch: Arch) -> tuple[float, CpuConfig]:
    """About the cycles of a core, and the config: the batch in the lanes if it leaves few of them empty; the register
    tile that wastes least, and tasks that keep every core busy and their data in its cache."""
    p, unit = problem, vector_unit(arch)

    def of_tile(config: CpuConfig) -> tuple[float, float]:
        along = config.block_x * config.block_lanes if config.lanes == "n" else config.block_lanes
        across = config.sums // config.block_lanes // (config.block_x if config.lanes == "n" else 1)
        step = register_tile.step_cycles(unit, config.vector, along, across)
        stored = register_tile.STORED if config.lanes == "n" or p.n == 1 else TURNED * config.vector
        return step * p.ci * p.kh * p.kw, stored * config.sums

    def cycles(config: CpuConfig) -> float:
        return math.prod(config.counts(p)) * sum(of_tile(config))

    filled = 4 * register_tile.round_up(p.n, unit.lanes // 2) <= 5 * p.n
    best = min((tile for tile in _tiles(p, arch) if tile.lanes == ("n" if filled else "co")), key=cycles)
    rows, columns, channels, batches = best.counts(p)

    def copied(tiles_y: int, tiles_x: int) -> int:
        if not copies(p, best):
            return 0
        return math.prod(p.under(tiles_y, tiles_x * best.block_x)) * p.ci * best.block[1]

    weights = best.block[0] * p.ci * p.kh * p.kw
    tile = register_tile.tile_cycles(unit, *of_tile(best))
    counts = rows, columns, channels
    task = register_tile.tasks(counts, batches, physical_cores(), tile, copied, weights)
    return task.cycles, task.given_to(best)


def _tiles(problem: HwcnProblem, arch: Arch) -> Iterator[CpuConfig]:
    """Register tiles that the registers hold and the problem does not fall short of."""
    p, unit = problem, vector_unit(arch)
    for lanes, extent, other, rows in (("n", p.n, p.co, FILTERS), ("co", p.co, p.n, IMAGES)):
        for vector in register_tile.vectors_for(unit, extent):
            for block_lanes, block_rows, block_x in product((1, 2, 3, 4), rows, PIXELS):
                short = vector * (block_lanes - 1) >= extent or block_rows > other or block_x > p.out_w
                vectors = block_lanes * (block_x if lanes == "n" else 1)
                if not short and register_tile.fits(unit, block_lanes * block_rows * block_x, vectors):
                    packed = lanes == "n" or p.co % (vector * block_lanes) != 0
                    yield CpuConfig(vector, 1, 1, 0, 1, lanes, block_lanes, block_rows, block_x, packed)


def space(problem: HwcnProblem, arch: Arch) -> Iterator[CpuConfig]:
    tiles = list(_tiles(problem, arch))
    return around(default(problem, arch), [*tiles, *(replace(tile, packed=True) for tile in tiles)], arch)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="batch or filters in vector lanes, register tiles of pixels, parallel over pixels and channels",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
