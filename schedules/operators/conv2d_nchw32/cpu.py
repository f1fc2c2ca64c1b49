"""NCHW32 convolution on the CPU: output channels in vector lanes, sums of a few pixels of a row in registers, and in a
step as many input channels as the CPU multiplies and adds at once: four with `vpdpbusd`, two with `pmaddwd`, else one.

Filters are packed by register tiles, once for each call.  A task owns some rows and columns of an image and some
channels: it copies the data that it reads into a buffer that stays in cache, where borders end and numbers get the
width that the products take, then goes through its register tiles; a tile's filters stay in cache for all of the task's
pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from schedules.core.arch import Arch, physical_cores, vector_unit
from schedules.core.operator import ScheduleSpec
from schedules.core.tvm import PrimExpr, Schedule, te, tirx, tvm
from schedules.definitions.implicit import At, Implicit, at_run_time, stage
from schedules.definitions.program import begun
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.steps import register_tile
from schedules.steps.dot import VectorDot, vector_dot
from schedules.steps.intrinsics import tensorize
from schedules.steps.register_tile import PanelConfig, accumulate, around
from schedules.steps.story import next_step

PIXELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)


@dataclass(frozen=True)
class CpuConfig(PanelConfig):
    block_x: int = 4

    def counts(self, problem: Nchw32Problem) -> tuple[int, int, int]:
        """Register tiles along an image's rows and columns and along the output channels."""
        rows, columns = rows_of(problem)
        return rows, -(-columns // self.block_x), problem.co_groups * GROUP // self.panel

    def check(self, problem: Nchw32Problem, arch: Arch) -> str | None:
        reason = self.check_tile(problem, "block_lanes", "block_x")
        if reason:
            return reason
        if GROUP % self.panel:
            return (
                f"vector={self.vector} x block_lanes={self.block_lanes} are {self.panel} channels, no part of {GROUP}"
            )
        dot = vector_dot(arch)
        if dot.lanes and dot.lanes != self.vector:
            return f"vector={self.vector} is not the {dot.lanes} sums that {dot.name} makes at once"
        return None


def rows_of(problem: Nchw32Problem) -> tuple[int, int]:
    """Rows of an image and columns of its pixels; where every output pixel is an input pixel, all are one row."""
    p = problem
    if p.pointwise:
        return 1, p.h * p.w
    return p.out_h, p.out_w


def steps_of(problem: Nchw32Problem, pack: int) -> int:
    """Steps of `pack` channels in a group: if it is the only one, without those that only hold zeros."""
    return -(-min(problem.ci, problem.lanes) // pack)


def graph(problem: Nchw32Problem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    """``padded``, data with its border, and ``weights``, both as `vector_dot` takes them; ``conv`` (image, row, pixel,
    tile of channels, vector, lane) of `rows_of`, the sum over ci/32, kh, kw, steps of 32 channels, channels of a step;
    ``shift``, what the sums begin with where the data are shifted to be positive; ``output``.

    Pixels are rounded up to whole register tiles: beyond the last pixel stands that pixel once more.
    """
    p, dot, (rows, columns) = at_run_time(problem), vector_dot(arch), rows_of(problem)
    made, pack, flat = Implicit(p), dot.pack, rows_of(problem) != (p.out_h, p.out_w)
    wide = -(-columns // config.block_x) * config.block_x
    tiles, lanes, vector = p.co_groups * GROUP // config.panel, config.block_lanes, config.vector

    def filters(
        t: PrimExpr, g: PrimExpr, ry: PrimExpr, rx: PrimExpr, k: PrimExpr, f: PrimExpr, c: PrimExpr
    ) -> PrimExpr:
        channel = (t * lanes + f) * vector + c // pack
        return made.given["filter"][g, ry, rx, channel, k * pack + c % pack].astype(dot.filter)

    taps = p.ci_groups, p.kh, p.kw, steps_of(problem, pack)
    weights = te.compute((tiles, *taps, lanes, vector * pack), filters, name="weights")

    def border(b: PrimExpr, g: PrimExpr, y: PrimExpr, x: PrimExpr, c: PrimExpr) -> PrimExpr:
        zero = tirx.const(dot.shift, dot.data)
        if flat:
            return dot.shifted(made.given["data"][b, g, x // p.w, x % p.w, c])
        y, x = y - p.pad[0], x - p.pad[1]
        value = dot.shifted(made.given["data"][b, g, y, x, c])
        inside = [y >= 0, y < p.h] * (p.pad[0] > 0) + [x >= 0, x < p.w] * (p.pad[1] > 0)
        return te.if_then_else(te.all(*inside), value, zero) if inside else value

    padded = te.compute((p.n, p.ci_groups, *p.under(rows, columns), p.lanes), border, name="padded")
    over = [te.reduce_axis((0, e), name) for e, name in zip((*taps, pack), ("rg", "ry", "rx", "rk", "rc"), strict=True)]
    rg, ry, rx, rk, rc = over

    def element(b: PrimExpr, y: PrimExpr, x: PrimExpr, t: PrimExpr, f: PrimExpr, lane: PrimExpr) -> PrimExpr:
        x = te.min(x, columns - 1) if wide > columns else x
        row, column = y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1]
        value = padded[b, rg, row, column, rk * pack + rc]
        weight = weights[t, rg, ry, rx, rk, f, lane * pack + rc]
        begin = None if shift is None else shift[t, f, lane]
        return te.sum(value.astype("int32") * weight.astype("int32"), axis=over, init=begin)

    shift = _shift(weights, dot) if dot.shift else None
    conv = te.compute((p.n, rows, wide, tiles, lanes, vector), element, name="conv")

    def finished(at: At) -> PrimExpr:
        b, g, y, x, f = at.values()
        channel = g * GROUP + f
        place = channel // config.panel, channel % config.panel // vector, channel % vector
        total = conv[(b, 0, y * p.out_w + x, *place) if flat else (b, y, x, *place)]
        return made.finish(total, at)

    func = made.program(stage("output", p.output_axes, p.shapes()[2], finished))
    return begun(func, "shift", lambda at: at[-3:]) if dot.shift else func


def _shift(weights: te.Tensor, dot: VectorDot) -> te.Tensor:
    """(tile of channels, vector, lane): the sums of the ``weights`` times what the data are shifted back by, by way of
    the same sums apart for the channels of a step."""
    tiles, *taps, lanes, width = weights.shape
    over = [te.reduce_axis((0, extent)) for extent in taps]
    apart = te.compute(
        (tiles, lanes, width),
        lambda t, f, c: te.sum(weights(t, *over, f, c).astype("int32") * -dot.shift, axis=over),
        name="apart",
    )
    rc = te.reduce_axis((0, dot.pack))
    return te.compute(
        (tiles, lanes, width // dot.pack),
        lambda t, f, lane: te.sum(apart[t, f, lane * dot.pack + rc], axis=rc),
        name="shift",
    )


def schedule(problem: Nchw32Problem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program."""
    p, dot = problem, vector_dot(arch)
    sch = Schedule(graph(p, config, arch))
    conv, output, weights, padded = (sch.get_sblock(name) for name in ("conv", "output", "weights", "padded"))
    if rows_of(p) != (p.out_h, p.out_w):
        next_step(sch, "All pixels of an image in one row, where every output pixel is an input pixel")
        sch.transform_block_layout(output, lambda b, g, y, x, f: [b, g, y * p.out_w + x, f])
    next_step(sch, "The filters of a register tile side by side, in the order of the products")
    tile, *taps, k, f, c = sch.get_loops(weights)
    lane, c = sch.split(c, [None, dot.pack])
    sch.reorder(tile, *taps, f, lane, k, c)  # as they are read
    sch.parallel(sch.fuse(tile, *taps))
    if dot.shift:
        apart, shift = sch.get_sblock("apart"), sch.get_sblock("shift")
        tile, f, c, *taps = sch.get_loops(apart)
        sch.reorder(tile, f, *taps, c)
        sch.vectorize(c)
        sch.parallel(tile)
        sch.vectorize(sch.get_loops(sch.decompose_reduction(apart, taps[0]))[-1])
        sch.parallel(sch.get_loops(shift)[0])

    next_step(sch, "A parallel task for some rows and columns of images and some channels; sums in registers")
    sch.set_scope(conv, 0, "local")
    n, y, x, t, f, lane, rg, ry, rx, rk, rc = sch.get_loops(conv)
    rows, columns, channels = config.counts(p)
    images, n = sch.split(n, [None, min(config.tiles_n, p.n)])
    y_task, y = sch.split(y, [None, min(config.tiles_y, rows)])
    x_task, xo, x = sch.split(x, [None, min(config.tiles_x, columns), config.block_x])
    chunk, t = sch.split(t, [None, min(config.chunk or channels, channels)])
    # channels are the outer loop of a task: a tile's filters are read again from the nearest cache
    sch.reorder(images, y_task, x_task, chunk, t, n, y, xo, rg, ry, rx, rk, x, f, lane, rc)
    task = sch.fuse(images, y_task, x_task, chunk)
    sch.parallel(task)

    next_step(sch, "The data that a task reads, copied into its cache, where borders end")
    sch.set_scope(padded, 0, "local")
    sch.compute_at(padded, task, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops(padded)[-1])
    next_step(sch, "Register tiles, channels in vector lanes, and the way out of each")
    sch.reverse_compute_at(output, xo, preserve_unit_loops=True)
    _, lanes = sch.split(sch.get_loops(output)[-1], [None, config.vector])
    sch.vectorize(lanes)
    if not dot.lanes:
        accumulate(sch, conv, rg, (x, f), lane)
        return sch.mod
    for loop in (x, f):
        sch.unroll(loop)
    *start, last = sch.get_loops(sch.decompose_reduction(conv, rg))[-3:]
    for loop in start:
        sch.unroll(loop)
    sch.vectorize(last)
    sch.blockize(lane)  # with the test of a last task outside
    tensorize(sch, sch.get_loops(conv)[-2], dot.intrinsic)
    return sch.mod


@lru_cache
def default(problem: Nchw32Problem, arch: Arch) -> CpuConfig:
    """The register tile that wastes least, and tasks that keep every core busy and their data in its cache."""
    p, unit, dot = problem, vector_unit(arch), vector_dot(arch)

    def step(config: CpuConfig) -> float:
        return register_tile.step_cycles(unit, config.vector, config.block_lanes, config.block_x)

    best = min(_tiles(p, arch), key=lambda tile: math.prod(tile.counts(p)) * step(tile))
    counts = best.counts(p)
    width = 4 // dot.pack  # of an element of data, in parts of the four bytes that tasks are counted in

    def copied(tiles_y: int, tiles_x: int) -> int:
        rows, columns = p.under(tiles_y, tiles_x * best.block_x)
        return p.ci_groups * p.lanes * rows * columns * width // 4

    reduction = p.ci_groups * p.kh * p.kw * steps_of(p, dot.pack)
    tile = register_tile.tile_cycles(unit, step(best) * reduction, register_tile.STORED * best.sums)
    weights, together = best.panel * reduction, not p.n_from
    return register_tile.tasks(counts, p.n, physical_cores(), tile, copied, weights, together=together).given_to(best)


def _tiles(problem: Nchw32Problem, arch: Arch) -> Iterator[CpuConfig]:
    """Register tiles that the registers hold and the problem does not fall short of."""
    unit = vector_unit(arch)
    vector = vector_dot(arch).lanes or unit.lanes
    for block_lanes, block_x in product((1, 2, 4), PIXELS):
        fits = register_tile.fits(unit, block_lanes * block_x, block_lanes)
        if fits and block_x <= rows_of(problem)[1] and GROUP % (vector * block_lanes) == 0:
            yield CpuConfig(vector, block_lanes=block_lanes, block_x=block_x)


def space(problem: Nchw32Problem, arch: Arch) -> Iterator[CpuConfig]:
    return around(default(problem, arch), list(_tiles(problem, arch)), arch)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="output channels in vector lanes, four or two input channels a step (vpdpbusd, pmaddwd), parallel",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
