"""Winograd's convolution on GPUs: what its schedules of all layouts share.

Four kernels in one function, between them workspaces: data and filters are transformed, the batch of products, one for
each point, is that of `steps.simt`, and the sums are transformed back and finished.  A block that transforms keeps what
is transformed along one axis in shared memory: its warps first go along the columns of a tile, then along the rows of
what they made, so that a thread has the values of one line only, whatever the tile.  Neighbouring lanes have
neighbouring elements of the layout's innermost axis: a batch that is innermost makes all accesses plain vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.arithmetic import WINOGRAD
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Conv2dProblem
from schedules.definitions.winograd import Winograd
from schedules.steps import simt
from schedules.steps.simt import SimtConfig
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, widest_vector
from schedules.winograd.cut import Cut, cuts

if TYPE_CHECKING:
    import tvm
    from tvm import tirx
    from tvm.s_tir import Schedule

LANES = 32  # of a block that transforms, along the innermost axis


@dataclass(frozen=True)
class WinogradConfig(Cut, SimtConfig):
    """Tiles of the products of a point: (output channels, columns) or, of channels inside, (columns, output channels);
    a column is a tile of the image."""

    tile_h: str = "4"
    tile_w: str = "4"
    transform_warps: int = 4  # of a block that transforms

    def check(self, problem: Conv2dProblem, arch: Arch) -> str | None:
        if reason := self.check_cut(problem):
            return reason
        if self.split_k > 1:
            return f"split_k={self.split_k} is for products alone; each of Winograd's is one block's, give 1"
        if not 1 <= self.transform_warps <= 8:
            return f"transform_warps={self.transform_warps} is not 1 to 8"
        needed = max(4 * LANES * elements for elements in self._shared(problem))
        if needed > arch.shared_static:
            return (
                f"tile_h={self.tile_h} and tile_w={self.tile_w} need {needed} bytes of shared memory to transform, "
                f"{arch} has {arch.shared_static}; use smaller tiles"
            )
        return super().check(problem, arch)

    def _shared(self, problem: Conv2dProblem) -> tuple[int, int, int]:
        """Values of a lane between the two axes of the transform of data, of filters, and back."""
        rows, columns = self.splits(problem)
        return rows.points * columns.reach, len(rows.filter) * columns.taps, rows.period * columns.points

    def graph(self, problem: Conv2dProblem) -> Winograd:
        made = Winograd(problem, *self.splits(problem))
        co, column = self.block[::-1] if made.channels_inside else self.block
        return replace(made, tile=(co, column, self.step))


def graph(problem: Conv2dProblem, config: WinogradConfig, arch: Arch) -> tirx.PrimFunc:
    return config.graph(problem).program()


def schedule(problem: Conv2dProblem, config: WinogradConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, filter, the epilogue's terms and output as they lie."""
    from tvm.s_tir import Schedule

    made = config.graph(problem)
    sch = Schedule(made.program())
    next_step(sch, f"The data of each tile, transformed along the rows, then the columns: lanes are {made.lanes}")
    _transform(sch, "data_rows", "data_points", config.transform_warps)
    pixels = sch.get_sblock("pixels")
    sch.set_scope(pixels, 0, "local")
    sch.compute_at(pixels, sch.get_loops(sch.get_sblock("data_rows"))[-2], preserve_unit_loops=True)
    for loop in sch.get_loops(pixels)[-4:]:
        sch.unroll(loop)
    next_step(sch, "The filters, transformed alike")
    _transform(sch, "filter_rows", "filter_points", config.transform_warps)
    p, vector = problem, config.vector
    if made.channels_inside:
        load = widest_vector(p.ci, min(vector, config.step))
        along, store = {"columns": (True, load), "weights": (True, load)}, p.co
    else:
        along = {"weights": (False, widest_vector(p.co, vector)), "columns": (False, widest_vector(made.tiles, vector))}
        store = made.tiles
    simt.schedule_tiles(sch, config, along, store, "products", batch=2)
    next_step(sch, "The sums, transformed back, finished and stored where they belong")
    sch.compute_inline(sch.get_sblock("finished"))
    _transform(sch, "sum_rows", "output", config.transform_warps)
    return sch.mod


