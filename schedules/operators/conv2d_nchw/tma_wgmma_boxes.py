"""NCHW convolution on Hopper: pixels x output channels by wgmma, from boxes of rows that are turned once for all taps.

TMA brings what a tile looks at as it lies, the kernel's halo included, padding as zeros; threads turn it in shared
memory, so that a tap is the same rows, moved (`hopper.boxes`).  No copy of the data comes before, and each chunk of
the channels is loaded once; rows that a kernel of one row skips are not.  Image rows that are no whole 16 bytes apart,
as TMA takes them, come one by one, by classes of channels (`hopper.runs`), and threads write the zeros that are
padding.  Strides are any.  Filters come packed, or are packed by a kernel before (`repack`).  Results leave by TMA too,
turned back, or by slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import ClassVar, TypeVar

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace, Words, axis
from schedules.core.tvm import T, tirx
from schedules.hopper.boxes import Along, Layout, Pixel, TurnedBoxes, in_parts, turned_tile
from schedules.hopper.config import (
    DEPTHS,
    SHAPES,
    HopperConfig,
    blocks,
    first_legal,
    fitting,
    plain,
    stage_channels,
    work_of,
)
from schedules.hopper.geometry import Load, Output
from schedules.hopper.lines import beyond, down
from schedules.hopper.pixels import Box, PixelTiles, TilePlace, flattened, is_output, pixel_tiles, place_pixels, whole
from schedules.hopper.runs import MOST_LOADS, Classes, TurnedLines
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import PATTERN, SECTOR, UNIT, Slots, TensorMap, line_staging, slot_staging
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import ITEM, LINE, FilterWork, check_own_pixels
from schedules.operators.conv2d_nchw.repack import repack
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import kept, named

# of a row of operand a the line and the column of its pixel, from the first that the tile looks at, or -1
_PIXEL = """
__device__ __forceinline__ int nchw_pixel_of_box(int row) {{
  static const int pixels[{0}] = {{{1}}};
  return row < {0} ? pixels[row] : -1;
}}
"""
PAIRS = (1, 3)
MOST_TAPS = 7  # that look at a pixel if several pairs are tried, or more if filters are as many times fewer than MANY
MANY = 128
FEW = 64  # channels
MANY_MORE = 1.1  # times as many tiles, whose results leave in whole sectors
# registers where three pairs turn, as `HopperConfig.registers` has them
THREE_PAIRS = {(1, 1): (0, 168), (2, 1): (96, 160)}
VECTOR = UNIT // ITEM  # elements in 16 bytes


@dataclass(frozen=True)
class TmaWgmmaBoxesConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    k_steps = (1, 2, 4)  # each of the two warps that turn has groups of eight channels of its own
    row_of_taps = True
    registers: ClassVar[dict[tuple[int, int], tuple[int, int]]] = {
        (1, 1): (0, 255),
        (1, 2): (88, 168),
        (2, 1): (120, 192),
        (3, 1): (80, 144),
    }

    # a stage has the filters of all taps of a row of the kernel; else of one
    row: bool = True
    pairs: int = 1  # of warps that turn: one beside the loads, or three, of which two have a warpgroup of their own

    @property
    def beside(self) -> int:
        return (self.pairs + 1) // 2

    @property
    def shares(self) -> tuple[int, int] | None:
        return super().shares if self.pairs == 1 else THREE_PAIRS.get((self.consumers, self.blocks_sm))

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        p = flattened(problem, batch=False)
        return super().unfit(problem, arch) or (None if in_rows(p) else Classes(p.h * p.w).reason(p.ci))

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_pairs() or self.check_block(problem.dtype, arch)
        reason = reason or check_own_pixels(problem, self)
        if reason:
            return reason
        work: BoxWork | None = work_of(problem, self)
        if work is None:
            return f"block_m={self.block_m} pixels have no box of an image in lines of whole eights"
        return work.reason(arch)

    def check_pairs(self) -> str | None:
        """Why there are no such warps; None if there are."""
        if self.pairs not in PAIRS:
            return f"pairs={self.pairs} of warps that turn is not {' or '.join(map(str, PAIRS))}"
        if self.pairs > 1 and self.shares is None:
            known = ", ".join(f"{consumers} and {blocks_sm}" for consumers, blocks_sm in THREE_PAIRS)
            return f"pairs={self.pairs} is for consumers and blocks_sm of {known}"
        return None

    def work(self, problem: NchwProblem) -> BoxWork | None:
        tiles = tiles_of(flattened(problem, batch=False), self.block_m, self.parts)
        return BoxWork(problem, self, tiles) if tiles else None


C = TypeVar("C", bound=TmaWgmmaBoxesConfig)


def apart(problem: NchwProblem) -> int:
    """Image rows from one that is loaded to the next: what a kernel of one row skips, nobody looks at."""
    return problem.stride[0] if problem.kh == 1 and problem.pad[0] == 0 else 1


def in_rows(problem: NchwProblem) -> bool:
    """Whether image rows that are loaded are whole 16 bytes apart, and images."""
    return problem.w * math.gcd(apart(problem), problem.h) % VECTOR == 0


def layout_of(problem: NchwProblem, box: Box) -> Layout:
    """What a tile of a `box` of outputs looks at, of the image rows that are loaded."""
    p, (_, h, w) = problem, box
    y, x = (
        Along(size, k, stride, pad, dilation)
        for size, k, stride, pad, dilation in zip((h, w), (p.kh, p.kw), p.stride, p.pad, p.dilation, strict=True)
    )
    return Layout(replace(y, stride=y.stride // apart(p)), x)


@lru_cache(maxsize=4096)
def _cost(layout: Layout) -> float:
    """Of a layout, which many problems have."""
    return layout.cost


@lru_cache(maxsize=4096)
def tiles_of(problem: NchwProblem, pixels: int, parts: int) -> PixelTiles | None:
    """The boxes of `pixels` of an image that waste least at the borders; of equals the cheapest to load and turn, if
    few enough loads bring them, then those whose lines are longest, in which results leave.  Those with lines of half a
    sector only if others are many more.  None if there are none."""
    each = 0 if in_rows(problem) else Classes(problem.h * problem.w).count  # loads of a line

    def cost(box: Box) -> tuple[float, ...]:
        layout = layout_of(problem, box)
        return layout.box[1] * each > MOST_LOADS, _cost(layout), -box[2]

    short, long = (
        pixel_tiles(problem, pixels, (parts,), line=line, prefer=cost, alone=True) for line in (PATTERN, SECTOR // ITEM)
    )
    return long if short and long and long.count <= MANY_MORE * short.count else short


def turned_boxes(problem: NchwProblem, layout: Layout, channels: int, taps: int) -> TurnedBoxes | TurnedLines:
    """Operand a of tiles of `layout`, in chunks of so many `channels`, each for stages of so many `taps`."""
    p, tile = problem, turned_tile(layout, channels, min(channels, LINE // ITEM))
    image, rows = p.h * p.w * ITEM, apart(p)

    def lines(together: int) -> TurnedLines:
        classes, x = Classes(p.h * p.w), layout.x
        units = p.h == 1 and layout.in_units
        # in whole 16 bytes, of which a line begins somewhere in the first, and by as much later as a class may
        before = 0 if units else VECTOR - 1
        run = -(-(x.beyond - x.first + before + classes.latest) // VECTOR) * VECTOR
        source = TensorMap(
            "data",
            p.dtype,
            (classes.count * p.h * p.w, p.ci // classes.count, p.n),
            (classes.count * image, p.ci * image),
            (run, together // classes.count, 1),
            (1, 1, 1),
            UNIT,
        )
        return TurnedLines(source, tile, together, taps, layout, classes, layout.box[1], units)

    def boxes(together: int) -> TurnedBoxes:
        source = TensorMap(
            "data",
            p.dtype,
            (p.w, -(-p.h // rows), p.ci, p.n),
            (rows * p.w * ITEM, image, p.ci * image),
            (*layout.box, together, 1),
            (1, 1, 1, 1),
            UNIT,
        )
        return TurnedBoxes(source, tile, together, taps, layout)

    return in_parts(boxes, channels) if in_rows(p) else in_parts(lines, channels)


class BoxWork(FilterWork[TilePlace]):
    config: TmaWgmmaBoxesConfig

    def __init__(self, problem: NchwProblem, config: TmaWgmmaBoxesConfig, tiles: PixelTiles) -> None:
        p = flattened(problem, batch=False)
        taps = p.kw if config.row else 1
        super().__init__(p, config, taps)
        self.given, self.tiles, self.arguments = problem, tiles, problem.arguments()
        self.layout = layout_of(p, tiles.box)
        self.clusters = whole(tiles.count, config.cluster_m) * self.columns
        self.turn(turned_boxes(p, self.layout, config.block_k, taps))
        self.leave(self._output)

    def _output(self, room: int) -> Output:
        """By TMA where rows of the output are whole 16 bytes too, with so many bytes for results to wait in."""
        p, rows, columns = self.problem, self.config.rows, self.config.block_n // self.slices
        if p.out_w % VECTOR:
            slots = Slots("output", p.pixels * p.co, math.gcd(VECTOR, p.out_w), ragged=False)
            return Output(p.dtype, slot_staging(rows, columns, ITEM), slots)
        staging = line_staging(rows, columns, ITEM, self.tiles.box[2], room)
        image = p.out_h * p.out_w * ITEM
        lines = TensorMap(
            "output",
            p.dtype,
            (p.out_w, p.out_h, p.co, p.n),
            (p.out_w * ITEM, image, p.co * image),
            (staging.run, 1, staging.width, 1),
            (1, 1, 1, 1),
            staging.row_bytes,
            promotion=0,
        )
        return Output(p.dtype, staging, lines)

    def of_images(self, n: Expr) -> BoxWork:
        given = self.given.unchecked(n=n)
        return BoxWork(given, self.config, replace(self.tiles, problem=flattened(given, batch=False)))

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> TilePlace:
        pixel, column = place_pixels(self.tiles, self.columns, (self.config.cluster_m, 1), tile, rank_m, rank_n)
        return TilePlace(pixel, named("channel", column * self.config.block_n))

    def loads_a(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        """The box of arrival number `chunk` of the channels, or each of its lines in each class of them."""
        p, (n, y, x), source = self.problem, place.pixel, self.turned
        if isinstance(source, TurnedLines):
            # not all before the first chunk, for which there are no registers
            starts = [down(kept("line", self._line(place, number))) for number in range(source.lines)]
            channel = chunk * source.source.box[1]
            return [
                Load(
                    line * source.line_bytes + each * source.class_bytes,
                    (starts[line] + source.classes.begin(each), channel, n),
                )
                for line, each in product(range(source.lines), range(source.classes.count))
            ]
        at = x * p.stride[1] - self.layout.left, y * self.layout.y.stride + self.layout.y.first
        return [Load(0, (*at, chunk * source.together, n))]

    def _line(self, place: TilePlace, number: Index) -> Index:
        """Where in its channel's plane a line begins that the tile looks at, also where that is padding."""
        p, (_, y, x) = self.problem, place.pixel
        row = (y * self.layout.y.stride + self.layout.y.first + number) * apart(p)
        return row * p.w + x * p.stride[1] + self.layout.x.first

    def pixels_of_runs(self, place: TilePlace) -> Pixel:
        p, (_, y, x), source, layout = self.problem, place.pixel, self.a.source, self.layout
        assert isinstance(source, TurnedLines)
        rows = [pixel[0] << 16 | pixel[1] if pixel else -1 for pixel in layout.pixels]
        text = _PIXEL.format(len(rows), ", ".join(map(str, rows)))
        top = named("top", y * layout.y.stride + layout.y.first)
        left = named("left", x * p.stride[1] + layout.x.first)

        def pixel(row: Index, more: Expr) -> tuple[Expr, Expr]:
            call = "nchw_pixel_of_box", more + row
            both = named("pixel", T.cuda.func_call(*call, source_code=text, return_type="int32"))
            line, column = T.shift_right(both, T.int32(16)), T.bitwise_and(both, T.int32(0xFFFF))
            at = line * source.line_bytes + (beyond(self._line(place, line)) + column) * ITEM
            at_y, at_x = named("y", (top + line) * apart(p)), named("x", left + column)
            return at, tirx.all(both >= 0, at_y >= 0, at_y < p.h, at_x >= 0, at_x < p.w)

        return pixel

    def loads_b(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        return self.turned_filters(place.channel, chunk, part)

    def store_at(self, place: TilePlace, part: Index, column: Index) -> tuple[Index, ...]:
        raise NotImplementedError("its results leave by lines, or slots")

    def line_at(self, place: TilePlace, part: Index, row: int, column: Index) -> tuple[Index, ...]:
        n, y, x = self.tiles.pixel(place.pixel, T.int32(0) + part * self.config.rows + row)
        return x, y, place.channel + column, n

    def slots_at(self, place: TilePlace, part: Index) -> tuple[Expr, Expr]:
        rows = self.config.rows
        return T.int32(0) + part * rows, (part + 1) * rows

    def slot_of(self, place: TilePlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        return part * self.config.rows + row, is_output(self.problem, self.tiles.pixel(place.pixel, row))

    def slot_in(self, place: TilePlace, number: Expr) -> tuple[Expr, Expr | None]:
        p = self.problem
        n, y, x = pixel = self.tiles.pixel(place.pixel, number)
        return (n * (p.co * p.out_h) + y) * p.out_w + x, is_output(p, pixel)

    def channel_at(self, place: TilePlace, part: Index, index: Expr) -> Expr:
        return self.channel_of(place.channel, index)

    def row_start(self, place: TilePlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        start, inside = self.slot_in(place, part * self.config.rows + row)
        assert inside is not None
        return start, inside

    def column_start(self, place: TilePlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        return self.plane_of(place.channel + column)


def boxes(problem: NchwProblem, pixels: int, blocks: int = 1, _: bool = False) -> int | None:
    """Boxes of as many `pixels` that the output is cut into, for `blocks` at a time; None if there are none."""
    tiles = tiles_of(flattened(problem, batch=False), pixels, 1)
    return -(-tiles.count // blocks) * blocks if tiles else None


def turned(problem: NchwProblem, pixels: int, channels: int) -> tuple[int, int] | None:
    """Of tiles of as many `pixels` and `channels` the bytes of shared memory in which they are turned, and those that
    come from L2 for a channel; None if there are none."""
    p = flattened(problem, batch=False)
    tiles = tiles_of(p, pixels, 1)
    if tiles is None:
        return None
    source = turned_boxes(p, layout_of(p, tiles.box), channels, 1)
    return None if source.reason() else (source.beside_stages, source.loaded_bytes)


def small(kind: type[C], problem: NchwProblem, arch: Arch) -> C:
    """A tile that is legal, with the filters of a row of taps in a stage if there is room for that."""
    ways = ((stage_channels(problem.ci, 64, 32), True), (32, True), (32, False))
    return first_legal((plain(kind(block_k=k, row=row), problem, arch) for k, row in ways), problem, arch)


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaBoxesConfig:
    return small(TmaWgmmaBoxesConfig, problem, arch)


def pairs(problem: NchwProblem) -> tuple[Words, ...]:
    """More than a pair where a chunk is multiplied about as fast as one turns it: few taps look at each pixel, or
    filters are few."""
    taps = problem.kh * problem.kw / math.prod(problem.stride)
    return axis("pairs", PAIRS if taps * min(1, problem.co / MANY) <= MOST_TAPS else PAIRS[:1])


def steps(problem: NchwProblem) -> Sequence[int]:
    """How many wgmma a stage may have: of kernels of several taps one, too, where half of the last 32 channels would be
    zeros, or where channels are so few that all their filters may stay beside a chunk of 16."""
    few, all_steps = problem.ci <= FEW or 0 < problem.ci % 32 <= 16, TmaWgmmaBoxesConfig.k_steps
    return all_steps if few and problem.kh * problem.kw > 1 else all_steps[1:]


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaBoxesConfig]:
    p = problem
    shapes = fitting(lambda m: boxes(p, m) or -(-p.pixels // m), p.co, p.reduction, arch.device)
    rows = axis("row", (True, False) if p.kw > 1 else (True,))
    words = blocks(p.dtype, arch.device, (*SHAPES, *shapes), True, True, steps(p))
    return ProductSpace(TmaWgmmaBoxesConfig, words, rows, pairs(p), DEPTHS)


SCHEDULE = tma_schedule(
    "tma_wgmma_boxes",
    "implicit GEMM on Hopper from boxes of rows turned in shared memory: any stride, TMA, wgmma, persistent",
    TmaWgmmaBoxesConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    reason="some warps turn in shared memory what TMA brings while others multiply it by wgmma; "
    "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters",
    more=lambda problem, work: dict(prepare=partial(repack, work.problem)),
    ranges=True,
    boxes=boxes,
    turned=turned,
)
