"""Tiles of output pixels in a line, of whatever images and rows: results leave in vectors along pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, TypeVar

from schedules.core.arch import Arch
from schedules.core.problem import Argument, numpy_dtype
from schedules.core.tvm import T, tirx
from schedules.hopper.boxes import TurnedData
from schedules.hopper.config import SHAPES, STAGING, HopperConfig, fitting
from schedules.hopper.geometry import Load, Operand, Output, Product, Work
from schedules.hopper.shared import (
    UNIT,
    PlaneStaging,
    SharedTile,
    Slots,
    StripStaging,
    TensorMap,
    beyond_indices,
    in_passes,
    slot_staging,
    staging_for,
)
from schedules.hopper.split import addends_of, whole
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.positions import SECTOR_RESULTS, Positions
from schedules.operators.conv2d_nchw.repack import filter_argument, workspace_of
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

ITEM = 2  # bytes of an operand's element
VECTOR = 8  # elements in 16 bytes
LINE = 128  # bytes of a swizzled row, at most
ROOM = 224 * 1024  # bytes of a multiprocessor's shared memory in which stages and results lie, beside barriers

P = TypeVar("P")  # where a tile lies


@dataclass(frozen=True)
class SectorsConfig(HopperConfig):
    """Of tiles of positions."""

    # tiles are of whole images, as many as fit, or overlap in larger ones, so that whole sectors of L2 are written
    whole_sectors: bool = False

    def check_sectors(self, positions: Positions) -> str | None:
        """Why tiles cannot be so, if they are to be; None if they can."""
        if not self.whole_sectors:
            return None
        p, given = positions.problem, f"whole_sectors={self.whole_sectors}"
        if positions.lines_outside:
            return f"{given} needs images that follow each other, lines_outside must be false"
        if positions.of_image <= self.block_m:
            if p.co % VECTOR:
                return f"{given} stores {VECTOR} channels of small images in whole 16 bytes, co={p.co} are no multiple"
        elif self.block_m - positions.overlap < SECTOR_RESULTS:
            return (
                f"{given} has tiles overlap by {positions.overlap} positions, block_m={self.block_m} has not many more"
            )
        if self.split_k > 1 and self.parts > 1:
            return f"{given} has all consumers store together, which split_k={self.split_k} parts; give ping_pong=true"
        return None


def sector_tiles(problem: NchwProblem) -> list[dict[str, bool]]:
    """Fields of the tiles worth trying: where planes are no whole 16 bytes, those that write whole sectors too."""
    plane = problem.out_h * problem.out_w
    return [dict(), dict(whole_sectors=True)] if plane > 1 and plane % VECTOR else [dict()]


def shapes_of(positions: Positions, arch: Arch) -> tuple[tuple[int, int, int], ...]:
    """(block_m, block_n, consumers) worth trying for tiles of `positions`."""
    p, outputs = positions.problem, positions.outputs
    return SHAPES + fitting(lambda m: -(-outputs // m), p.co, p.reduction, arch.device)


@dataclass(frozen=True)
class PositionPlace:
    """A block's tile: its first position, and its first output channel; where each position stands for several outputs,
    which."""

    position: Expr
    channel: Expr
    output: int = 0


def filter_operand(problem: NchwProblem, config: HopperConfig) -> Argument:
    """The filter (kh, kw, co, ci) that TMA reads."""
    p = problem
    return filter_argument(p) if config.addends == 1 else addends_of("filter", (p.kh, p.kw, p.co, p.ci))


def check_shared_filters(config: HopperConfig) -> str | None:
    """Why the blocks of a cluster's column cannot each load a part of their filters; None if they can."""
    if config.block_n % (8 * config.cluster_m):
        return f"block_n={config.block_n} is not {config.cluster_m} times a multiple of 8 rows"
    return None


def check_own_pixels(problem: NchwProblem, config: HopperConfig) -> str | None:
    """Why blocks whose threads bring their own pixels cannot work so, sharing filters; None if they can."""
    reason = check_shared_filters(config)
    if reason:
        return reason
    if config.cluster_n > 1:
        return f"cluster_n={config.cluster_n} would share pixels, which threads bring for their own block; give 1"
    reasons = (beyond_indices(argument.name, math.prod(argument.shape)) for argument in problem.arguments())
    return next(filter(None, reasons), None)


