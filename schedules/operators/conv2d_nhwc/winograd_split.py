"""NHWC convolution of float32 by Winograd's tiles along rows, as products of bfloat16 addends on Hopper: the kernel of
`tma_wgmma` of the points' tensors, a tile's points side by side; see `hopper.winograd`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.problem import Conv2dProblem
from schedules.core.space import axis
from schedules.core.tvm import tirx
from schedules.hopper import winograd
from schedules.hopper.config import SUM_BYTES
from schedules.hopper.geometry import Output
from schedules.hopper.pixels import PixelTiles, TilePlace, pixel_tiles
from schedules.hopper.schedule import split_schedules
from schedules.hopper.shared import PATTERN, UNIT, Runs, RunStaging, Staging, TensorMap, staging_for
from schedules.hopper.winograd import RowTilesConfig, contiguous, default_of, space_of
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.conv2d_nhwc.tma_wgmma import LINE, NhwcWork, TmaWgmmaConfig
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named


@dataclass(frozen=True)
class Bf16x3Config(RowTilesConfig, TmaWgmmaConfig):
    """Tiles of (tiles of pixels along a row, output channels, input channels)."""

    def check(self, problem: NhwcProblem, arch: Arch) -> str | None:
        return self.unfit(problem, arch) or self.check_tiles(problem) or super().check(problem, arch)

    def stage_length(self, problem: Conv2dProblem) -> int:
        return self.block_k * (problem.kh if self.halo else 1)

    def staging(self, problem: NhwcProblem, slices: int) -> Staging | RunStaging:
        staging = staging_for(self.rows, self.block_n, SUM_BYTES, LINE // SUM_BYTES)
        if problem.out_w % self.tile_w == 0:
            return staging
        return RunStaging(self.rows, staging.width, staging.width + UNIT // SUM_BYTES, SUM_BYTES, self.block_n)

    def work(self, problem: NhwcProblem) -> NhwcWork | None:
        tiles = self.tiles(problem)
        return RowTilesWork(problem, self, tiles) if tiles else None

    def tiles(self, problem: NhwcProblem) -> PixelTiles | None:
        p, parts = self.as_strides(problem), (self.parts, self.cluster_n)
        return pixel_tiles(p, self.block_m, parts, line=PATTERN if self.halo else 1, alone=self.halo)


@dataclass(frozen=True)
class Bf16x6Config(Bf16x3Config):
    """The same of three addends."""

    addends: ClassVar[int] = 3


class RowTilesWork(NhwcWork):
    """Pixels count tiles along a row; results of a tile lie at its outputs."""

    config: Bf16x3Config

    def __init__(self, problem: NhwcProblem, config: Bf16x3Config, tiles: PixelTiles) -> None:
        self.real, self.row_tiles = problem, config.row_tiles(problem)
        super().__init__(config.as_strides(problem), config, tiles)
        self.arguments, self.outputs, self.together = problem.arguments(), config.tile_w, config.together

    def _output(self, staging: Staging | RunStaging) -> Output:
        p, size, item = self.real, self.config.tile_w, SUM_BYTES
        staging = self.config.staging(p, 1)
        if isinstance(staging, RunStaging):
            vector = math.gcd(UNIT // item, staging.width, p.co)
            return Output(p.dtype, staging, Runs("output", p.pixels * p.co, 1, vector))
        n, h, w = self.tiles.part(self.config.parts)
        line = p.out_w * p.co * item
        target = TensorMap(
            "output",
            p.dtype,
            (p.co, size, p.out_w // size, p.out_h, p.n),
            (p.co * item, size * p.co * item, line, p.out_h * line),
            (staging.width, 1, w, h, n),
            (1, 1, 1, 1, 1),
            staging.swizzle,
            promotion=0,
        )
        return Output(p.dtype, staging, target)

    def factors(self, place: TilePlace, number: Expr) -> Sequence[Expr]:
        return winograd.factors(self.row_tiles, 0, number)

    def output_at(self, place: TilePlace, number: int) -> tuple[None, TilePlace]:
        """A tile's output number `number`: each has all, some of them beyond the end."""
        return None, replace(place, output=number)

    def store_at(self, place: TilePlace, part: Index, column: Index) -> tuple[Index, ...]:
        n, y, x = self.tiles.of_part(place.pixel, part, self.config.parts)
        return place.channel + column, place.output, x, y, n

    def _pixel(self, place: TilePlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        """Where in the output a row's pixel begins, and whether it is inside."""
        p = self.real
        n, y, tile = self.tiles.pixel(self.tiles.of_part(place.pixel, part, self.config.parts), row)
        x = tile * self.config.tile_w + place.output
        return ((n * p.out_h + y) * p.out_w + x) * p.co, tirx.all(n < p.n, y < p.out_h, x < p.out_w)

    def run_at(self, place: TilePlace, part: Index, row: Expr, column: Index) -> tuple[Expr, Expr]:
        start, there = self._pixel(place, part, row)
        channel = place.channel + column
        inside = tirx.if_then_else(there, self.real.co - channel, 0)
        return named("index", start + channel), named("inside", inside)

    def row_start(self, place: TilePlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        return self._pixel(place, part, row)


def default(problem: NhwcProblem, arch: Arch, kind: type[Bf16x3Config]) -> Bf16x3Config:
    return default_of(kind(), problem, arch)


def space(problem: NhwcProblem, arch: Arch, kind: type[Bf16x3Config]) -> Sequence[Bf16x3Config]:
    halos = (False, True) if problem.kh > 1 and problem.stride[0] == 1 else (False,)
    return space_of(kind, problem, arch, axis("halo", halos))


def more(problem: NhwcProblem, work: RowTilesWork) -> dict[str, Any]:
    """Of `schedule.split_schedules`: lines of image rows, and of rows of each output channel's filter."""
    p, tiles = problem, work.row_tiles
    data = contiguous((p.n * p.h, p.w, 1, p.ci), tiles, tiles.stored)
    return winograd.more(work, tiles, p.pad[1], data, contiguous((p.co * p.kh, p.kw, 1, p.ci), tiles, tiles.distinct))


BF16X3, BF16X6 = split_schedules(
    (Bf16x3Config, Bf16x6Config),
    default,
    space,
    siblings=("winograd", "simt"),
    more=more,
    prefix="winograd_",
)
