"""Results of all parts of a tile that leave together.

By planes: where the tile has all of an image's results, whose channels then follow each other as in the tensor, so that
a bulk copy takes them.  By strips: where planes are larger, and tiles overlap so that ordinary stores write whole
sectors of L2.

Source: PTX ISA, "cp.async.bulk".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm import tirx
from tvm.script import tirx as T

from schedules.hopper.config import ROWS, WARPGROUP
from schedules.hopper.shared import SECTOR, UNIT, PlaneStaging, StripStaging
from schedules.hopper.stores import COPY_PART, PUT, PUT_APART, VECTORS, Stores, barrier
from schedules.tirx.types import Buffer, Expr, Pointer
from schedules.tirx.values import kept, named
from schedules.tirx.words import pack_16

ITEM = 2  # bytes of a result of 16 bits
_TOGETHER = 8  # named barrier of all consumers
_STORE = "cp.async.bulk.global.shared::cta.bulk_group"


@dataclass
class JoinedStores(Stores):
    """Results that leave when all parts of a tile have written theirs."""

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
            yield self.work.plane_slot(self.place, self.member.part, self.row_of(m, below))

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
    """A whole image's results of all columns side by side, which one thread has leave."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.work.output.staging, PlaneStaging)
        self.staging = self.work.output.staging
        self.rows = [
            (kept("slot", image * self.staging.image + result), named("there", there))
            for image, result, there in self._rows()
        ]

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        plane, dtype = self.staging.plane, self.work.output.dtype
        if self.work.a.pairs_rows and plane % 2 == 0:  # the rows' results share a word
            slot, there = self.rows[2 * m]
            for half, j in product(range(2), range(2)):
                word = pack_16(dtype, values[4 * half + j], values[4 * half + 2 + j])
                target = self._at((self.left + (pair * 16 + half * 8 + j)) * plane + slot)
                call = "hopper_put_two", word, target, T.Select(there, T.int32(2), T.int32(0))
                T.evaluate(T.cuda.func_call(*call, source_code=PUT["hopper_put_two"]))
            return
        for half, below in product(range(2), range(2)):
            slot, there = self.rows[2 * m + below]
            word = pack_16(dtype, *values[4 * half + 2 * below : 4 * half + 2 * below + 2])
            target = self._at((self.left + (pair * 16 + half * 8)) * plane + slot)
            name, source = f"hopper_put_apart_{plane}", PUT_APART.format(plane)
            T.evaluate(T.cuda.func_call(name, word, target, there, source_code=source))

    def before(self) -> None:
        with T.If(self.thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
        super().before()

    def written(self) -> None:
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        super().before()

    def store(self, first: int) -> None:
        staging = self.staging
        begin, apart, images = self.work.planes_at(self.place)
        column = self.begin + first * staging.width
        channel, _ = self.work.column_start(self.place, self.member.part, column)
        start = named("start", begin + channel)
        # of an image, from the first column on
        inside = named("elements", tirx.max(0, tirx.min(apart - channel, staging.image)))
        nbytes = T.Cast("uint32", inside * ITEM)
        with T.If(tirx.all(self.thread == 0, inside > 0)), T.Then():
            with T.serial(staging.images, unroll=False) as image, T.If(image < images), T.Then():
                to = self.output.ptr_to([start + image * apart])
                T.evaluate(T.ptx[_STORE](to, self._at(image * staging.image), nbytes))
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())


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
