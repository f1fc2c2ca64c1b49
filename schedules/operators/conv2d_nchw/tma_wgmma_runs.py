"""NCHW convolution on Hopper of any width: pixels x output channels by wgmma, from runs of pixels turned in the block.

As `tma_wgmma_boxes`, but that TMA brings runs of whole image rows (`hopper.runs`), and tiles are positions of the line
of all images (`Positions`), so that narrow images fill them: what `tma_wgmma_spans` loads pixel by pixel.  Results
leave as those of `tma_wgmma_turned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product

import numpy as np

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace, axis
from schedules.core.tvm import T, tirx
from schedules.hopper.boxes import GROUP, ITEM, WARP, Pixel, in_parts, one_of
from schedules.hopper.config import DEPTHS, HopperConfig, blocks, work_of
from schedules.hopper.geometry import Load
from schedules.hopper.runs import Classes, TurnedRuns
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import LONGEST_BOX, UNIT, SharedTile, TensorMap
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import (
    LINE,
    PositionPlace,
    PositionWork,
    SectorsConfig,
    check_own_pixels,
    sector_tiles,
    shapes_of,
)
from schedules.operators.conv2d_nchw.positions import Axis, Positions, simplest
from schedules.operators.conv2d_nchw.repack import repack
from schedules.operators.conv2d_nchw.tma_wgmma_boxes import TmaWgmmaBoxesConfig, pairs, small, steps
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named


@dataclass(frozen=True)
class TmaWgmmaRunsConfig(SectorsConfig, TmaWgmmaBoxesConfig):
    """Tiles of (pixels, output channels, input channels)."""

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        p = simplest(problem)
        return super().unfit(problem, arch) or Classes(p.h * p.w).reason(p.ci)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_pairs() or self.check_block(problem.dtype, arch)
        reason = reason or check_own_pixels(problem, self)
        reason = reason or self.check_sectors(Positions(simplest(problem), lines_outside=False))
        if reason:
            return reason
        work: RunWork = work_of(problem, self)
        return work.runs.reason() or work.reason(arch)

    def work(self, problem: NchwProblem) -> RunWork:  # type: ignore[override]
        return RunWork(problem, self)


@dataclass(frozen=True)
class RunLayout:
    """What `pixels` positions look at, as rows of operand a: of each remainder of x, and each of y, a span of the line
    of `positions`, `span` rows each, and what of it TMA brings."""

    positions: Positions
    pixels: int

    @property
    def axes(self) -> tuple[Axis, Axis]:
        return self.positions.y, self.positions.x

    @cached_property
    def reach(self) -> int:
        """Positions from the first that a tap of a remainder looks at to the last."""
        y, x = (max(max(moves) - min(moves) for moves in axis.moves.values()) for axis in self.axes)
        return y * self.positions.down + x

    @property
    def span(self) -> int:
        return -(-(self.pixels + self.reach) // WARP) * WARP

    @property
    def rows(self) -> int:
        y, x = self.axes
        return len(y.moves) * len(x.moves) * self.span

    @cached_property
    def firsts(self) -> Sequence[tuple[int, int, int]]:
        """Of each span the remainders, and how far its first position is from the tile's."""
        y, x = self.axes
        return [
            (by, bx, min(y.moves[by]) * self.positions.down + min(x.moves[bx])) for bx, by in product(x.moves, y.moves)
        ]

    def moved_down(self, ry: int) -> int:
        y, _ = self.axes
        moved, remainder = divmod(ry * y.dilation - y.pad, y.stride)
        return list(y.moves).index(remainder) * self.span + (moved - min(y.moves[remainder])) * self.positions.down

    def moved_across(self, rx: int) -> int:
        y, x = self.axes
        moved, remainder = divmod(rx * x.dilation - x.pad, x.stride)
        return list(x.moves).index(remainder) * len(y.moves) * self.span + moved - min(x.moves[remainder])

    @cached_property
    def first(self) -> int:
        """The first position that is looked at, from the tile's."""
        return min(first for *_, first in self.firsts)

    @cached_property
    def count(self) -> int:
        """Positions from there to the last."""
        return max(first for *_, first in self.firsts) + self.pixels + self.reach - self.first

    @property
    def plane(self) -> int:
        return self.positions.problem.h * self.positions.problem.w

    @property
    def of_image(self) -> int:
        """Positions of an image."""
        return self.positions.lines * self.positions.x.length

    @property
    def images(self) -> int:
        """That a tile may look at."""
        return min(self.positions.problem.n, (self.count + self.of_image - 2) // self.of_image + 1)

    @cached_property
    def longest(self) -> int:
        """Pixels of an image from the first that a tile looks at to the last, at most."""
        p, (y, x) = self.positions.problem, self.axes
        begin = np.arange(x.length)
        line, last = np.divmod(begin + self.count - 1, x.length)
        end = (line * y.stride + max(y.moves)) * p.w + np.minimum(last * x.stride + max(x.moves), p.w - 1)
        return min(int((end + 1 - np.minimum(begin * x.stride, p.w)).max()), self.plane)

    @cached_property
    def whole(self) -> bool:
        """Whether TMA brings whole planes of all images at once."""
        late = Classes(self.plane).latest
        return self.longest == self.plane and -(-(self.plane + late) // GROUP) * GROUP <= LONGEST_BOX

    @property
    def run(self) -> int:
        """Pixels of a box, in whole 16 bytes: with those before its first, and as many as any class begins late."""
        before = 0 if self.whole else GROUP - 1
        return -(-(self.longest + before + Classes(self.plane).latest) // GROUP) * GROUP

    def source(self, channels: int, taps: int) -> TurnedRuns:
        """Operand a in chunks of so many `channels`, each for stages of so many `taps`."""
        p, classes = self.positions.problem, Classes(self.plane)
        y, x = self.axes
        tile = SharedTile(self.rows, channels, ITEM, min(channels, LINE // ITEM))
        down = tuple(map(self.moved_down, range(y.k)))
        across = tuple(map(self.moved_across, range(x.k)))

        def runs(together: int) -> TurnedRuns:
            boxes = TensorMap(
                "data",
                p.dtype,
                (classes.count * self.plane, p.ci // classes.count, p.n),
                (classes.count * self.plane * ITEM, p.ci * self.plane * ITEM),
                (self.run, together // classes.count, self.images if self.whole else 1),
                (1, 1, 1),
                UNIT,
            )
            return TurnedRuns(boxes, tile, together, taps, classes, self.images, self.whole, down, across)

        return in_parts(runs, channels)


@lru_cache(maxsize=4096)
def layout_of(problem: NchwProblem, pixels: int) -> RunLayout:
    """What tiles of so many `pixels` of `problem`, (n, ci, h, w), look at."""
    return RunLayout(Positions(simplest(problem), lines_outside=False), pixels)


class RunWork(PositionWork):
    config: TmaWgmmaRunsConfig

    def __init__(self, problem: NchwProblem, config: TmaWgmmaRunsConfig) -> None:
        self.layout = layout_of(problem, config.block_m)
        p = self.layout.positions.problem
        taps = p.kw if config.row else 1
        super().__init__(p, config, self.layout.positions, taps)
        self.arguments = problem.arguments()
        self.runs = self.layout.source(config.block_k, taps)
        self.turn(self.runs)

    def starts(self, place: PositionPlace) -> tuple[Expr, Expr, Expr]:
        """Of what a tile looks at, the first image, where in its planes that begins, and the last image."""
        p, layout = self.problem, self.layout
        first = named("first_position", tirx.max(place.position + layout.first, 0))
        n, y, x = layout.positions.pixel(first)
        n = named("first_image", n)
        begin = y * (p.stride[0] * p.w) + tirx.min(x * p.stride[1], p.w)
        begin = T.int32(0) if layout.whole else named("begin", T.truncdiv(begin, GROUP) * GROUP)
        last = place.position + (layout.first + layout.count - 1)
        return n, begin, named("last_image", tirx.min(T.truncdiv(last, layout.of_image), p.n - 1))

    def loads_a(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        """The boxes of arrival number `chunk` of the channels."""
        source, classes = self.runs, self.runs.classes
        first, begin, last = self.starts(place)
        channel = chunk * source.source.box[1]
        loads = []
        for number, image in product(range(classes.count), range(1 if source.whole else source.images)):
            offset = number * source.class_bytes + image * source.image_bytes
            at = classes.begin(number) + (begin if image == 0 else 0), channel, first + image
            loads.append(Load(offset, at, first + image <= last if image else None))
        return loads

    def pixels_of_runs(self, place: PositionPlace) -> Pixel:
        p, layout, source = self.problem, self.layout, self.runs
        image, begin, _ = self.starts(place)

        def pixel(row: Index, more: Expr) -> tuple[Expr, Expr]:
            each = layout.span
            span, before = divmod(row, each) if isinstance(row, int) else (T.truncdiv(row, each), T.truncmod(row, each))
            by, bx, first = (one_of(span, values) for values in zip(*layout.firsts, strict=True))
            at = named("at", place.position + (first + before) + more)
            n, y, x = (named("at", value) for value in layout.positions.pixel(at))
            y, x = named("y", y * p.stride[0] + by), named("x", x * p.stride[1] + bx)
            exists = tirx.all(at >= 0, n < p.n, y < p.h, x < p.w)
            start = T.Select(n == image, begin, T.int32(0))
            return (n - image) * source.image_bytes + (y * p.w + x - start) * ITEM, exists

        return pixel

    def loads_b(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        return self.turned_filters(place.channel, chunk, part)


def turned(problem: NchwProblem, pixels: int, channels: int) -> tuple[int, int] | None:
    """Of tiles of as many `pixels` and `channels` the bytes of shared memory in which they are turned, and those that
    come from L2 for a channel; None if TMA does not bring what they look at."""
    source = layout_of(problem, pixels).source(channels, 1)
    return None if source.reason() else (source.beside_stages, source.loaded_bytes)


def default(problem: NchwProblem, arch: Arch) -> HopperConfig:
    return small(TmaWgmmaRunsConfig, problem, arch)


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaRunsConfig]:
    p = problem
    shapes = shapes_of(Positions(simplest(p), lines_outside=False), arch)
    words = blocks(p.dtype, arch.device, shapes, True, True, steps(p))
    rows = axis("row", (True, False) if simplest(p).kw > 1 else (True,))
    return ProductSpace(TmaWgmmaRunsConfig, words, rows, pairs(p), sector_tiles(p), DEPTHS)


SCHEDULE = tma_schedule(
    "tma_wgmma_runs",
    "implicit GEMM on Hopper from runs of rows turned in shared memory: any stride and width, TMA, wgmma, persistent",
    TmaWgmmaRunsConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    reason="some warps turn in shared memory what TMA brings while others multiply it by wgmma; "
    "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters",
    more=lambda problem, work: dict(prepare=partial(repack, work.problem)),
    turned=turned,
)