def _transform(sch: Schedule, first: str, last: str, warps: int) -> None:
    """A kernel of `last` whose blocks keep `first`, the transform along one axis, in shared memory."""
    rows, points = sch.get_sblock(first), sch.get_sblock(last)
    line, across, other, inner = sch.get_loops(points)
    inner, lane = sch.split(inner, [None, LANES])
    line, warp = sch.split(line, [None, warps])
    sch.reorder(other, inner, warp, lane, line, across)
    grid = sch.fuse(other, inner)
    bind(sch, (grid, "blockIdx.x"), (warp, "threadIdx.y"), (lane, "threadIdx.x"))
    sch.unroll(across)
    sch.set_scope(rows, 0, "shared")
    sch.compute_at(rows, grid, preserve_unit_loops=True)
    down, line, other, lane = sch.get_loops(rows)[-4:]
    line, warp = sch.split(line, [None, warps])
    sch.reorder(other, warp, lane, line, down)
    bind(sch, (warp, "threadIdx.y"), (lane, "threadIdx.x"))
    sch.unroll(down)


@lru_cache
def default(problem: Conv2dProblem, arch: Arch) -> WinogradConfig:
    """The cut with the least estimated time, and `simt`'s tile for its products."""
    p = problem
    ways = list(product(cuts(p.kh, p.out_h), cuts(p.kw, p.out_w)))
    configs = [WinogradConfig(tile_h=tile_h, tile_w=tile_w) for tile_h, tile_w in ways]
    legal = [config for config in configs if config.check(p, arch) is None]
    if not legal:
        return WinogradConfig()
    best = min(legal, key=lambda config: seconds(config.graph(p), arch))
    made = best.graph(p)
    sides = (made.tiles, p.co) if made.channels_inside else (p.co, made.tiles)
    tile = simt.default(p, arch, sides, batch=made.rows.points * made.columns.points)
    return WinogradConfig(**tile.to_json(), tile_h=best.tile_h, tile_w=best.tile_w)


RATE, BANDWIDTH, LAUNCHES = 45e12, 3.5e12, 5e-6  # multiply-adds counted twice and bytes in a second; four launches


def seconds(made: Winograd, arch: Arch) -> float:
    """About how long it takes: the products, and what goes through memory between the kernels."""
    p, points = made.problem, made.rows.points * made.columns.points
    kept = len(made.rows.filter) * len(made.columns.filter)
    products = 2 * points * made.tiles * p.ci * p.co
    data, filters, sums = points * made.tiles * p.ci, kept * p.ci * p.co, points * made.tiles * p.co
    elements = p.min_bytes / 4 + 2 * (data + filters + sums)
    return products / RATE + 4 * elements / BANDWIDTH + LAUNCHES


def space(problem: Conv2dProblem, arch: Arch) -> Iterator[WinogradConfig]:
    """The tiles of `simt.space` that come near the default's, for the cuts that come near the best."""
    p, best = problem, default(problem, arch)
    ways = [best] + [
        replace(best, tile_h=tile_h, tile_w=tile_w)
        for tile_h, tile_w in product(cuts(p.kh, p.out_h), cuts(p.kw, p.out_w))
    ]
    near = [config for config in ways if config.check(p, arch) is None]
    near = sorted(dict.fromkeys(near), key=lambda config: seconds(config.graph(p), arch))[:6]
    for cut in near:
        for tile in simt.space(p, arch):
            if (tile.vector, tile.unroll, tile.split_k) == (4, 0, 1) and tile.threads >= 64:
                yield WinogradConfig(**tile.to_json(), tile_h=cut.tile_h, tile_w=cut.tile_w)


def winograd(channels_along_rows: bool) -> ScheduleSpec:
    """The schedule ``winograd`` of an operator."""
    return ScheduleSpec(
        name="winograd",
        summary="float32 with fewer products: Winograd's tiles, their points' products on CUDA cores; only if named",
        kinds=("cuda", "rocm"),
        config=WinogradConfig,
        apply=schedule,
        default=default,
        space=space,
        channels_along_rows=channels_along_rows,
        arithmetic=WINOGRAD[max(WINOGRAD)],
        opt_in=True,
        graph=graph,
    )
