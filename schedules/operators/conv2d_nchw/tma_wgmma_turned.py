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
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.problem import Argument
from schedules.core.space import ProductSpace
from schedules.hopper.config import DEPTHS, HopperConfig, blocks, plain, stage_channels
from schedules.hopper.cost import estimate_of
from schedules.hopper.geometry import Load, Operand, Output, Work
from schedules.hopper.shared import SharedTile, Slots, TensorMap, beyond_indices, slot_staging, staging_for
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.positions import Positions, gathered, simplest
from schedules.operators.conv2d_nchw.repack import filter_argument, workspace_of
from schedules.operators.conv2d_nchw.turn import turn

if TYPE_CHECKING:
    import tvm

    from schedules.tirx.types import Expr, Index, Tensors

DTYPES = ("float16", "bfloat16")
ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
LINE = 128  # bytes of a swizzled row, at most


@dataclass(frozen=True)
class TmaWgmmaTurnedConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    # the copy has a line of all images after the other, with no zeros below an image; else image after image
    lines_outside: bool = False
    # the copy has all that an output looks at, in the filter's order, so that filters are taken as they lie
    gathered: bool = False

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        if problem.dtype not in DTYPES:
            return f"dtype={problem.dtype} is not {' or '.join(DTYPES)}"
        reason = self.check_block(problem.dtype, arch)
        if reason:
            return reason
        if self.block_n % (8 * self.cluster_m):
            return f"block_n={self.block_n} is not {self.cluster_m} times a multiple of 8 rows"
        if self.gathered:
            if self.lines_outside:
                return f"gathered={self.gathered} has no zeros between lines, lines_outside must be false"
            if problem.packed or problem.kh * problem.kw == 1:
                return f"gathered={self.gathered} is for filters of several taps as they lie, (co, ci, kh, kw)"
        work = TurnedWork(problem, self)
        for argument in (*work.workspace, *problem.arguments()):
            reason = beyond_indices(argument.name, math.prod(argument.shape))
            if reason:
                return reason
        return work.reason(arch)


@dataclass(frozen=True)
class TurnedPlace:
    """A block's tile: its first position, and its first output channel."""

    position: Expr
    channel: Expr


