"""Results of all parts of a tile that leave together, by ordinary stores of whole vectors.

By planes: where the tile has all of an image's results, whose channels then follow each other as in the tensor.  By
strips: where planes are larger, and tiles overlap so that whole sectors of L2 are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm import tirx
from tvm.script import tirx as T

from schedules.hopper.config import ROWS, WARPGROUP
from schedules.hopper.fragments import row_of
from schedules.hopper.shared import SECTOR, UNIT, PlaneStaging, StripStaging
from schedules.hopper.stores import COPY_PART, PUT, PUT_APART, VECTORS, Stores, barrier, copy_vector
from schedules.tirx.types import Buffer, Expr, Pointer
from schedules.tirx.values import kept, named
from schedules.tirx.words import pack_16

ITEM = 2  # bytes of a result of 16 bits
_TOGETHER = 8  # named barrier of all consumers


@dataclass
class JoinedStores(Stores):
    """Results leave by ordinary stores of whole vectors: threads of all parts of a tile store what all of these
    wrote."""

    memory: Buffer

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.staging, PlaneStaging | StripStaging) and output.staging.item == ITEM
        self.output, self.parts = self.tensors["flat output"], output.staging.parts
        self.left = T.truncmod(self.member.lane, 4) * 2
        self.thread = self.member.thread
        if self.parts > 1:
            self.start = T.int32(0)
            self.thread = self.member.part * WARPGROUP + self.member.thread

    def _rows(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Of each row of the thread's the image and the result there, and whether it is one."""
        for m, below in product(range(self.work.output.staging.rows // ROWS), (0, 8)):
            row = self.row(m) + row_of(self.work.a, self.member.lane, below)
            yield self.work.plane_slot(self.place, self.member.part, row)

    def before(self) -> None:
        if self.parts == 1:
            barrier(self.member.consumer)
        else:
            T.evaluate(T.ptx.bar.sync(T.uint32(_TOGETHER), T.uint32(self.parts * WARPGROUP)))

    def written(self) -> None:
        self.before()

    def _at(self, element: Expr) -> Pointer:
        return self.memory.ptr_to([self.start + element * ITEM])


@dataclass
class PlaneStores(JoinedStores):
    """A whole image's results of all columns side by side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.work.output.staging, PlaneStaging)
        self.staging = self.work.output.staging
        self.rows = [
            (kept("slot", image * self.staging.image + result), named("there", there))
            for image, result, there in self._rows()
        ]

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        plane = self.staging.plane
        for half, below in product(range(2), range(2)):
            slot, there = self.rows[2 * m + below]
            word = pack_16(self.work.output.dtype, *values[4 * half + 2 * below : 4 * half + 2 * below + 2])
            target = self._at((self.left + (pair * 16 + half * 8)) * plane + slot)
            name, source = f"hopper_put_apart_{plane}", PUT_APART.format(plane)
            T.evaluate(T.cuda.func_call(name, word, target, there, source_code=source))

    def store(self, first: int) -> None:
        staging, vector = self.staging, UNIT // ITEM
        vectors = staging.image // vector  # of an image
        threads = self.parts * WARPGROUP
        begin, apart, images = self.work.planes_at(self.place)
        column = self.begin + first * staging.width
        channel, _ = self.work.column_start(self.place, self.member.part, column)
        start = named("start", begin + channel)
        inside = named("elements", apart - channel)  # of an image, from the first column on
        with T.serial(-(-staging.images * vectors // threads)) as turn:
            at = named("at", turn * threads + self.thread)
            image = named("image", T.truncdiv(at, vectors))
            element = named("element", (at - image * vectors) * vector)
            with T.If(tirx.all(image < staging.images, image < images, element < inside)), T.Then():
                to = self.output.ptr_to([start + image * apart + element])
                copy_vector(UNIT, to, self._at(image * staging.image + element))


@dataclass
class StripStores(JoinedStores):
    """A channel's results side by side, in whole sectors of L2 but where its plane begins and ends: a sector that is
    written in two parts takes several times as long.  Tiles overlap by as many results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.work.output.staging, StripStaging)
        self.staging = self.work.output.staging
        start, there, first, following, plane = self.work.strip_at(self.place)
        self.first, self.following = named("first_result", first), named("next_result", following)
        self.plane, self.begins, self.there = plane, named("start", start), named("is_image", there)
        self.rows = [(kept("slot", result - self.first), named("there", there)) for _, result, there in self._rows()]
        # channels sixteen further are as late
        self.lates = [
            kept("late", self._late(self._channel(0, self.left + (8 * half + i))[0]))
            for half, i in product(range(2), range(2))
        ]

    def _channel(self, first: int, column: Expr) -> tuple[Expr, Expr]:
        """Where the tile's first result of a column of store number `first` lies, and whether the column is one."""
        column = self.begin + first * self.staging.width + column
        channel, inside = self.work.column_start(self.place, self.member.part, column)
        return self.begins + channel + self.first, inside

    @staticmethod
    def _late(element: Expr) -> Expr:
        return T.bitwise_and(element, T.int32(SECTOR // ITEM - 1))

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        pitch = self.staging.pitch
        for half, below in product(range(2), range(2)):
            slot, there = self.rows[2 * m + below]
            word = pack_16(self.work.output.dtype, *values[4 * half + 2 * below : 4 * half + 2 * below + 2])
            left, lates = self.left + (pair * 16 + half * 8), self.lates[2 * half : 2 * half + 2]
            targets = [self._at((left + i) * pitch + (slot + late)) for i, late in enumerate(lates)]
            there, name = T.Cast("int32", there), "hopper_put_apart"
            T.evaluate(T.cuda.func_call(name, word, targets[0], there, targets[1], there, source_code=PUT[name]))

    def store(self, first: int) -> None:
        staging, vector, sector = self.staging, UNIT // ITEM, SECTOR // ITEM
        threads, lanes = self.parts * WARPGROUP, staging.vectors
        columns = threads // lanes  # at once
        at, of_lane = named("at", T.truncmod(self.thread, lanes)), named("of_lane", T.truncdiv(self.thread, lanes))
        with T.serial(-(-staging.width // columns)) as more:
            column = named("column", more * columns + of_lane)
            channel, inside = self._channel(first, column)
            element = named("element", channel)
            late = named("late", self._late(element))
            # of the slots those from the first sector on that is this tile's, before the next tile's first
            begin = named("from_slot", T.Select(self.first == 0, late, T.Select(late > 0, sector, 0)))
            up = T.bitwise_and(late + (self.following - self.first) + (sector - 1), T.int32(-sector))
            end = named("to_slot", tirx.min(up, late + (self.plane - self.first)))
            first_slot = named("first_slot", at * vector)
            stored = tirx.all(self.there, of_lane < columns, column < staging.width, inside)
            stored = tirx.all(stored, first_slot < end, first_slot + vector > begin)
            with T.If(stored), T.Then():
                to = self.output.ptr_to([element - late + first_slot])
                source = self._at(column * staging.pitch + first_slot)
                name, text = f"hopper_copy_part_{vector}", COPY_PART.format(vector, VECTORS[UNIT], VECTORS[ITEM])
                call = name, to, source, begin - first_slot, end - first_slot
                T.evaluate(T.cuda.func_call(*call, source_code=text))
