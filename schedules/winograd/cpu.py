"""Winograd's convolution on the CPU: what its schedules of all layouts share.

Filters are transformed once for each call, packed by register tiles: by a task for its own channels where it owns all
tiles of the images, so that they never leave its caches.  A task owns some tiles of the images and some output
channels.  It transforms its data into a buffer that stays in cache; then, for a few channels at a time, it multiplies
at every point, one register tile after the other, and transforms the sums back while they are in the nearest cache.
Vector lanes hold images where these are the layout's innermost axis and fill vectors, else channels, which are brought
together as data is read and parted as outputs are stored where the layout has others inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from schedules.core.arch import Arch, physical_cores, vector_unit
from schedules.core.cpu import KIB, beyond_caches, last_level_cache
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, Conv2dProblem
from schedules.definitions.winograd import Winograd
from schedules.steps import register_tile
from schedules.steps.register_tile import accumulate, round_up
from schedules.steps.story import next_step
from schedules.steps.tiles import inline_if_present, widest_vector
from schedules.winograd.cut import Cut, cuts

if TYPE_CHECKING:
    import tvm
    from tvm import tirx
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV

PART = 32  # channels at least of a sum that is added to those of the others
LANES = (1, 2, 3)  # vectors of a register tile
ROWS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class WinogradCpuConfig(Cut, Config):
    """A register tile is `block_lanes` vectors of the innermost axis and `block_rows` of the other of (output channels,
    columns); a column is a tile of the image."""

    tile_h: str = "4"
    tile_w: str = "4"
    vector: int = 8  # elements of a vector
    block_lanes: int = 2
    block_rows: int = 6
    columns: int = 1  # register tiles of a task along the columns
    chunk: int = 0  # and along the output channels; 0: all of them
    streaming: str = "no"  # "stores": the output goes past the caches, where channels are inside

    def block(self, inside: bool) -> tuple[int, int]:
        """A register tile's (output channels, columns), with channels inside or not."""
        lanes = self.vector * self.block_lanes
        return (lanes, self.block_rows) if inside else (self.block_rows, lanes)

    def graph(self, problem: Conv2dProblem) -> Winograd:
        p = problem
        # images fill vectors, or channels are brought inside
        as_they_lie = p.data_axes[-1] == "ci" or (p.data_axes[-1] == "n" and p.n % self.vector == 0)
        made = Winograd(p, *self.splits(p), whole=True, part=self.part_of(p), turned=not as_they_lie)
        co, column = self.block(made.channels_inside)
        return replace(made, tile=(co, column * min(self.columns, -(-made.tiles // column)), 1))

    def part_of(self, problem: Conv2dProblem) -> int:
        return part(problem.ci)

    def check(self, problem: Conv2dProblem, arch: Arch) -> str | None:
        if reason := self.unfit(problem, arch) or self.check_cut(problem):
            return reason
        if self.vector not in (1, 2, 4, 8, 16, 32):
            return f"vector={self.vector} is not a power of two up to 32"
        for name in ("block_lanes", "block_rows", "columns"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.chunk < 0:
            return f"chunk={self.chunk} must not be negative"
        if self.vector * self.block_lanes * self.block_rows > register_tile.MOST_SUMS:
            return f"block_rows={self.block_rows} make a register tile of over {register_tile.MOST_SUMS} sums"
        inside = problem.data_axes[-1] == "ci"
        if self.streaming == "stores" and not inside:
            return f"streaming={self.streaming} is for data with channels inside"
        return register_tile.check_streaming(self.streaming, problem, problem.co, self.block(inside)[0], self.vector)


def part(ci: int) -> int:
    """The channels of a part of the sums: the fewest from PART that divide `ci`; 0 where there is no such part."""
    return next((each for each in range(PART, ci // 2 + 1) if ci % each == 0), 0)


def graph(problem: Conv2dProblem, config: WinogradCpuConfig, arch: Arch) -> tirx.PrimFunc:
    return config.graph(problem).program()


def schedule(problem: Conv2dProblem, config: WinogradCpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, filter, the epilogue's terms and output as they lie."""
    from tvm.s_tir import Schedule

    p, made = problem, config.graph(problem)
    inside = made.channels_inside
    panel = made.tile[0]
    sch = Schedule(made.program())
    next_step(sch, "A parallel task for some columns and some channels; a few channels at a time")
    inline_if_present(sch, "columns", "weights")
    output = sch.get_sblock("output")
    y, x, *sides = sch.get_loops(output)
    columns, channels = sides if inside else sides[::-1]
    columns, of_task = sch.split(columns, [None, made.tile[1]])
    count = -(-p.co // panel)
    chunk, fo, f = sch.split(channels, [None, min(config.chunk or count, count), panel])
    by_channels = inside and not made.turned  # as the output lies
    images = []
    if not inside:
        of_task, *images = sch.split(of_task, [None, config.vector])
    sch.reorder(columns, chunk, fo, *((of_task, y, x, f) if by_channels else (f, of_task, y, x)), *images)
    for lane in images:
        sch.vectorize(lane)
    task = sch.fuse(columns, chunk)
    sch.parallel(task)
    if by_channels and p.co % panel == 0 and config.streaming == "no":
        f, lane = sch.split(f, [None, config.vector])
        sch.vectorize(lane)

    next_step(sch, "Transformed back, finished, then stored where they belong")
    finished, sums, products = (sch.get_sblock(name) for name in ("finished", "sum_rows", "products"))
    for block in (finished, sums, products):
        sch.set_scope(block, 0, "local")
    sch.compute_at(finished, fo, preserve_unit_loops=True)
    _lines(sch, finished, sums, config.vector)
    sch.compute_at(products, fo, preserve_unit_loops=True)

    next_step(sch, "Register tiles of the products of each point")
    conv = sch.get_sblock("conv")
    sch.set_scope(conv, 0, "local")
    u, v, row, lanes, *parts = sch.get_loops(products)[-5:] if made.part else sch.get_loops(products)[-4:]
    row, inner = sch.split(row, [None, config.block_rows])
    lanes, vectors, lane = sch.split(lanes, [None, config.block_lanes, config.vector])
    sch.reorder(u, v, row, lanes, *parts, inner, vectors, lane)
    sch.compute_at(conv, parts[0] if parts else lanes, preserve_unit_loops=True)
    if parts:
        accumulate(sch, products, parts[0], (inner, vectors), lane)
    else:
        sch.unroll(inner)
        sch.unroll(vectors)
        sch.vectorize(lane)
    *_, u, v, row, lanes, rc = sch.get_loops(conv)
    vectors, lane = sch.split(lanes, [None, config.vector])
    sch.reorder(rc, row, vectors, lane)
    accumulate(sch, conv, rc, (row, vectors), lane)

    next_step(sch, f"The task's data, transformed into its cache: lanes are {made.lanes}")
    points, rows, pixels = (sch.get_sblock(name) for name in ("data_points", "data_rows", "pixels"))
    for block in (points, rows, pixels):
        sch.set_scope(block, 0, "local")
    sch.compute_at(points, task, preserve_unit_loops=True)
    width = widest_vector(p.ci, config.vector) if inside else config.vector
    at = _lines(sch, points, rows, width)
    sch.compute_at(pixels, at, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops(pixels)[-1])
    where = "by the task that reads them" if made.owned else "once"
    next_step(sch, f"The filters, transformed {where} and packed: the channels of a register tile side by side")
    filters, rows = sch.get_sblock("filter_points"), sch.get_sblock("filter_rows")
    lay = (lambda u, v, f, c: [f // panel, u, v, c, f % panel]) if inside else (
        lambda u, v, c, f: [f // panel, u, v, c, f % panel]
    )  # fmt: skip
    sch.transform_layout(filters, ("write", 0), lay)
    if made.owned:
        sch.set_scope(filters, 0, "local")
        sch.compute_at(filters, fo, preserve_unit_loops=True)
    u, v, *sides = sch.get_loops(filters)[-4:]
    f, c = sides if inside else sides[::-1]
    f, lane = sch.split(f, [None, panel])
    side = widest_vector(p.ci, config.vector)
    block, c = sch.split(c, [None, side])
    sch.reorder(f, block, c, u, v, lane)
    if not made.owned:
        sch.parallel(f)
    sch.unroll(v)
    sch.vectorize(lane)
    sch.set_scope(rows, 0, "local")
    sch.compute_at(rows, c, preserve_unit_loops=True)
    u, taps, *sides = sch.get_loops(rows)[-4:]
    sch.reorder(taps, u, *sides)
    sch.unroll(u)
    sch.vectorize(sides[0] if inside else sides[1])
    if p.filter_axes[0] == "co":
        _brought_together(sch, rows, block, config.vector, widest_vector(p.kh * p.kw * side, config.vector))
    return register_tile.streamed(sch, output, config.streaming, config.vector)


def _brought_together(sch: Schedule, rows: SBlockRV, block: LoopRV, vector: int, run: int) -> None:
    """The filters that `rows` reads in a step of the loop `block`, output channels side by side, turned a vector of
    them by a `run` of elements at a time: read one by one, those that lie a power of two apart drive each other out of
    the nearest cache."""
    near = sch.cache_read(rows, 0, "local")
    sch.compute_at(near, block, preserve_unit_loops=True)
    sch.transform_layout(near, ("write", 0), lambda f, *at: [*at, f])
    f, *along = sch.get_loops(near)[-4:]
    f, each = sch.split(f, [None, vector])
    along, line = sch.split(sch.fuse(*along), [None, run])
    sch.reorder(f, along, each, line)


def _lines(sch: Schedule, last: SBlockRV, first: SBlockRV, width: int) -> LoopRV:
    """Compute `last`, and within it `first`, the transform along one axis, for a vector of the innermost axis at a
    time; returns the loop over those."""
    line, across, other, inner = sch.get_loops(last)[-4:]
    inner, lane = sch.split(inner, [None, width])
    sch.reorder(other, inner, line, across, lane)
    sch.unroll(across)
    sch.vectorize(lane)
    sch.compute_at(first, inner, preserve_unit_loops=True)
    down, line, other, lane = sch.get_loops(first)[-4:]
    sch.reorder(line, down, other, lane)
    sch.unroll(down)
    sch.vectorize(lane)
    return inner


# cycles, about, fitted to layers of stride 1 and 2 on a core with AVX-512: of an element of a packed filter, less where
# it stays with its task, and least where its taps lie side by side; of an input of a tile and of an output, copied and
# transformed in vectors or one by one, or from channels that drive each other out of the nearest cache, which was
# measured where that has twelve ways
FILTERED, FILTERED_NEAR, FILTERED_TAPS = 2.2, 1.05, 0.8
READ, READ_ALONE, READ_CROWDED, WRITTEN, WRITTEN_ALONE = 1.3, 1.6, 2.2, 2.7, 3.5
NEAR = 384 * KIB  # bytes of a task that are as near as can be
BEYOND = 4.0  # times that products take whose data are in no cache
# of what tiles of direct products take, whose sums are longer; and elements of packed filters that a core reads in a
# cycle, from a cache of its own, the shared one and from beyond, where a SHARE of that is what the rest leaves to them
MULTIPLIED = 0.9
STREAMED, STREAMED_SHARED, STREAMED_BEYOND = 6.5, 3.0, 2.3
SHARE = 1 / 2


def _reach(cores: int) -> Sequence[tuple[int, float]]:
    """Bytes that a task may keep, and how many times longer its products then take than from the nearest cache."""
    return (NEAR, 1.0), (4 * NEAR, 1.06), (int(last_level_cache() * SHARE) // cores, 1.5)


def _near() -> int:
    """Bytes of the caches that a core has to itself."""
    return 4 * NEAR


def _streamed(filters: int) -> float:
    """Elements in a cycle of packed filters of so many bytes."""
    if filters <= _near():
        return STREAMED
    return STREAMED_BEYOND if beyond_caches(filters, SHARE) else STREAMED_SHARED


@lru_cache
def default(problem: Conv2dProblem, arch: Arch) -> WinogradCpuConfig:
    """The cut, the register tile and the task with the least estimated time."""
    p = problem
    found = [
        WinogradCpuConfig(tile_h=tile_h, tile_w=tile_w)
        for tile_h, tile_w in cuts(p, part(p.ci))
        if not set("+5") & set(tile_h + tile_w)  # transforms of 5, without a zero, take longer than READ says
    ]
    legal = [config for config in found if config.check(p, arch) is None]
    if not legal:
        return WinogradCpuConfig()
    tasks = (config for cut in legal for config in _tasks(cut, p, arch))
    return register_tile.past_caches(min(tasks, key=lambda config: cycles(config, p, arch)), p, arch)


def _tasks(cut: WinogradCpuConfig, problem: Conv2dProblem, arch: Arch) -> Iterator[WinogradCpuConfig]:
    """Register tiles that waste least for `cut`, and tasks of them."""
    unit, made = vector_unit(arch), cut.graph(problem)
    tiles = [
        replace(cut, vector=unit.lanes, block_lanes=lanes, block_rows=rows)
        for lanes, rows in product(LANES, ROWS)
        if register_tile.fits(unit, lanes * rows, lanes)
    ]
    tiles.sort(key=lambda config: _products(config, problem, arch))
    for config in tiles[:3]:
        panel, column = config.block(made.channels_inside)
        counts = register_tile.shares(-(-made.tiles // column))
        for columns, chunk in product(counts, (0, -(-problem.co // panel // physical_cores()))):
            yield replace(config, columns=columns, chunk=chunk)


def _products(config: WinogradCpuConfig, problem: Conv2dProblem, arch: Arch) -> float:
    """Cycles of the products of all points."""
    p, made, unit = problem, config.graph(problem), vector_unit(arch)
    panel, column = config.block(made.channels_inside)
    step = register_tile.step_cycles(unit, config.vector, config.block_lanes, config.block_rows)
    tiles = -(-p.co // panel) * -(-made.tiles // column) * made.rows.points * made.columns.points
    parts = 1 + (p.ci // made.part if made.part else 0)
    stored = parts * register_tile.STORED * config.block_lanes * config.block_rows
    return MULTIPLIED * tiles * register_tile.tile_cycles(unit, p.ci * step, stored)


def cycles(config: WinogradCpuConfig, problem: Conv2dProblem, arch: Arch) -> float:
    """About what the busiest core takes."""
    p, made, cores = problem, config.graph(problem), physical_cores()
    inside = made.channels_inside
    panel, column = config.block(inside)
    share = made.tile[1]
    panels = -(-p.co // panel)
    of_task = min(config.chunk or panels, panels)
    chunks, parts = -(-made.tiles // share), -(-panels // of_task)
    points, reach = made.rows.points * made.columns.points, made.rows.reach * made.columns.reach
    read, written = READ, WRITTEN
    if made.turned:
        apart = p.n if made.images_inside else p.h * p.w  # elements from channel to channel
        read = READ_CROWDED if register_tile.crowded(config.vector, 4 * apart) else READ_ALONE
        written = WRITTEN_ALONE
    data = share * p.ci * reach * read
    period = made.rows.period * made.columns.period
    back = share * of_task * panel * period * written
    whole = _products(config, p, arch) * (chunks * share) / round_up(made.tiles, column)
    kept = points * p.ci * share * 4
    farther = next((times for most, times in _reach(cores) if kept <= most), BEYOND)
    filters = points * p.ci * of_task * panel / _streamed(4 * points * p.ci * panels * panel)
    each = data + back + whole * farther / (chunks * panels) * of_task + filters + register_tile.STARTED
    packed = len(made.rows.filter) * len(made.columns.filter) * p.ci * panel
    if made.owned:
        near = FILTERED_NEAR if p.filter_axes[-1] in ("ci", "co") else FILTERED_TAPS
        return -(-parts // cores) * (each + of_task * packed * near)
    return panels * packed * FILTERED / min(cores, panels) + -(-chunks * parts // cores) * each


def pays(problem: Conv2dProblem, arch: Arch, direct: Callable[[Any, Arch], tuple[float, Config]]) -> bool:
    """Whether it is estimated to take fewer cycles than `direct` products say of themselves."""
    best = default(problem, arch)
    return best.check(problem, arch) is None and cycles(best, problem, arch) < direct(problem, arch)[0]


def space(problem: Conv2dProblem, arch: Arch) -> Iterator[WinogradCpuConfig]:
    """The default, and register tiles and tasks for every cut of one or two tiles."""
    p, best = problem, default(problem, arch)
    found = [best]
    for tile_h, tile_w in cuts(p, part(p.ci)):
        cut = replace(best, tile_h=tile_h, tile_w=tile_w)
        if tile_h.count("+") + tile_w.count("+") <= 1 and cut.check(p, arch) is None:
            found += _tasks(cut, p, arch)
    yield from dict.fromkeys(found)


SCHEDULE = ScheduleSpec(
    name="winograd_cpu",
    summary="float32 with fewer products: Winograd's tiles in vector lanes, transformed in cache",
    kinds=("llvm",),
    config=WinogradCpuConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
