"""NCHW convolution on Hopper of any stride and width: pixels x output channels by wgmma, turned inside the block.

TMA reads NCHW data only where image rows are whole 16 bytes apart, and unshifted.  Here the producer's threads turn
what a tile looks at on its way into shared memory (`hopper.spans`), as runs of the line of `Positions`: of each chunk
of the channels once for all taps of a row of the kernel, or with `halo` of all of its rows.  No copy of the data comes
before.  Filters come by TMA, packed by a kernel before unless they are of 1x1.  Results leave as those of
`tma_wgmma_turned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace
from schedules.core.tvm import tirx
from schedules.hopper.config import DEPTHS, TURNING, blocks, plain, stage_channels, work_of
from schedules.hopper.geometry import Load, Operand, Product
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import SharedTile
from schedules.hopper.spans import WARP, Spans
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import (
    ITEM,
    PositionPlace,
    PositionWork,
    SectorsConfig,
    check_own_pixels,
    sector_tiles,
    shapes_of,
)
from schedules.operators.conv2d_nchw.positions import Positions, simplest
from schedules.operators.conv2d_nchw.repack import repack
from schedules.operators.conv2d_nchw.tma_wgmma_turned import lines_of
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named


@dataclass(frozen=True)
class TmaWgmmaSpansConfig(SectorsConfig):
    """Tiles of (pixels, output channels, input channels)."""

    k_steps = (2, 4, 8)  # each warp of the producer has groups of eight channels of its own
    registers = TURNING
    row_of_taps = True

    # positions are those of all images' rows after the other, with no zeros below an image; else image after image
    lines_outside: bool = False
    # a stage has what all rows of the kernel look at; else one of them
    halo: bool = False

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch) or check_own_pixels(problem, self)
        reason = reason or self.check_sectors(Positions(simplest(problem), self.lines_outside))
        if reason:
            return reason
        if self.halo and simplest(problem).kh == 1:
            return f"halo={self.halo} is for kernels of several rows"
        work: SpansWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> SpansWork:
        return SpansWork(problem, self)


@dataclass(frozen=True)
class Span:
    """Rows of operand a, from `row` on: `rows` positions of the plane of the remainders (`y`, `x`), the first of them
    `moved` from the tile's.  Where `y` is None, both are to be added of a row of the kernel."""

    row: int
    rows: int
    y: int | None
    x: int
    moved: int
    end: int  # row of the next


class SpansWork(PositionWork):
    config: TmaWgmmaSpansConfig

    def __init__(self, problem: NchwProblem, config: TmaWgmmaSpansConfig) -> None:
        p = simplest(problem)
        super().__init__(p, config, Positions(p, config.lines_outside), p.kh * p.kw if config.halo else p.kw)
        self.arguments = problem.arguments()
        taps, plane = self._taps(), p.h * p.w
        self.spans: dict[tuple[int | None, int], Span] = {}
        neighbours, planes = self._neighbours(), self._planes()
        each = 2 if neighbours else 1
        row, keys = 0, dict.fromkeys((y, x) for y, x, _ in taps)
        # of two planes whose pixels are loaded at once all spans of one come first, and spans are alike
        for y, x in sorted(keys, key=lambda key: key[1]) if planes else keys:
            moves = [moved for by, bx, moved in taps if by == y and (planes or bx == x)]
            first = min(moves) // each * each
            rows = config.block_m + max(moves) - first
            end = row + -(-rows // (each * WARP)) * (each * WARP)
            self.spans[y, x] = Span(row, rows, y, x, first, end)
            row = end
        pairs = 1 if neighbours else row // 2 if planes else 0
        tile = SharedTile(row, config.block_k, ITEM, self.run)
        assert config.shares
        registers = config.shares[0] or 255
        spans = Spans("data", p.n * p.ci * plane, p.ci, plane, row, config.block_k, registers, pairs, config.num_stages)
        self.a = Operand(tile, spans)
        self.products = tuple(
            Product(0, (span.row + moved - span.moved) * tile.swizzle, number * self.b.tile.nbytes)
            for number, (y, x, moved) in enumerate(taps)
            for span in [self.spans[y, x]]
        )

    def _neighbours(self) -> bool:
        """Whether neighbours of every second position on share an aligned word, whatever the channel."""
        p, x = self.problem, self.positions.x
        return x.stride == 1 and p.w % 2 == x.length % 2 == 0

    def _planes(self) -> bool:
        """Whether pixels of a position in two planes along a row do, at a stride of 2."""
        return self.positions.x.planes == 2 and self.problem.w % 2 == 0

    def _taps(self) -> list[tuple[int | None, int, int]]:
        """Of each tap of a stage: the remainders of what it looks at, and how far that is from the tile's positions;
        along a row alone if a stage has but one row of the kernel."""
        y, x = self.positions.y, self.positions.x
        across = [divmod(rx * x.dilation - x.pad, x.stride) for rx in range(x.k)]
        if not self.config.halo:
            return [(None, remainder, moved) for moved, remainder in across]
        down = [divmod(ry * y.dilation - y.pad, y.stride) for ry in range(y.k)]
        return [(by, bx, my * self.positions.down + mx) for my, by in down for mx, bx in across]

    def pixel_at(self, place: PositionPlace, ry: Expr, row: int, more: Expr) -> tuple[Expr, Expr]:
        p, positions = self.problem, self.positions
        (span,) = (each for each in self.spans.values() if each.row <= row < each.end)
        before = row - span.row
        first, remainder = place.position + (span.moved + before), span.y
        if remainder is None:
            plane, down = positions.y.tap(ry if p.kh > 1 else 0)
            first = named("first", first + down * positions.down)
            remainder = plane if positions.y.planes > 1 else next(iter(positions.y.moves))
        at = named("at", first + more)
        n, y, x = (named("at", value) for value in positions.pixel(at))
        y, x = named("y", y * p.stride[0] + remainder), named("x", x * p.stride[1] + span.x)
        exists = [at >= 0, n < p.n, y < p.h, x < p.w]
        if span.end > span.row + span.rows:
            exists.append(more < span.rows - before)
        return n * (p.ci * p.h * p.w) + y * p.w + x, tirx.all(*exists)

    def loads_a(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        raise NotImplementedError("its pixels come by no tensor map")


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaSpansConfig:
    return plain(TmaWgmmaSpansConfig(block_k=stage_channels(simplest(problem).ci, 64, 32)), problem, arch)


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaSpansConfig]:
    halos = [dict(), dict(halo=True)] if simplest(problem).kh > 1 else [dict()]
    shapes = shapes_of(Positions(simplest(problem), lines_outside=False), arch)
    return ProductSpace(
        TmaWgmmaSpansConfig,
        blocks(problem.dtype, arch.device, shapes, filters=True, own_pixels=True),
        lines_of(problem),
        halos,
        sector_tiles(problem),
        DEPTHS,
    )


SCHEDULE = tma_schedule(
    "tma_wgmma_spans",
    "implicit GEMM on Hopper from data turned in the block: any stride and width, TMA, wgmma, persistent",
    TmaWgmmaSpansConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    reason="some warps turn what they load into the shared memory that others multiply from by wgmma; "
    "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters",
    more=lambda problem, work: dict(prepare=partial(repack, work.problem)),
)
