"""From sums to results: what a consumer's thread does with its accumulators before they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from schedules.hopper.config import ROWS
from schedules.hopper.fragments import tile_row
from schedules.hopper.shared import FOLDS, folded
from schedules.hopper.stores import stores_of
from schedules.hopper.work import Member, Work
from schedules.tirx.values import named

if TYPE_CHECKING:
    from schedules.tirx.types import Buffer, Expr, Tensors, Variable


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

    def fragment(self, which: int, m: int, group: int, register: int) -> Expr:
        """The accumulator of the sums number `which`, of 64 rows number `m` of the consumer's, of a group of eight
        columns, and there one of the thread's four."""
        blocks_m, groups = self.work.config.rows // ROWS, self.work.config.columns // 8
        return self.sums[((which * blocks_m + m) * groups + group) * 4 + register]

    def totals(self, m: int, group: int, below: int) -> Sequence[Expr]:
        """The two sums of a thread in columns 8 * `group` + lane % 4 * 2 + (0, 1) of its consumer, in 64 rows number
        `m`, there 8 * `below` rows down; all threads of a warp ask together."""
        return [self.fragment(0, m, group, 2 * below + j) for j in range(2)]

    def emit(self, place: Any) -> None:
        """Finish the tile at `place` and issue its stores."""
        work, tensors, member = self.work, self.tensors, self.member
        warp, lane = member.warp, member.lane
        staging = work.output.staging
        a, b = work.a.tile, work.b.tile
        row_of = tile_row if work.a.by_registers else _fragment_row
        tops = [named("top", warp * 16 + row_of(lane, below)) for below in (0, 8)]
        # columns of eight are permuted by XOR with 0 to 3: bit 1 changes which lane has them, bit 0 which register
        lanes = [lane, named("across", T.bitwise_xor(lane, 1))] if b.fold == FOLDS[0] else [lane]
        lefts = [named("left", T.truncmod(at, 4) * 2) for at in lanes]
        stores = stores_of(work, tensors, self.output_map, place, self.memory, member)

        row_terms = [
            work.row_term(tensors, place, member.part, folded(top + m * ROWS, a.fold))
            for m in range(staging.rows // ROWS)
            for top in tops
        ]

        for first in range(0, staging.columns // staging.width, staging.together):
            stores.before()
            for store in range(staging.together):
                for pair in range(staging.width // 16):
                    column = (first + store) * staging.width + pair * 16
                    swaps = [folded(column + 8 * half, b.fold) % 8 for half in range(2)]
                    across = swaps[0] // 2  # as swaps[1] // 2: neighbouring eights differ in bit 0
                    columns = [lefts[across] + column + 8 * half + j for half in range(2) for j in range(2)]
                    terms = [work.column_term(tensors, place, at) for at in columns]
                    for m in range(staging.rows // ROWS):
                        values = []
                        for half, below in product(range(2), range(2)):
                            group, of_row = (column + work.margin) // 8 + half, row_terms[2 * m + below]
                            totals = self.totals(m, group, below)
                            for i in range(2):
                                j = 2 * half + i
                                total = totals[i ^ swaps[half] % 2]
                                values.append(work.finish(tensors, place, total, of_row, terms[j], columns[j]))
                        stores.write(store, values, m, pair, lanes[across])
            stores.written()
            stores.store(first)


def _fragment_row(lane: Expr, below: int) -> Expr:
    return T.truncdiv(lane, 4) + below
