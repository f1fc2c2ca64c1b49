"""A tile's residual by TMA into memory of its own, where it waits until its sums are there.

Each consumer has room for what it adds to one tile, in boxes as those that results leave by.  Two mbarriers of a box:
`full` completes when it has arrived, `empty` when all warps of the consumer have read it, from when on the producer
loads that of the consumer's next tile: long before it is needed, while others are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T

from schedules.hopper.config import WARPS, HopperConfig
from schedules.hopper.geometry import Added, Member
from schedules.hopper.ring import FILLS
from schedules.hopper.shared import UNIT, LineStaging
from schedules.hopper.stores import BoxStores, LineStores
from schedules.tirx.types import Buffer, Expr, Index
from schedules.tirx.values import named
from schedules.tirx.words import read_shared_apart, read_shared_pair


class Arrivals:
    """The boxes of all consumers of a block in `memory`, as `added` has them."""

    def __init__(self, added: Added, memory: Buffer, consumers: int, pool: T.SMEMPool, leader: Expr) -> None:
        self.added, self.memory, self.count = added, memory, consumers * added.boxes
        self.full = TMABar(pool, self.count, leader=leader)
        self.empty = MBarrier(pool, self.count, leader=leader)

    def init(self) -> None:
        """Set the barriers up."""
        self.full.init(FILLS)
        self.empty.init(WARPS)

    def number(self, consumer: Index, box: Index) -> Index:
        """Of a consumer's box, among all."""
        return consumer * self.added.boxes + box


def owner_of(config: HopperConfig, tile: Expr, clusters: Index) -> tuple[Index, Expr]:
    """The consumer that a block's tile of a cluster's number `tile` of `clusters` is for, 0 if it is for all, and the
    parity of its tiles."""
    number, owners = T.truncdiv(tile, clusters), config.consumers // config.parts
    if owners == 1:
        return 0, named("residual_turn", T.bitwise_and(number, 1))
    turn = named("residual_turn", T.bitwise_and(T.truncdiv(number, owners), 1))
    return named("owner", T.truncmod(number, owners)), turn


@dataclass(frozen=True)
class Residual:
    """That of a tile as a consumer reads it, `member` of whose threads this is; `turn` is the parity of its tiles."""

    arrivals: Arrivals
    member: Member
    turn: Expr

    def wait(self, box: int) -> None:
        """Wait for box number `box` of the consumer's columns."""
        self.arrivals.full.wait(self.arrivals.number(self.member.consumer, box), self.turn)

    def pair(
        self, stores: BoxStores | LineStores, box: int, m: int, pair: int, half: int, below: int, lane: Expr
    ) -> Sequence[Expr]:
        """The elements of a thread's two results of a box, of its warp's 16 rows number `m`, there 8 * `below` rows
        down, and of the 16 columns number `pair`, in their half number `half`."""
        staging, added = stores.staging, self.arrivals.added
        source, memory = added.source, self.arrivals.memory
        start = self.arrivals.number(self.member.consumer, box) * added.box_bytes
        top = stores.row(m) + 8 * below
        if isinstance(staging, LineStaging):
            column = (2 * pair + half) * 8 + T.truncmod(lane, 4) * 2
            more = start + T.truncdiv(lane, 4) * staging.item
            places = [memory.ptr_to([more + staging.chunk(top, column + i)]) for i in range(2)]
            return read_shared_apart(source.tensor, source.dtype, places)
        row = top + T.truncdiv(lane, 4)
        chunk, rest = divmod((2 * pair + half) * 8 * staging.item, UNIT)
        left = rest + T.truncmod(lane, 4) * (2 * staging.item)
        at = staging.chunk(row, chunk + T.truncdiv(left, UNIT)) + T.truncmod(left, UNIT)
        return read_shared_pair(source.tensor, source.dtype, memory.ptr_to([start + at]))

    def free(self, box: int) -> None:
        """Say that this warp has read box number `box`, which TMA may write then."""
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        T.evaluate(T.cuda.warp_sync())
        with T.If(self.member.lane == 0), T.Then():
            self.arrivals.empty.arrive(self.arrivals.number(self.member.consumer, box))
