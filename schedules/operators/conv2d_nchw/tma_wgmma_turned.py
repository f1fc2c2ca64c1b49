"""NCHW convolution on Hopper of any stride and width: pixels x output channels by TMA and wgmma, from a turned copy.

TMA reads NCHW data only where image rows are whole 16 bytes apart, and unshifted.  Here a kernel before copies them
into workspace, channels last, in a line of which every tap is a run (`positions`, `turn`): it moves the input's bytes
twice, mostly within L2, and the product has tiles that are never ragged but at its end.  The results wait in shared
memory with the pixels of a channel side by side, and leave in vectors.  What is such a line as it lies is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from schedules.core.arch import Arch
from schedules.core.problem import Argument
from schedules.core.space import ProductSpace
from schedules.hopper.config import DEPTHS, HopperConfig, blocks, plain, stage_channels, work_of
from schedules.hopper.geometry import Load, Operand
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import SharedTile, TensorMap, beyond_indices
from schedules.hopper.split import addends_of, split
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import (
    ITEM,
    PositionPlace,
    PositionWork,
    SectorsConfig,
    check_shared_filters,
    filter_operand,
    sector_tiles,
    shapes_of,
)
from schedules.operators.conv2d_nchw.positions import Positions, gathered, simplest
from schedules.operators.conv2d_nchw.turn import turn
from schedules.tirx.types import Expr, Index


@dataclass(frozen=True)
class TurnedConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    gathered = False

    # the copy has a line of all images after the other, with no zeros below an image; else image after image
    lines_outside: bool = False

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch) or check_shared_filters(self)
        if reason:
            return reason
        if self.gathered:
            if self.lines_outside:
                return f"gathered={self.gathered} has no zeros between lines, lines_outside must be false"
            if problem.packed or problem.kh * problem.kw == 1:
                return f"gathered={self.gathered} is for filters of several taps as they lie, (co, ci, kh, kw)"
        for argument in problem.arguments():
            reason = beyond_indices(argument.name, math.prod(argument.shape))
            if reason:
                return reason
        work: TurnedWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> TurnedWork:
        return TurnedWork(problem, self)


@dataclass(frozen=True)
class TmaWgmmaTurnedConfig(SectorsConfig, TurnedConfig):
    """The same, of operands as they are given."""

    # the copy has all that an output looks at, in the filter's order, so that filters are taken as they lie
    gathered: bool = False

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        p = gathered(problem) if self.gathered else simplest(problem)
        return self.check_sectors(Positions(p, self.lines_outside)) or super().check(problem, arch)


class TurnedWork(PositionWork):
    config: TurnedConfig

    def __init__(self, problem: NchwProblem, config: TurnedConfig) -> None:
        p = gathered(problem) if config.gathered else simplest(problem)
        positions = Positions(p, config.lines_outside)
        super().__init__(p, config, positions)
        self.arguments = problem.arguments()
        shape = positions.planes, positions.data, positions.channels
        turned = Argument("turned", shape, p.dtype)
        if config.addends > 1:
            turned = addends_of("data", shape)
        elif positions.as_they_lie and not config.gathered:
            turned = Argument("data", shape, p.dtype)
        else:
            self.workspace = (turned, *self.workspace)
        a = SharedTile(config.block_m, config.block_k, ITEM, self.run)
        line = positions.channels * ITEM
        self.a = Operand(
            a,
            TensorMap(
                turned.name,
                turned.dtype,
                (positions.channels, positions.data, positions.planes),
                (line, positions.data * line),
                (self.run, config.block_m // config.cluster_n, 1),
                (1, 1, 1),
                a.swizzle,
            ),
        )
        if config.addends > 1:
            split(self, turned, filter_operand(p, config))

    def loads_a(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.a.tile, self.config.block_m // self.config.cluster_n
        plane, moved = self.positions.of_tap(ry, rx)
        at = place.position + moved + part * rows
        return [
            Load(part * (rows * tile.swizzle) + run * tile.slab, (chunk * tile.k + run * tile.run, at, plane))
            for run in range(tile.k // tile.run)
        ]


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaTurnedConfig:
    return plain(TmaWgmmaTurnedConfig(block_k=stage_channels(problem.ci, 64, 16)), problem, arch)


def lines_of(problem: NchwProblem) -> list[dict[str, bool]]:
    """Fields of the orders of lines worth trying: without zeros between them these are best stored as images."""
    dense = Positions(simplest(problem), lines_outside=False).dense
    return [dict()] if dense else [dict(), dict(lines_outside=True)]


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaTurnedConfig]:
    p, lines = simplest(problem), lines_of(problem)
    ways = (Positions(way, lines_outside=False) for way in (p, gathered(p)))
    shapes = [shape for positions in ways for shape in shapes_of(positions, arch)]
    return ProductSpace(
        TmaWgmmaTurnedConfig,
        blocks(problem.dtype, arch.device, tuple(dict.fromkeys(shapes)), filters=True),
        [*lines, dict(gathered=True)] if problem.kh * problem.kw > 1 else lines,
        sector_tiles(problem),
        DEPTHS,
    )


SCHEDULE = tma_schedule(
    "tma_wgmma_turned",
    "implicit GEMM on Hopper from a turned copy of the data: any stride and width, TMA, wgmma, persistent",
    TmaWgmmaTurnedConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    more=lambda problem, work: dict(prepare=partial(turn, problem, work.positions, gather=work.config.gathered)),
)
