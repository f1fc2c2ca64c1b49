"""NHWC convolution on the CPU: output channels in vector lanes, sums of a few pixels of a row in registers.

Filters are packed by register tiles, output channels side by side, once for each call: by a task for its own channels
where it owns all pixels, so that they never leave its caches.  A task owns some rows and columns of an image, or some
images, and some channels: it copies the data that it reads into a buffer that stays in cache, where borders end (data
without a border is read as it lies), then broadcasts pixels against vectors of filters, one register tile after the
other; a tile's filters stay in cache for all of the task's pixels.
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
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.steps import register_tile
from schedules.steps.register_tile import PanelConfig, accumulate, around, check_streaming, past_caches, streamed
from schedules.steps.story import next_step

if TYPE_CHECKING:
    import tvm
    from tvm import tirx
    from tvm.tirx import PrimExpr

LANES = (1, 2, 3, 4)  # vectors of a register tile
PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
AHEAD = 4  # registers for operands of sums of a task's copy; data as they lie are late, and more is to be moved ahead


@dataclass(frozen=True)
class CpuConfig(PanelConfig):
    streaming: str = "no"  # "stores": the output goes past the caches

    def counts(self, problem: NhwcProblem) -> tuple[int, int, int]:
        """Register tiles along an image's rows and columns and along the output channels."""
        _, rows, columns = rows_of(problem)
        return rows, -(-columns // self.block_x), -(-problem.co // self.panel)

    def check(self, problem: NhwcProblem, arch: Arch) -> str | None:
        row = problem.co
        reason = check_streaming(self.streaming, problem, row, self.panel, self.vector)
        return self.check_tile(problem, "block_lanes", "block_x") or reason


def rows_of(problem: NhwcProblem) -> tuple[int, int, int]:
    """Images, and rows and columns of their pixels; where every output pixel is an input pixel, all are one row, or
    those of each image where there is any number of images."""
    p = problem
    if p.pointwise:
        return (p.n, 1, p.h * p.w) if p.n_from else (1, 1, p.pixels)
    return p.n, p.out_h, p.out_w


def graph(problem: NhwcProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    """``weights`` and, if tasks copy their data, ``padded`` (with its border) in float32; ``conv`` (image, row, pixel,
    co) of `rows_of`, the sum over kh, kw, ci; ``output``.

    Extents of (pixel, co) are rounded up to whole register tiles: beyond the last pixel stands that pixel once more.
    """
    from tvm import te

    p = at_run_time(problem)
    images, rows, columns = rows_of(p)
    made = Implicit(p, {"co": config.panel}, wide=True)
    weights = made.weights("co kh kw ci")
    wide = -(-columns // config.block_x) * config.block_x
    flat = (rows, columns) != (p.out_h, p.out_w)

    def border(at: At) -> PrimExpr:
        y, x = at["h"] - p.pad[0], at["w"] - p.pad[1]
        tests = [(True, te.all(y >= 0, y < p.h)), (True, te.all(x >= 0, x < p.w))]
        return select(tests, made.data({**at, "h": y, "w": x})).astype(ACCUMULATOR)

    source = made.data
    if copies(p):
        source = stage("padded", p.data_axes, (p.n, *p.under(p.out_h, p.out_w), p.ci), border)
    ry, rx, rc = (te.reduce_axis((0, extent), name) for name, extent in (("ry", p.kh), ("rx", p.kw), ("rc", p.ci)))

    def element(b: PrimExpr, y: PrimExpr, x: PrimExpr, f: PrimExpr) -> PrimExpr:
        x = te.min(x, columns - 1) if wide > columns else x
        image = {"n": b, "y": y, "x": x}
        if flat:
            image = {"n": b + x // (p.out_h * p.out_w), "y": x // p.out_w % p.out_h, "x": x % p.out_w}
        at = {
            "n": image["n"], "ci": rc, "kh": ry, "kw": rx, "co": f,
            "h": image["y"] * p.stride[0] + ry * p.dilation[0], "w": image["x"] * p.stride[1] + rx * p.dilation[1],
        }  # fmt: skip
        return te.sum(source(at).astype(ACCUMULATOR) * weights(at), axis=[ry, rx, rc])

    conv = te.compute((images, rows, wide, made.extent("co")), element, name="conv")

    def finished(at: At) -> PrimExpr:
        b, y, x, f = at.values()
        if flat:
            b, y, x = (b, 0, y * p.out_w + x) if p.n_from else (0, 0, (b * p.out_h + y) * p.out_w + x)
        return made.finish(conv[b, y, x, f], at)

    return made.program(stage("output", p.output_axes, p.shapes()[2], finished))


def is_alone(config: CpuConfig, problem: NhwcProblem) -> bool:
    """Whether a task owns all pixels, and so is the only one that reads its channels' filters."""
    images, rows, columns = rows_of(problem)
    whole = config.tiles_y >= rows and config.tiles_x * config.block_x >= columns
    return whole and config.tiles_n >= images and not problem.n_from


def copies(problem: NhwcProblem) -> bool:
    """Whether tasks copy their data: for a border, or to convert it once."""
    return problem.pad != (0, 0) or problem.dtype != "float32"


def schedule(problem: NhwcProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, h, w, ci), filter (co, kh, kw, ci), the epilogue's terms, output (n, out_h,
    out_w, co)."""
    from tvm.s_tir import Schedule

    p, panel = problem, config.panel
    sch = Schedule(graph(p, config, arch))
    conv, output, weights = (sch.get_sblock(name) for name in ("conv", "output", "weights"))
    if rows_of(p)[1:] != (p.out_h, p.out_w):
        next_step(sch, "All pixels in one row, where every output pixel is an input pixel")
        sch.transform_block_layout(
            output,
            lambda b, y, x, f: [b, y * p.out_w + x, f] if p.n_from else [(b * p.out_h + y) * p.out_w + x, f],
        )
    next_step(sch, "A parallel task for some rows and columns of images and some channels; sums in registers")
    sch.set_scope(conv, 0, "local")
    n, y, x, f, ry, rx, rc = sch.get_loops(conv)
    rows, columns, channels = config.counts(p)
    images, n = sch.split(n, [None, min(config.tiles_n, rows_of(p)[0])])
    y_task, y = sch.split(y, [None, min(config.tiles_y, rows)])
    x_task, xo, x = sch.split(x, [None, min(config.tiles_x, columns), config.block_x])
    share = min(config.chunk or channels, channels)
    chunk, fo, f, lane = sch.split(f, [None, share, config.block_lanes, config.vector])
    # channels are the outer loop of a task: a tile's filters are read again from the nearest cache
    sch.reorder(images, y_task, x_task, chunk, fo, n, y, xo, ry, rx, rc, x, f, lane)
    task = sch.fuse(images, y_task, x_task, chunk)
    sch.parallel(task)

    alone = is_alone(config, p)
    where = ", by the task that reads them" if alone else ""
    next_step(sch, f"The filters of a register tile side by side, turned a vector at a time{where}")
    sch.transform_layout(weights, ("write", 0), lambda f, ry, rx, c: [f // panel, ry, rx, c, f % panel])
    if alone:
        sch.set_scope(weights, 0, "local")
        sch.compute_at(weights, fo, preserve_unit_loops=True)
    filters, *taps, c = sch.get_loops(weights)[-4:]
    tile, part, each = sch.split(filters, [None, config.block_lanes, config.vector])
    c, line = sch.split(c, [None, min(config.vector, p.ci)])
    sch.reorder(tile, *taps, c, part, each, line)
    if not alone:
        sch.parallel(sch.fuse(tile, *taps))

    if copies(p):
        next_step(sch, "The data that a task reads, copied into its cache, where borders end")
        padded = sch.get_sblock("padded")
        sch.set_scope(padded, 0, "local")
        sch.compute_at(padded, task, preserve_unit_loops=True)
    next_step(sch, "Register tiles, channels in vector lanes, and the way out of each")
    sch.reverse_compute_at(output, xo, preserve_unit_loops=True)
    accumulate(sch, conv, ry, (x, f), lane)
    return streamed(sch, output, config.streaming, config.vector)


def default(problem: NhwcProblem, arch: Arch) -> CpuConfig:
    return estimated(problem, arch)[1]


@lru_cache
def estimated(problem: NhwcProblem, arch: Arch) -> tuple[float, CpuConfig]:
    """About the cycles of a core, and the config: the register tile that wastes least, and tasks that keep every core
    busy and their data in its cache."""
    p, unit = problem, vector_unit(arch)
    reduction = p.ci * p.kh * p.kw

    def of_tile(config: CpuConfig) -> tuple[float, float]:
        step = register_tile.step_cycles(unit, config.vector, config.block_lanes, config.block_x)
        segments = config.block_x if config.panel < p.co else 1
        stored = register_tile.STORED * config.sums + register_tile.SEGMENT * segments
        return step * reduction, stored + register_tile.fetched(config.panel * reduction)

    def packed(config: CpuConfig, alone: bool) -> float:
        filters = config.counts(p)[2] * config.panel * reduction
        return register_tile.packing(filters, p.co % config.panel == 0, alone)

    def cycles(config: CpuConfig) -> float:
        return rows_of(p)[0] * math.prod(config.counts(p)) * sum(of_tile(config)) + packed(config, False)

    best = min(_tiles(p, arch), key=cycles)
    counts = best.counts(p)

    def copied(tiles_y: int, tiles_x: int) -> int:
        """Elements of an image that a task copies, or reads as they lie."""
        rows, columns = p.under(tiles_y, tiles_x * best.block_x)
        if not copies(p):  # nor reads what a stride skips
            rows, columns = min(rows, tiles_y * p.kh), min(columns, tiles_x * best.block_x * p.kw)
        return p.ci * rows * columns

    task = register_tile.tasks(
        counts,
        rows_of(p)[0],
        physical_cores(),
        register_tile.tile_cycles(unit, *of_tile(best)),
        copied,
        best.panel * reduction,
        together=not p.n_from,
        packed=lambda alone: packed(best, alone),
    )
    return task.cycles, past_caches(task.given_to(best), p, arch)


def _tiles(problem: NhwcProblem, arch: Arch) -> Iterator[CpuConfig]:
    """Register tiles that the registers hold and the problem does not fall short of."""
    p, unit, ahead = problem, vector_unit(arch), AHEAD if copies(problem) else None
    for vector in register_tile.vectors_for(unit, p.co):
        for block_lanes, block_x in product(LANES, PIXELS):
            short = vector * (block_lanes - 1) >= p.co or block_x > rows_of(p)[2]
            if not short and register_tile.fits(unit, block_lanes * block_x, block_lanes, ahead=ahead):
                yield CpuConfig(vector, block_lanes=block_lanes, block_x=block_x)


def space(problem: NhwcProblem, arch: Arch) -> Iterator[CpuConfig]:
    return around(default(problem, arch), list(_tiles(problem, arch)), arch)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="output channels in vector lanes, register tiles of pixels of a row, parallel over rows and channels",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
