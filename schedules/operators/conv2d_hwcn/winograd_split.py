"""HWCN convolution of float32 by Winograd's tiles along rows, as products of bfloat16 addends on Hopper: the kernel of
`tma_wgmma` of the points' tensors; see `hopper.winograd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.space import axis
from schedules.hopper import winograd
from schedules.hopper.geometry import Taps
from schedules.hopper.pixels import mean_taps_inside, taps_inside
from schedules.hopper.schedule import split_schedules
from schedules.hopper.winograd import RowTilesConfig, contiguous, default_of, space_of
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.image_tiles import ImageTiles, image_tiles
from schedules.operators.conv2d_hwcn.pixel_work import PixelPlace
from schedules.operators.conv2d_hwcn.tma_wgmma import BoxConfig, HwcnWork
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named


@dataclass(frozen=True)
class Bf16x3Config(RowTilesConfig, BoxConfig):
    """Tiles of (output channels, images and tiles of a row, input channels)."""

    ragged: ClassVar[bool] = True

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        return self.unfit(problem, arch) or self.check_tiles(problem) or super().check(problem, arch)

    def work(self, problem: HwcnProblem) -> HwcnWork:
        return RowTilesWork(problem, self)

    def stored(self, problem: HwcnProblem) -> HwcnProblem:
        points: HwcnProblem = self.as_points(problem)
        return points

    def tiles(self, problem: HwcnProblem) -> ImageTiles | None:
        p = self.as_tiles(problem)
        return image_tiles(p, self.block_n, self.cluster_n, self.cluster_m, False, narrow=True)


@dataclass(frozen=True)
class Bf16x6Config(Bf16x3Config):
    """The same of three addends."""

    addends: ClassVar[int] = 3


class RowTilesWork(HwcnWork):
    """Places count tiles along a row; results of a tile lie at its outputs."""

    config: Bf16x3Config

    def __init__(self, problem: HwcnProblem, config: Bf16x3Config) -> None:
        self.row_tiles = config.row_tiles(problem)
        super().__init__(problem, config)
        self.outputs, self.together = config.tile_w, config.together
        self.kernel = (problem.kh, self.row_tiles.distinct)

    @property
    def inside(self) -> tuple[int, int, int, int] | None:
        _, rows, columns = self.tiles.counts
        top, height, left, width = super().inside or (0, rows, 0, columns)
        width = min(width, self.row_tiles.full - left)  # the rest of a row has fewer points
        return (top, height, left, width) if 0 < width * height < rows * columns else None

    @property
    def mean_taps(self) -> float:
        skipped = self.config.skip_padding and self.problem.kh > 1
        rows = mean_taps_inside(self.tiles.counts[1], *self._axes()[0]) if skipped else self.problem.kh
        return rows * self.row_tiles.mean

    def _taps(self, y: Expr, x: Expr) -> Taps:
        skipped = self.config.skip_padding and self.problem.kh > 1
        rows = taps_inside("ry", y, *self._axes()[0]) if skipped else (0, self.problem.kh)
        return *rows, *(named("points", each) for each in self.row_tiles.window(x))

    def data_at(self, place: PixelPlace, ry: Index, rx: Index) -> tuple[Expr, Expr]:
        return self.row_tiles.at(place.x, rx), super().data_at(place, ry, rx)[1]

    def factors(self, place: PixelPlace, number: Expr) -> Sequence[Expr]:
        return winograd.factors(self.row_tiles, place.x, number)

    def output_at(self, place: PixelPlace, number: int) -> tuple[Expr | None, PixelPlace]:
        """Whether a tile has output number `number`, None if all do, and its place."""
        tiles = self.row_tiles
        x = place.x * tiles.size + number
        return (x < tiles.out if tiles.rest and number >= tiles.rest else None), replace(place, x=x)


def default(problem: HwcnProblem, arch: Arch, kind: type[Bf16x3Config]) -> Bf16x3Config:
    return default_of(kind(), problem, arch)


def space(problem: HwcnProblem, arch: Arch, kind: type[Bf16x3Config]) -> Sequence[Bf16x3Config]:
    return space_of(kind, problem, arch, axis("skip_padding", (True, False)))


def more(problem: HwcnProblem, work: RowTilesWork) -> dict[str, Any]:
    """Of `schedule.split_schedules`: lines of images, and of output channels, one of each input channel."""
    p, tiles = problem, work.row_tiles
    data = contiguous((p.h, p.w, p.ci, p.n), tiles, tiles.stored)
    return winograd.more(work, tiles, p.pad[1], data, contiguous((p.kh, p.kw, p.ci, p.co), tiles, tiles.distinct))


BF16X3, BF16X6 = split_schedules(
    (Bf16x3Config, Bf16x6Config),
    default,
    space,
    siblings=("winograd", "simt"),
    more=more,
    prefix="winograd_",
    channels_along_rows=True,
)
