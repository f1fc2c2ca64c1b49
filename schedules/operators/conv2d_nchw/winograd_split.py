"""NCHW convolution of float32 by Winograd's tiles along rows, as products of bfloat16 addends on Hopper: the kernel of
`tma_wgmma_turned` of the points' tensors, whose planes are a tile's points; see `hopper.winograd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.space import axis
from schedules.core.tvm import T, tirx
from schedules.hopper import winograd
from schedules.hopper.config import SUM_BYTES
from schedules.hopper.cost import microseconds
from schedules.hopper.geometry import Output
from schedules.hopper.schedule import split_schedules
from schedules.hopper.shared import Slots, slot_staging
from schedules.hopper.winograd import Lined, RowTilesConfig, default_of, space_of
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import PositionPlace
from schedules.operators.conv2d_nchw.tma_wgmma_turned import TurnedConfig, TurnedWork
from schedules.tirx.types import Expr, Index

STORED = 5.0  # picoseconds for each result, neighbours of which are stored one by one


@dataclass(frozen=True)
class Bf16x3Config(RowTilesConfig, TurnedConfig):
    """Tiles of (tiles of pixels along a row, output channels, input channels)."""

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        if problem.stride[0] != 1:
            return (
                f"stride={problem.stride} is not 1: rows of a stride lie in planes, as points do; use another schedule"
            )
        return super().unfit(problem, arch)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        return self.unfit(problem, arch) or self.check_tiles(problem) or super().check(problem, arch)

    def work(self, problem: NchwProblem) -> TurnedWork:
        return RowTilesWork(problem, self)


@dataclass(frozen=True)
class Bf16x6Config(Bf16x3Config):
    """The same of three addends."""

    addends: ClassVar[int] = 3


class RowTilesWork(TurnedWork):
    """Positions count tiles along a row; results of a tile lie at its outputs."""

    config: Bf16x3Config

    def __init__(self, problem: NchwProblem, config: Bf16x3Config) -> None:
        self.real, self.row_tiles = problem, config.row_tiles(problem)
        super().__init__(config.as_strides(problem), config)
        self.arguments, self.outputs, self.together = problem.arguments(), config.tile_w, config.together

    def _output(self, columns: int) -> Output:
        p = self.real
        slots = Slots("output", p.pixels * p.co, 1, ragged=not self.positions.dense)
        return Output(p.dtype, slot_staging(self.config.rows, columns, SUM_BYTES), slots)

    def factors(self, place: PositionPlace, number: Expr) -> Sequence[Expr]:
        return winograd.factors(self.row_tiles, 0, number)

    def output_at(self, place: PositionPlace, number: int) -> tuple[None, PositionPlace]:
        """A tile's output number `number`: each has all, some of them beyond the end."""
        return None, replace(place, output=number)

    def _start(self, place: PositionPlace, number: Expr) -> tuple[Expr, Expr]:
        """Where in the output lies that of tile number `number`, counted line after line, and whether it is inside."""
        p, tiles = self.real, self.row_tiles
        line, tile = T.truncdiv(number, tiles.count), T.truncmod(number, tiles.count)
        if self.config.lines_outside:
            n, y = T.truncmod(line, p.n), T.truncdiv(line, p.n)
        else:
            n, y = T.truncdiv(line, p.out_h), T.truncmod(line, p.out_h)
        x = tile * tiles.size + place.output
        return n * (p.co * p.out_h * p.out_w) + y * p.out_w + x, x < p.out_w

    def slot_in(self, place: PositionPlace, number: Expr) -> tuple[Expr, Expr | None]:
        start, there = self._start(place, number)
        return start, there if self.real.out_w % self.row_tiles.size else None

    def row_start(self, place: PositionPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        position = self._first(place, part) + row
        start, there = self._start(place, self.positions.number(position))
        return start, tirx.all(self._is_output(position), there)

    def column_start(self, place: PositionPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        channel = place.channel + column
        return channel * (self.real.out_h * self.real.out_w), channel < self.real.co


def default(problem: NchwProblem, arch: Arch, kind: type[Bf16x3Config]) -> Bf16x3Config:
    return default_of(kind(), problem, arch)


def space(problem: NchwProblem, arch: Arch, kind: type[Bf16x3Config]) -> Sequence[Bf16x3Config]:
    return space_of(kind, problem, arch, axis("lines_outside", (False, True)))


def more(problem: NchwProblem, work: RowTilesWork) -> dict[str, Any]:
    """Of `schedule.split_schedules`: lines of image rows with the zeros between them, and of each output channel's."""
    p, tiles, positions = problem, work.row_tiles, work.positions
    pixels, taps = p.h * p.w, p.kh * p.kw

    def image(row: Expr, _: Expr) -> tuple[Expr, Expr]:
        if work.config.lines_outside:
            n, y = T.truncmod(row, p.n), T.truncdiv(row, p.n)
        else:
            n, y = T.truncdiv(row, positions.lines), T.truncmod(row, positions.lines)
        return n * (p.ci * pixels) + y * p.w, y < p.h

    def channel(ky: Expr, co: Expr) -> tuple[Expr, None]:
        return (ky * (p.kw * p.co) + co) * p.ci if p.packed else co * (p.ci * taps) + ky * p.kw, None

    data = Lined(
        (p.n * positions.lines, p.w, 1, p.ci), 1, pixels, image, positions.data,
        lambda row, tile, _: row * tiles.count + tile,
    )  # fmt: skip
    weight = Lined(
        (p.kh, p.kw, p.co, p.ci), p.co * p.ci if p.packed else 1, 1 if p.packed else taps, channel, p.co,
        lambda ky, _, co: ky * (tiles.distinct * p.co) + co,
    )  # fmt: skip
    return winograd.more(work, tiles, p.pad[1], data, weight)


def estimate(work: RowTilesWork, device: Device) -> float:
    """About how many microseconds the product takes on `device`."""
    return microseconds(work, device) + STORED * work.real.pixels * work.real.co / 1e6


BF16X3, BF16X6 = split_schedules(
    (Bf16x3Config, Bf16x6Config),
    default,
    space,
    siblings=("winograd", "simt"),
    more=more,
    prefix="winograd_",
    estimate=estimate,
)