class FilterWork(Work[P]):
    """The product of `p`, pixels x output channels, with so many `taps` of the kernel, or of a row of it, in a stage;
    operand b are filters, operand a and the tiles of pixels are its own."""

    channels_along_rows = False
    turned: TurnedData  # operand a, if it is turned beside the stages

    def __init__(self, p: NchwProblem, config: HopperConfig, taps: int = 1) -> None:
        self.problem, self.config = p, config
        self.epilogue, self.workspace = p.epilogue, workspace_of(p)
        self.kernel = (1, 1) if taps == p.kh * p.kw else (p.kh, p.kw // taps)
        self.chunks = -(-p.ci // config.block_k)
        self.columns = -(-p.co // (config.block_n * config.cluster_n))  # tiles of a cluster along the channels
        self.run = min(config.block_k, LINE // ITEM)
        b = SharedTile(config.block_n, config.block_k, ITEM, self.run)
        weight = filter_operand(p, config)
        channels = whole(p.ci)
        line = channels * ITEM
        self.b = Operand(
            b,
            TensorMap(
                weight.name,
                weight.dtype,
                (channels, p.co, p.kh * p.kw),
                (line, p.co * line),
                (self.run, config.block_n // config.cluster_m, 1),
                (1, 1, 1),
                b.swizzle,
            ),
            taps,
        )
        self.products = tuple(Product(0, 0, tap * b.nbytes) for tap in range(taps))
        self.slices = config.slices

    def turn(self, source: TurnedData) -> None:
        """Have operand a be turned beside the stages: those of a chunk of the channels come one after the other, and
        blocks that share the reduction take every split_k-th chunk, zeros among them beyond the last."""
        source = replace(source, pairs=self.config.beside * 2 - 1)  # a pair beside the loads, two more in a warpgroup
        split, taps = self.config.split_k, source.taps
        self.kernel, self.chunks = (1, 1), -(-self.chunks // split) * split * source.stages
        self.a, self.turned = Operand(source.tile, source), source
        self.products = tuple(
            Product(0, source.moved_across(rx) * source.tile.swizzle * (taps > 1), rx * self.b.tile.nbytes)
            for rx in range(taps)
        )

    def turned_filters(self, channel: Expr, number: Expr, part: Index) -> Sequence[Load]:
        """The boxes of operand b of stage number `number` of all blocks that share the reduction."""
        split, stages = self.config.split_k, self.turned.stages
        own = T.truncdiv(number, split)
        chunk = named("chunk_of_channels", T.truncdiv(own, stages) * split + T.truncmod(number, split))
        return self.filters_of(channel, T.truncmod(own, stages) * self.b.count, chunk, part)

    def leave(self, output: Callable[[int], Output]) -> None:
        """Take as output what `output` makes of the bytes of shared memory in which a consumer's results wait for their
        store: STAGING if the stages leave room for that, else half as many."""
        for room in (STAGING, STAGING // 2):
            self.output = output(room)
            if self.config.num_stages * self.stage_bytes + self.beside_stages <= ROOM // self.config.blocks_sm:
                return

    def filters_of(self, channel: Expr, first: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        """The boxes of part number `part` (of cluster_m) of operand b, for the taps from `first` on, the output
        channels from `channel` on and a chunk of the input's."""
        tile, rows = self.b.tile, self.config.block_n // self.config.cluster_m
        return [
            Load(
                tap * tile.nbytes + part * (rows * tile.swizzle) + run * tile.slab,
                (chunk * tile.k + run * tile.run, channel + part * rows, first + tap),
            )
            for tap, run in product(range(self.b.count), range(tile.k // tile.run))
        ]

    def channel_of(self, first: Expr, index: Expr) -> Expr:
        """Output channel number `index` from `first` on, of those beyond the last the last."""
        channel, whole = first + index, self.problem.co % (self.config.block_n * self.config.cluster_n) == 0
        return channel if whole else tirx.min(channel, self.problem.co - 1)

    def plane_of(self, channel: Expr) -> tuple[Expr, Expr]:
        """Where the pixels of an output channel begin in an image, and whether there is such a channel."""
        return channel * (self.problem.out_h * self.problem.out_w), channel < self.problem.co


class PositionWork(FilterWork[PositionPlace]):
    """The same in tiles of `positions` of its output."""

    in_order: ClassVar[bool] = True  # whether neighbouring rows of the tile are neighbouring rows of the sums
    most_images: ClassVar[int] = 0  # whole images of a tile at most, if tiles are made of nothing else

    def __init__(self, p: NchwProblem, config: HopperConfig, positions: Positions, taps: int = 1) -> None:
        super().__init__(p, config, taps)
        self.positions = positions
        self.images, self.tiles_of_image, self.step = 0, 0, config.block_m
        if isinstance(config, SectorsConfig) and config.whole_sectors or self.most_images:
            # that are whole in a tile, or 0
            self.images = min(config.block_m // positions.of_image, self.most_images or config.block_m)
            self.step = (
                self.images * positions.of_image
                or (config.block_m - positions.overlap) // SECTOR_RESULTS * SECTOR_RESULTS
            )
            if not self.images:
                self.tiles_of_image = 1 + -(-(positions.of_image - config.block_m) // self.step)
        tiles = p.n * self.tiles_of_image or -(-positions.outputs // self.step)
        self.clusters = -(-tiles // config.cluster_m) * self.columns
        self.output = self._output(config.block_n // self.slices)

    def _output(self, columns: int) -> Output:
        p, config, positions = self.problem, self.config, self.positions
        item = numpy_dtype(p.dtype).itemsize
        most = UNIT // item  # elements that are stored at once
        if self.tiles_of_image:
            strips = StripStaging(config.rows, columns, item, columns, config.block_m, config.parts)
            return Output(p.dtype, in_passes(strips), Slots("output", p.pixels * p.co, most, ragged=False))
        if self.images:
            plane = p.out_h * p.out_w
            planes = PlaneStaging(config.rows, columns, item, columns, self.images, plane, config.parts)
            planes = planes if self.most_images else in_passes(planes)
            return Output(p.dtype, planes, Slots("output", p.pixels * p.co, most, ragged=False))
        if self.in_order and positions.dense and p.out_h * p.out_w == 1 and p.co % most == 0:
            boxes = staging_for(config.rows, columns, item, LINE // item)
            box, line = (boxes.width, boxes.rows), boxes.swizzle
            to = TensorMap("output", p.dtype, (p.co, p.n), (p.co * item,), box, (1, 1), line, promotion=0)
            return Output(p.dtype, boxes, to)
        # parts of vectors leave element by element, of long ones many
        vector = math.gcd(most if positions.dense else most // 2, positions.piece)
        slots = Slots("output", p.pixels * p.co, vector, ragged=not positions.dense)
        return Output(p.dtype, slot_staging(config.rows, columns, item), slots)

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> PositionPlace:
        config = self.config
        column = T.truncmod(tile, self.columns) * config.cluster_n + rank_n
        row = T.truncdiv(tile, self.columns) * config.cluster_m + rank_m
        position = row * self.step
        if self.tiles_of_image:
            image, tile = T.truncdiv(row, self.tiles_of_image), T.truncmod(row, self.tiles_of_image)
            position = image * self.positions.of_image + tile * self.step
        return PositionPlace(named("position", position), named("channel", column * config.block_n))

    def loads_b(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        return self.filters_of(place.channel, ry * self.problem.kw + rx, chunk, part)

    def store_at(self, place: PositionPlace, part: Index, column: int) -> tuple[Index, ...]:
        return place.channel + column, self._first(place, part)

    def _first(self, place: PositionPlace, part: Index) -> Expr:
        return place.position + part * self.config.rows

    def slots_at(self, place: PositionPlace, part: Index) -> tuple[Expr, Expr]:
        first = self._first(place, part)
        return self.positions.number(first), self.positions.number(first + self.config.rows)

    def slot_of(self, place: PositionPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        position = self._first(place, part) + row
        return self.positions.number(position), self._is_output(position)

    def planes_at(self, place: PositionPlace) -> tuple[Expr, int, Expr]:
        p = self.problem
        first = T.truncdiv(place.position, self.positions.of_image)
        apart = p.co * p.out_h * p.out_w
        return first * apart, apart, p.n - first

    def plane_slot(self, place: PositionPlace, part: Index, row: Expr) -> tuple[Expr, Expr, Expr]:
        p, row = self.positions.problem, part * self.config.rows + row
        begin = self._first_of_image(place) if self.tiles_of_image else 0
        image, y, x = self.positions.pixel(begin + row)
        last = max(1, self.images)
        return image, y * p.out_w + x, tirx.all(image < last, y < p.out_h, x < p.out_w)

    def _first_of_image(self, place: PositionPlace) -> Expr:
        """Positions of its image before a tile."""
        return named("of_image", T.truncmod(place.position, self.positions.of_image))

    def strip_at(self, place: PositionPlace) -> tuple[Expr, Expr, Expr, Expr, int]:
        p = self.positions.problem
        plane, image, begin = p.out_h * p.out_w, self.positions.of_image, self._first_of_image(place)

        def result(position: Expr) -> Expr:
            y, x = T.truncdiv(position, self.positions.x.length), T.truncmod(position, self.positions.x.length)
            return tirx.min(y * p.out_w + tirx.min(x, p.out_w), plane)

        n, last = T.truncdiv(place.position, image), begin + self.config.block_m >= image
        following = T.Select(last, plane, result(begin + self.step))
        return n * (p.co * plane), n < p.n, result(begin), following, plane

    def _is_output(self, position: Expr) -> Expr:
        p = self.problem
        if self.positions.dense:
            return position < p.pixels
        n, y, x = self.positions.pixel(position)
        return tirx.all(n < p.n, y < p.out_h, x < p.out_w)

    def slot_start(self, number: Expr) -> Expr:
        return self.positions.element(number)

    def channel_at(self, place: PositionPlace, part: Index, index: Expr) -> Expr:
        return self.channel_of(place.channel, index)

    def row_start(self, place: PositionPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        position = self._first(place, part) + row
        return self.positions.element(self.positions.number(position)), self._is_output(position)

    def column_start(self, place: PositionPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        return self.plane_of(place.channel + column)
