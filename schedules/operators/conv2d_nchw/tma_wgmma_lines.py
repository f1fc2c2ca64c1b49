"""NCHW convolution on Hopper from the data as they lie, of any stride and width: pixels x output channels by wgmma.

TMA reads NCHW data only where image rows are whole 16 bytes apart, and unshifted.  Here threads copy the lines that a
tile looks at into shared memory, once for all taps of a row of the kernel, and others read each pixel of a tap there,
wherever it stands (`hopper.lines`): no copy of the data comes before, and with a stride only rows that are looked at
are read.  Filters come by TMA, packed by a kernel before unless they are of 1x1.  Results leave as those of
`tma_wgmma_turned`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace
from schedules.hopper.config import COPYING, DEPTHS, WARPGROUP, blocks, plain, stage_channels, work_of
from schedules.hopper.geometry import Load, Operand
from schedules.hopper.lines import Lines, why_no_lines
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import SharedTile
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
from schedules.operators.conv2d_nchw.positions import Positions, gathered, simplest
from schedules.operators.conv2d_nchw.repack import repack
from schedules.tirx.types import Expr, Index


@dataclass(frozen=True)
class TmaWgmmaLinesConfig(SectorsConfig):
    """Tiles of (pixels, output channels, input channels)."""

    by_threads = True
    k_steps = (2, 4, 8)  # two sets of fragments take turns
    registers = COPYING

    @property
    def fragments(self) -> int:
        """Registers of a thread for operand a, words of two numbers."""
        return self.rows * self.block_k // WARPGROUP // 2

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        return super().unfit(problem, arch) or why_no_lines(simplest(problem))

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch)
        reason = reason or self.check_sectors(Positions(gathered(simplest(problem)), lines_outside=False))
        # fragments are of a tile that is whole
        reason = reason or self.check_block(problem.dtype, arch, more=self.fragments) or check_own_pixels(problem, self)
        if reason:
            return reason
        work: LinesWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> LinesWork:
        return LinesWork(problem, self)


class LinesWork(PositionWork):
    in_order = False

    def __init__(self, problem: NchwProblem, config: TmaWgmmaLinesConfig) -> None:
        p = simplest(problem)
        super().__init__(p, config, Positions(gathered(p), lines_outside=False), p.kw)
        self.arguments = problem.arguments()
        tile = SharedTile(config.block_m, config.block_k, ITEM, config.block_m, transposed=True)
        self.a = Operand(tile, Lines("data", p, config.block_m, config.block_k), by_registers=True)

    def position_at(self, place: PositionPlace) -> Expr:
        return place.position

    def loads_a(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        raise NotImplementedError("its pixels come by no tensor map")


def stage_bytes(problem: NchwProblem, pixels: int, channels: int) -> int:
    """Of what so many `pixels` and `channels` look at."""
    return Lines("data", simplest(problem), pixels, channels).nbytes


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaLinesConfig:
    return plain(TmaWgmmaLinesConfig(block_k=stage_channels(simplest(problem).ci, 64, 32)), problem, arch)


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaLinesConfig]:
    p = gathered(simplest(problem))
    shapes = shapes_of(Positions(p, lines_outside=False), arch)
    words = blocks(p.dtype, arch.device, shapes, filters=True, own_pixels=True)
    return ProductSpace(TmaWgmmaLinesConfig, words, sector_tiles(p), DEPTHS)


SCHEDULE = tma_schedule(
    "tma_wgmma_lines",
    "implicit GEMM on Hopper from the data as they lie: any stride and width, cp.async, TMA, wgmma, persistent",
    TmaWgmmaLinesConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    reason="some warps copy while others read what they need of it and multiply by wgmma; "
    "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters",
    stage_bytes=stage_bytes,
    more=lambda problem, work: dict(prepare=partial(repack, work.problem)),
)