class TurnedWork(Work[TurnedPlace]):
    config: TmaWgmmaTurnedConfig
    channels_along_rows = False

    def __init__(self, problem: NchwProblem, config: TmaWgmmaTurnedConfig) -> None:
        p = gathered(problem) if config.gathered else simplest(problem)
        self.problem, self.config = p, config
        self.positions = positions = Positions(p, config.lines_outside)
        self.arguments, self.epilogue = problem.arguments(), p.epilogue
        turned = Argument("turned", (positions.planes, positions.data, positions.channels), p.dtype)
        as_they_lie = positions.as_they_lie and not config.gathered
        self.workspace = (() if as_they_lie else (turned,)) + workspace_of(p)
        self.kernel = (p.kh, p.kw)
        self.chunks = -(-p.ci // config.block_k)
        self.columns = -(-p.co // (config.block_n * config.cluster_n))  # tiles of a cluster along the channels
        self.clusters = -(-positions.outputs // (config.block_m * config.cluster_m)) * self.columns
        run = min(config.block_k, LINE // ITEM)
        a = SharedTile(config.block_m, config.block_k, ITEM, run)
        b = SharedTile(config.block_n, config.block_k, ITEM, run)
        line = positions.channels * ITEM
        self.a = Operand(
            a,
            TensorMap(
                "data" if as_they_lie else "turned",
                p.dtype,
                (positions.channels, positions.data, positions.planes),
                (line, positions.data * line),
                (run, config.block_m // config.cluster_n, 1),
                (1, 1, 1),
                a.swizzle,
            ),
        )
        self.b = Operand(
            b,
            TensorMap(
                filter_argument(p).name,
                p.dtype,
                (positions.channels, p.co, p.kh * p.kw),
                (line, p.co * line),
                (run, config.block_n // config.cluster_m, 1),
                (1, 1, 1),
                b.swizzle,
            ),
        )
        self.slices = config.slices
        self.output = self._output(config.block_n // self.slices)

    def _output(self, columns: int) -> Output:
        p, config, positions = self.problem, self.config, self.positions
        if positions.dense and p.out_h * p.out_w == 1 and p.co % VECTOR == 0:
            boxes = staging_for(config.rows, columns, ITEM, LINE // ITEM)
            box, line = (boxes.width, boxes.rows), boxes.row_bytes
            to = TensorMap("output", p.dtype, (p.co, p.n), (p.co * ITEM,), box, (1, 1), line, promotion=0)
            return Output(p.dtype, boxes, to)
        vector = math.gcd(VECTOR, positions.piece)
        slots = Slots("output", p.pixels * p.co, vector, ragged=not positions.dense)
        return Output(p.dtype, slot_staging(config.rows, columns, ITEM), slots)

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> TurnedPlace:
        from tvm.script import tirx as T

        from schedules.tirx.values import named

        config = self.config
        column = T.truncmod(tile, self.columns) * config.cluster_n + rank_n
        row = T.truncdiv(tile, self.columns) * config.cluster_m + rank_m
        return TurnedPlace(named("position", row * config.block_m), named("channel", column * config.block_n))

    def loads_a(self, place: TurnedPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.a.tile, self.config.block_m // self.config.cluster_n
        plane, moved = self.positions.of_tap(ry, rx)
        at = place.position + moved + part * rows
        return [
            Load(part * (rows * tile.swizzle) + run * tile.slab, (chunk * tile.k + run * tile.run, at, plane))
            for run in range(tile.k // tile.run)
        ]

    def loads_b(self, place: TurnedPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.b.tile, self.config.block_n // self.config.cluster_m
        tap = ry * self.kernel[1] + rx
        return [
            Load(
                part * (rows * tile.swizzle) + run * tile.slab,
                (chunk * tile.k + run * tile.run, place.channel + part * rows, tap),
            )
            for run in range(tile.k // tile.run)
        ]

    def store_at(self, place: TurnedPlace, part: Index, column: int) -> tuple[Index, ...]:
        return place.channel + column, self._first(place, part)

    def _first(self, place: TurnedPlace, part: Index) -> Expr:
        return place.position + part * self.config.rows

    def slots_at(self, place: TurnedPlace, part: Index) -> tuple[Expr, Expr]:
        first = self._first(place, part)
        return self.positions.number(first), self.positions.number(first + self.config.rows)

    def slot_of(self, place: TurnedPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        position = self._first(place, part) + row
        return self.positions.number(position), self._is_output(position)

    def _is_output(self, position: Expr) -> Expr:
        from tvm import tirx

        p = self.problem
        if self.positions.dense:
            return position < p.pixels
        n, y, x = self.positions.pixel(position)
        return tirx.all(n < p.n, y < p.out_h, x < p.out_w)

    def slot_start(self, number: Expr) -> Expr:
        return self.positions.element(number)

    def channel_at(self, place: TurnedPlace, part: Index, index: Expr) -> Expr:
        from tvm import tirx

        channel, whole = place.channel + index, self.problem.co % (self.config.block_n * self.config.cluster_n) == 0
        return channel if whole else tirx.min(channel, self.problem.co - 1)

    def row_start(self, place: TurnedPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        position = self._first(place, part) + row
        return self.positions.element(self.positions.number(position)), self._is_output(position)

    def column_start(self, place: TurnedPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        channel = place.channel + column
        return channel * (self.problem.out_h * self.problem.out_w), channel < self.problem.co


def schedule(problem: NchwProblem, config: TmaWgmmaTurnedConfig, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (n, ci, h, w), filter (co, ci, kh, kw) or (kh, kw, co, ci), the terms of the epilogue,
    output (n, co, out_h, out_w)."""
    from schedules.hopper.program import program

    work = TurnedWork(problem, config)

    def prepare(tensors: Tensors) -> None:
        turn(problem, work.positions, tensors, config.gathered)

    return program(work, prepare=prepare)


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaTurnedConfig:
    return plain(TmaWgmmaTurnedConfig(block_k=stage_channels(problem.ci, 64, 16)), problem, arch)


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaTurnedConfig]:
    return ProductSpace(
        TmaWgmmaTurnedConfig,
        blocks(problem.dtype, arch.device, filters=True),
        [dict(), dict(lines_outside=True), dict(gathered=True)],
        DEPTHS,
    )


SCHEDULE = ScheduleSpec(
    name="tma_wgmma_turned",
    summary="implicit GEMM on Hopper from a turned copy of the data: any stride and width, TMA, wgmma, persistent",
    kinds=("cuda",),
    config=TmaWgmmaTurnedConfig,
    apply=schedule,
    default=default,
    space=space,
    estimate=estimate_of(TurnedWork),
    tirx=WrittenInTirx(
        reason="one warp loads by TMA while others multiply by wgmma, and the blocks of a cluster share loads; "
        "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters",
        siblings=("mma", "mma_channels_last"),
    ),
)
