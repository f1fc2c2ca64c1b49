"""From sums to results: what a consumer's thread does with its accumulators before they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from schedules.core.problem import numpy_dtype
from schedules.definitions.epilogue import unrounded
from schedules.hopper.config import ROWS, WARPGROUP
from schedules.hopper.fragments import row_of
from schedules.hopper.geometry import Member, Work
from schedules.hopper.joined import PlaneStores, StripStores
from schedules.hopper.residual import Residual
from schedules.hopper.shared import (
    FOLDS,
    SECTOR,
    BlockStaging,
    LineStaging,
    NoStaging,
    PlaneStaging,
    RunStaging,
    SlotStaging,
    Staging,
    StripStaging,
    folded,
)
from schedules.hopper.stores import BlockStores, BoxStores, ColumnStores, LineStores, RunStores, SlotStores, Stores
from schedules.hopper.warm import bring
from schedules.tirx.types import Buffer, Expr, Index, Tensors, Variable
from schedules.tirx.values import kept, named
from schedules.tirx.words import read, read_pair, widened

AHEAD = 2  # sixteens of columns whose elements are read before the present one is stored


@dataclass(frozen=True)
class Along:
    """What the results of a row, or of a column, have in common: the operands of their output channel, if it is one;
    and where they begin in the output, which for a row that is not inside is negative, if elements have operands."""

    channel: Mapping[str, Expr]
    start: Index = 0
    inside: Expr | None = None  # of a column


class Results:
    """The way out for a consumer's tiles, `member` of whose threads this is: from its `sums` by way of the staging
    `memory` to the output.

    Where a result is more than one sum, a subclass says so in `totals`.
    """

    def __init__(
        self,
        work: Work,
        tensors: Tensors,
        output_map: Variable | None,
        sums: Buffer,
        memory: Buffer | None,
        member: Member,
    ) -> None:
        self.work, self.tensors, self.output_map = work, tensors, output_map
        self.sums, self.memory, self.member = sums, memory, member
        self.leaves = 0  # which of the sets of sums that leave one after the other

    def fragment(self, which: int, m: int, group: int, register: int) -> Expr:
        """The accumulator of the sums number `which`, of 64 rows number `m` of the consumer's, of a group of eight
        columns, and there one of the thread's four."""
        blocks_m, groups = self.work.config.rows // ROWS, self.work.config.columns // 8
        return self.sums[((which * blocks_m + m) * groups + group) * 4 + register]

    def fetch(self, column: int) -> None:
        """Have the sums of sixteen columns from `column` on where `fragment` finds them: they are in registers."""

    def totals(self, m: int, group: int, below: int) -> Sequence[Expr]:
        """The two sums of a thread in columns 8 * `group` + lane % 4 * 2 + (0, 1) of its consumer, in 64 rows number
        `m`, there 8 * `below` rows down; all threads of a warp ask together."""
        return [self.fragment(self.leaves, m, group, 2 * below + j) for j in range(2)]

    @property
    def reads_elements(self) -> bool:
        """Whether threads read operands of elements from where they lie in memory."""
        return bool(self.work.epilogue.of_axis("element")) and not self.work.added

    def of_row(self, place: Any, row: Expr) -> Along:
        """What the results of a row have in common, found once for all columns."""
        start: Index = 0
        if self.reads_elements:
            element, inside = self.work.row_start(place, self.member.part, row)
            start = kept("start", T.Select(inside, element, -1))
        return Along(self._of_channels(place, [row])[0] if self.work.channels_along_rows else {}, start)

    def of_columns(self, place: Any, column: Expr) -> list[Along]:
        """The same for two stored columns, of which `column`, an even one, is the first; found once for all rows."""
        columns = [column, column + 1]
        operands = [{}, {}] if self.work.channels_along_rows else self._of_channels(place, columns)
        if not self.reads_elements:
            return [Along(each) for each in operands]
        starts = (self.work.column_start(place, self.member.part, each) for each in columns)
        return [Along(each, *start) for each, start in zip(operands, starts, strict=True)]

    def _of_channels(self, place: Any, indices: Sequence[Expr]) -> list[dict[str, Expr]]:
        """The operands of the output channels of rows or columns, 16-bit ones as float32; two by one load where all
        pairs of channels are alike in memory."""
        found: list[dict[str, Expr]] = [{} for _ in indices]
        operands = self.work.epilogue.of_axis("channel")
        if not operands:
            return found
        channels = [named("channel", self.work.channel_at(place, self.member.part, index)) for index in indices]
        for operand in operands:
            name, elements = operand.name, self.tensors[operand.name]
            if len(channels) == 2 and elements.shape[0] % 2 == 0:
                # beyond the last channel both are that one
                values = read_pair(name, elements, channels[1] - 1)
            else:
                values = tuple(named(name, widened(elements[channel])) for channel in channels)
            for each, value in zip(found, values, strict=True):
                each[name] = value
        return found

    def finish(self, total: Expr, of_row: Along, of_column: Along, element: Expr | None = None) -> Expr:
        """The result, not yet rounded, of the sum `total` in a row and a column; `element` is the residual's, where it
        has come."""
        operands = []
        for operand in self.work.epilogue.operands:
            if operand.axis == "channel":
                operands.append((of_row if self.work.channels_along_rows else of_column).channel[operand.name])
            elif operand.axis == "tensor":
                operands.append(self.tensors[operand.name][0])
            elif element is not None:
                operands.append(element)
            else:
                operands.append(self.element(operand.name, of_row, of_column))
        return unrounded(self.work.epilogue, total, operands)

    def element(self, name: str, of_row: Along, of_column: Along) -> Expr:
        """An operand's element in a row and a column, from where it lies in memory."""
        at, inside = of_row.start + of_column.start, tirx.all(of_row.start >= 0, of_column.inside)
        # bound, as an activation may name it more than once
        return named(name, read(self.tensors[f"flat {name}"], at, inside))

    def warm(self, place: Any) -> None:
        """Have what threads read of the elements of the tile at `place` come into L2, while it is multiplied."""
        config, part = self.work.config, self.member.part
        if not self.reads_elements or config.split_k > 1 or self.work.leaving > 1:
            return
        rows, columns = config.rows, self.work.output.staging.columns
        # lines of the tensor lie along pixels, or along channels
        of_channels = len(self.work.problem.output_axes) - 1 in self.work.problem.channel_axes
        along_rows = of_channels == self.work.channels_along_rows
        lines, length = (columns, rows) if along_rows else (rows, columns)
        for operand in self.work.epilogue.of_axis("element"):
            tensor = self.tensors[f"flat {operand.name}"]
            pieces = -(-length * numpy_dtype(str(tensor.dtype)).itemsize // SECTOR)
            with T.serial(-(-lines * pieces // WARPGROUP)) as turn:
                number = named("piece", turn * WARPGROUP + self.member.thread)
                line, at = T.truncmod(number, lines), T.truncdiv(number, lines) * (length // pieces)
                row, column = (at, line) if along_rows else (line, at)
                start, there = self.work.row_start(place, part, row)
                more, inside = self.work.column_start(place, part, column)
                with T.If(tirx.all(number < lines * pieces, there, inside)), T.Then():
                    bring(tensor, start + more)

    def emit(self, place: Any, begin: Index = 0, residual: Residual | None = None) -> None:
        """Finish the tile at `place` and issue its stores; if a slice of its columns is stored, it begins at column
        `begin`, and its sums lie where those of the first slice do.  `residual` is what comes of it by TMA."""
        if self.work.leaving == 1:
            self._emit(place, begin, residual)
            return
        for number in range(self.work.leaving):
            self.leaves = number
            there, own = self.work.output_at(place, number)
            if there is None:
                self._emit(own, begin, residual)
            else:
                with T.If(there), T.Then():
                    self._emit(own, begin, residual)

    def _emit(self, place: Any, begin: Index, residual: Residual | None) -> None:
        """The same of one set of sums."""
        work, tensors, member = self.work, self.tensors, self.member
        lane = member.lane
        staging = work.output.staging
        a, b = work.a.tile, work.b.tile
        block_rows, warp_rows = work.config.sixteens
        tops = [named("top", row_of(work.a, member, below, warp_rows)) for below in (0, 8)]
        # columns of eight are permuted by XOR with 0 to 3: bit 1 changes which lane has them, bit 0 which register
        lanes = [lane, named("across", T.bitwise_xor(lane, 1))] if b.fold == FOLDS[0] else [lane]
        lefts = [named("left", T.truncmod(at, 4) * 2) for at in lanes]
        stores = stores_of(work, tensors, self.output_map, place, begin, self.memory, member)

        of_rows = [
            self.of_row(place, folded(top + m * block_rows, a.fold))
            for m in range(staging.rows // ROWS)
            for top in tops
        ]

        blocks, pairs = range(staging.rows // ROWS), range(staging.width // 16)

        def columns(box: int, pair: int) -> tuple[int, int, Expr]:
            """The first of the 16 columns number `pair` of a box, which lanes their permutation gives them to, and the
            thread's first, which is stored."""
            column = box * staging.width + pair * 16
            permuted = folded(column, b.fold) % 8 // 2  # as eight further: neighbouring eights differ in bit 0
            return column, permuted, lefts[permuted] + begin + column

        known: dict[tuple[int, int], list[Along]] = {}

        def across(box: int, pair: int) -> list[Along]:
            """What the results of the thread's columns, two of each eight, have in common."""
            if (box, pair) not in known:
                left = columns(box, pair)[2]
                known[box, pair] = [each for half in range(2) for each in self.of_columns(place, left + 8 * half)]
            return known[box, pair]

        elements = work.epilogue.of_axis("element")

        def added(box: int, pair: int, m: int) -> list[Sequence[Expr | None]]:
            """The residual's elements of 64 rows number `m` and these columns: two for each pair of sums."""
            if not residual and self.reads_elements and len(elements) == 1:
                return [
                    [self.element(elements[0].name, of_rows[2 * m + below], each) for each in of_half]
                    for of_half in (across(box, pair)[:2], across(box, pair)[2:])
                    for below in range(2)
                ]
            if not residual:
                return [(None, None)] * 4
            assert isinstance(stores, BoxStores | LineStores)
            if pair == m == 0:
                residual.wait(box)
            lane_of = lanes[columns(box, pair)[1]]
            return [residual.pair(stores, box, m, pair, *part, lane_of) for part in product(range(2), range(2))]

        for first in range(0, staging.columns // staging.width, staging.together):
            stores.before()
            steps = list(product(range(first, first + staging.together), pairs, blocks))
            # the next ones before these are stored: the compiler moves no load above a store
            early = AHEAD if self.reads_elements else 1
            ahead = [added(*step) for step in steps[:early]]
            for number, (box, pair, m) in enumerate(steps):
                column, permuted, _ = columns(box, pair)
                of_columns = across(box, pair)
                if m == 0:
                    self.fetch(column)
                if number + early < len(steps):
                    ahead.append(added(*steps[number + early]))
                of_step = ahead[number]
                values = []
                for part, (half, below) in enumerate(product(range(2), range(2))):
                    group, of_row = (column + work.margin) // 8 + half, of_rows[2 * m + below]
                    totals, swap = self.totals(m, group, below), folded(column + 8 * half, b.fold) % 2
                    for i in range(2):
                        given = of_columns[2 * half + i], of_step[part][i]
                        values.append(self.finish(totals[i ^ swap], of_row, *given))
                stores.write(box - first, values, m, pair, lanes[permuted])
                if residual and (pair, m) == (pairs[-1], blocks[-1]):
                    residual.free(box)  # whose elements are in results now: a load on its way would come too late
            stores.written()
            stores.store(first)


def stores_of(
    work: Work,
    tensors: Tensors,
    output_map: Variable | None,
    place: Any,
    begin: Index,
    memory: Buffer | None,
    member: Member,
) -> Stores:
    """The stores that the work's output needs."""
    staging = work.output.staging
    kinds = {
        Staging: BoxStores,
        LineStaging: LineStores,
        RunStaging: RunStores,
        BlockStaging: BlockStores,
        SlotStaging: SlotStores,
        PlaneStaging: PlaneStores,
        StripStaging: StripStores,
        NoStaging: ColumnStores,
    }
    kind: Any = kinds[type(staging)]
    start = named("start", member.consumer * staging.nbytes)
    return kind(work, tensors, output_map, place, begin, memory, start, member)
