"""Winograd's convolution on GPUs: what its schedules of all layouts share.

Four kernels in one function, between them workspaces: data and filters are transformed, the batch of products, one for
each point, is that of `steps.simt`, and the sums are transformed back and finished.  A block that transforms keeps what
is transformed along one axis in shared memory: its warps first go along the columns of a tile, then along the rows of
what they made, so that a thread has the values of one line only, whatever the tile.  Neighbouring lanes have
neighbouring elements of the layout's innermost axis: a batch that is innermost makes all accesses plain vectors.

Where tiles are only exact enough with sums of parts of the channels, a thread adds the sums of a part to a second set
of registers.  Fewer blocks are then resident; to keep as many, with the second set in the nearest cache, takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Conv2dProblem
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.winograd import Winograd
from schedules.steps import simt
from schedules.steps.simt import SimtConfig
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, widest_vector
from schedules.winograd.cut import Cut, cuts

LANES = 32  # of a block that transforms, along the innermost axis
PARTS = (0, 128, 64, 32, 16)  # channels that are summed apart, as tried: the most that are exact enough for a cut


@dataclass(frozen=True)
class WinogradConfig(Cut, SimtConfig):
    """Tiles of the products of a point: (output channels, columns) or, of channels inside, (columns, output channels);
    a column is a tile of the image."""

    tile_h: str = "4"
    tile_w: str = "4"
    transform_warps: int = 4  # of a block that transforms
    part: int = 0  # channels that are summed apart, and then added to the others' sums; 0: all are one chain

    @classmethod
    def unfit(cls, problem: Conv2dProblem, arch: Arch) -> str | None:
        reason = super().unfit(problem, arch)
        if reason is None and problem.stride != (1, 1):
            return f"stride={problem.stride} is not 1, and no more was timed on a GPU; use another schedule"
        return reason

    def check(self, problem: Conv2dProblem, arch: Arch) -> str | None:
        if reason := self.unfit(problem, arch):
            return reason
        if self.part and (self.stages == 1 or self.step < 1 or self.part < 1 or self.part % self.step):
            return f"part={self.part} is not 0, nor a multiple of step={self.step} with stages=2"
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

    def part_of(self, problem: Conv2dProblem) -> int:
        return self.part

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
    simt.schedule_tiles(sch, config, along, store, "products", batch=2, part=config.part // config.step)
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


# fitted to 39 layers of NCHW and NHWC data on an H200, tiles of 2 to 6, which it is 10% off on average, 37% at most
PRODUCT = 1.2  # what a multiply-add of a product takes with all that is beside it
NEAR, CACHED = 10e6, 0.2  # bytes of a workspace that stays in L2, and the share of memory's time that it takes
MEMORY = 1.5  # times what a copy of the workspaces takes
APART = 1.25  # and what the images take where lanes are tiles, whose pixels lie apart
STARTED = 15.0  # us: four kernels, one after the other
ADDED = 2.0  # multiply-adds, about, in whose time a thread adds a sum of a part to that of all


def estimate(problem: Conv2dProblem, config: WinogradConfig, arch: Arch) -> float:
    """About how many microseconds it takes: the products, and what goes through memory between the kernels."""
    p, made = problem, config.graph(problem)
    points, kept = made.rows.points * made.columns.points, len(made.rows.filter) * len(made.columns.filter)
    plain = math.prod(config.tile) / (math.prod(config.tile) + simt.overhead(config)) * PRODUCT
    products = plain * simt.microseconds(config, arch, _sides(made), points, p.ci)
    products *= 1 + ADDED / config.part if config.part else 1
    spaces = [4 * size for size in (points * made.tiles * p.ci, kept * p.ci * p.co, points * made.tiles * p.co)]
    moved = MEMORY * sum(2 * size * (1 if size > NEAR else CACHED) for size in spaces)
    moved += APART * p.min_bytes * (made.lanes == "tiles")
    return products + moved / ((arch.device.bandwidth or 1000) * 1e3) + STARTED


def _sides(made: Winograd) -> tuple[int, int]:
    """Rows and columns of a point's product."""
    return (made.tiles, made.problem.co) if made.channels_inside else (made.problem.co, made.tiles)


@lru_cache
def _ranked(problem: Conv2dProblem, arch: Arch) -> tuple[WinogradConfig, ...]:
    """For each cut that is legal the parts that it needs and `simt`'s tile for its products, the least estimate
    first."""
    needed: dict[tuple[str, str], int] = {}
    for part in PARTS:
        if part < problem.ci:
            needed = dict.fromkeys(cuts(problem, part), part) | needed
    found = []
    for cut, part in needed.items():
        plain = WinogradConfig(tile_h=cut[0], tile_w=cut[1])
        if plain.check(problem, arch) is None:
            made = plain.graph(problem)
            tile = simt.default(problem, arch, _sides(made), batch=made.rows.points * made.columns.points)
            found.append(WinogradConfig(**tile.to_json(), tile_h=cut[0], tile_w=cut[1], part=part))
    legal = (config for config in found if config.check(problem, arch) is None)
    return tuple(sorted(legal, key=lambda config: estimate(problem, config, arch)))


def default(problem: Conv2dProblem, arch: Arch) -> WinogradConfig:
    """The cut with the least estimated time of those with float32's errors, and `simt`'s tile for its products."""
    return next(iter(_ranked(problem, arch)), WinogradConfig())


def space(problem: Conv2dProblem, arch: Arch) -> Iterator[WinogradConfig]:
    """The tiles of `simt.space` that come near the default's, for the cuts that come near the best."""
    tiles = [
        tile.to_json()
        for tile in simt.space(problem, arch)
        if (tile.vector, tile.unroll, tile.split_k) == (4, 0, 1) and tile.threads >= 64
    ]
    for best, tile in product(_ranked(problem, arch)[:6], tiles):
        yield WinogradConfig(**tile, tile_h=best.tile_h, tile_w=best.tile_w, part=best.part)


def pays(problem: Conv2dProblem, arch: Arch) -> bool:
    """Whether it is estimated to take less time than the products that `simt` makes."""
    p, best = problem, default(problem, arch)
    if best.check(p, arch) is not None:
        return False
    sides = (p.pixels, p.co)
    plain = simt.default(p, arch, sides)
    return estimate(p, best, arch) < simt.microseconds(plain, arch, sides, 1, p.ci * p.kh * p.kw)


def winograd(channels_along_rows: bool) -> ScheduleSpec:
    """The schedule ``winograd`` of an operator."""
    return ScheduleSpec(
        name="winograd",
        summary="float32 with fewer products: Winograd's tiles, their points' products on CUDA cores",
        kinds=("cuda", "rocm"),
        config=WinogradConfig,
        apply=schedule,
        default=default,
        space=space,
        channels_along_rows=channels_along_rows,
        estimate=estimate,
        graph=graph,
    )
