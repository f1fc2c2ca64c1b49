"""The consumers: warpgroups that wait for a stage, multiply it by wgmma into registers, and free it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from tvm.script import tirx as T

from schedules.hopper.epilogue import Results
from schedules.hopper.geometry import ClusterPlace, Member, Work
from schedules.hopper.instructions import peer_of
from schedules.hopper.launch import SharedMemory
from schedules.hopper.products import Products
from schedules.hopper.residual import Residual, owner_of
from schedules.hopper.ring import Ring, writers
from schedules.hopper.turning import SlotRing
from schedules.steps.story import part
from schedules.tirx.types import Expr, Index, Variable
from schedules.tirx.values import named, when


@dataclass(frozen=True)
class Consumer:
    """A warpgroup that multiplies, `member` of whose threads this is, of a block that stands at `at` of one of
    `clusters`."""

    work: Work
    memory: SharedMemory
    ring: Ring
    at: ClusterPlace
    clusters: int
    member: Member
    products: Products
    results: Results
    slots: SlotRing | None  # of operand a, where it is turned beside the stages

    @T.inline
    def run(self, tile: Variable) -> None:
        """Compute this consumer's tiles of the block's, which begin with number `tile`."""
        # the block whose stage this thread says is free: each of the row and of the column
        peer = T.meta_var(named("peer", self.at.first + self.peer()))
        turn: T.int32
        turn = 0
        while tile + self.others(tile) * self.clusters < self.work.clusters:
            if self.work.config.ping_pong:
                part("The others' tiles: their stages go by")
                self.pass_by(tile)
                part("This one's, when all stages before are full")
                self.wait_turn(turn)
            place = T.meta_var(self.place(tile))
            self.results.warm(place)
            self.multiply_tile(place, peer, turn)
            part("The way out: a tile's results leave the registers while the producer fetches the next")
            if self.work.config.split_k > 1:
                exchange = T.meta_var(self.memory.exchange)
                exchange.send(self.products.sums, self.member, self.at, turn)
                number = T.meta_var(named("slice", exchange.slice(self.member.consumer, self.at.rank_k)))
                if number < self.work.slices:
                    exchange.receive(self.products.sums, self.member, self.at, number, turn)
                    self.emit_slice(place, number)
                turn = turn ^ 1
            else:
                self.results.emit(place, residual=self.residual(tile))
            tile = tile + self.clusters

    def emit_slice(self, place: Any, number: Expr) -> None:
        """Finish slice `number` of the tile's columns; all of them if there is but one."""
        slices = self.work.slices
        if slices > 1:
            self.results.emit(place, number * (self.work.config.columns // slices))
        else:
            self.results.emit(place)

    def residual(self, tile: Expr) -> Residual | None:
        """What comes of the tile's residual by TMA, if it does."""
        arrivals = self.memory.residual
        return Residual(arrivals, self.member, owner_of(self.work.config, tile, self.clusters)[1]) if arrivals else None

    @T.inline
    def pass_by(self, tile: Variable) -> None:
        """Go past the tiles of other consumers."""
        passed = T.meta_var(named("passed", self.others(tile)))  # tile changes in the loop
        for _ in T.serial(passed):
            position = T.meta_var(
                named("position", self.ring.stage + self.work.stages_at(self.place(tile), self.at.rank_k))
            )
            if self.slots is not None:
                self.slots.skip(T.truncdiv(position - self.ring.stage, self.stages_of_slot()))
            self.ring.skip(position)
            tile = tile + self.clusters

    @T.inline
    def multiply_tile(self, place: Any, peer: Expr, turn: Variable) -> None:
        """Multiply the stages of the tile at `place`, and free them."""
        count = T.meta_var(named("count", self.work.stages_at(place, self.at.rank_k)))
        self.products.begin_tile(place)
        before: T.int32
        before = 0
        if self.work.shifts is not None:
            of_phase = T.meta_var(named("of_phase", T.truncdiv(count, self.work.shifts.phases)))
            for phase in T.serial(self.work.shifts.phases):
                for step in T.serial(of_phase):
                    self.multiply_stage(phase * of_phase + step, before, peer)
                with T.If(phase < self.work.shifts.phases - 1), T.Then():
                    self.products.shift(self.member.lane, phase)
        elif self.slots is not None:
            self.multiply_chunks(count, before, peer)
        else:
            for step in T.serial(count):
                self.multiply_stage(step, before, peer)
        if self.work.config.ping_pong:
            self.give_turn()
            turn = turn ^ 1
        if not self.work.config.promoted:
            self.products.settle()
            self.release(before, 0, peer)
        if self.work.shifts is not None:
            self.products.shift_back(self.member.lane)

    def multiply_chunks(self, count: Expr, before: Variable, peer: Expr) -> None:
        """Multiply `count` stages, of whole turned chunks: unrolled, so that where the taps of each look is known."""
        turned = self.work.a.turned
        assert turned
        stages, unrolled = turned.stages, turned.unrolled
        with T.serial(T.truncdiv(count, stages)) as chunk, T.serial(stages // unrolled) as part_of_chunk:
            for number in range(unrolled):
                of_chunk = part_of_chunk * unrolled + number if unrolled < stages else number
                self.multiply_stage(chunk * stages + of_chunk, before, peer, of_chunk)

    @T.inline
    def multiply_stage(self, step: Expr, before: Variable, peer: Expr, of_chunk: Index = 0) -> None:
        """Multiply stage number `step` of a tile, `of_chunk` of those that take a turned chunk, when it is full, and
        free the one `before`, or itself."""
        self.ring.wait_full()
        if self.slots is not None:
            self.wait_slot(of_chunk)
        if self.work.config.promoted:
            self.products.promote_stage(step, partial(self.ring.release, self.ring.stage, self.member.thread, peer))
        else:
            self.products.multiply_stage(step, partial(self.release, before, of_chunk, peer), of_chunk)
            before = self.ring.stage
        if self.slots is not None:
            self.leave_slot(of_chunk)
        self.ring.advance()

    def stages_of_slot(self) -> int:
        """Stages that take the same turned chunk, one after the other."""
        turned = self.work.a.turned
        assert turned
        return turned.stages

    def wait_slot(self, of_chunk: Index) -> None:
        """Wait for the chunk of operand a, of whose stages it is the first."""
        assert self.slots
        when(of_chunk == 0, self.slots.wait_full)

    def leave_slot(self, of_chunk: Index) -> None:
        """Go on to the next chunk of operand a after the last stage that takes this one."""
        assert self.slots
        when(of_chunk == self.stages_of_slot() - 1, self.slots.advance)

    def release(self, before: Expr, of_chunk: Index, peer: Expr) -> None:
        """Free the stage `before` number `of_chunk` of a chunk, and operand a's slot if no other takes it."""
        self.ring.release(before, self.speaker, peer)
        if self.slots:
            when(of_chunk == 0, partial(self.slots.release, self.member.thread == 0))

    def place(self, tile: Expr) -> Any:
        """Where the block's tile of a cluster's number `tile` lies."""
        return self.work.place(tile, self.at.rank_m, self.at.rank_n)

    def peer(self) -> Expr:
        """Of the blocks that share this one's share of the reduction, the one that this thread speaks to."""
        config = self.work.config
        return peer_of(self.speaker, self.at.rank_m, self.at.rank_n, config.cluster_m, config.cluster_n)

    @property
    def speaker(self) -> Expr:
        """The thread's number among those that say that a stage has been read, each to another block.  Of threads that
        read it themselves each warp says so, since the end of a wgmma tells it nothing of what other warps read."""
        return self.member.lane if self.work.config.by_threads else self.member.thread

    def others(self, tile: Expr) -> Index:
        """Tiles of other consumers between the consumer's last, if any, and its next; `tile` follows the last."""
        config = self.work.config
        if not config.ping_pong:
            return 0
        return T.Select(tile < self.clusters, self.member.consumer, config.consumers - 1)

    def wait_turn(self, turn: Expr) -> None:
        """Wait until the stages before this consumer's tile have been multiplied; the first one's first are none."""
        consumer = self.member.consumer
        assert self.memory.turns
        self.memory.turns.wait(consumer, turn ^ T.Cast("int32", consumer == 0))

    def give_turn(self) -> None:
        """Let the next consumer multiply."""
        consumer = self.member.consumer
        assert self.memory.turns
        self.memory.turns.arrive(T.Select(consumer == self.work.config.consumers - 1, 0, consumer + 1))


class Cores:
    """What multiplies in a block of `work`, and what it takes of shared memory from `pool`: here the consumers, by
    wgmma; a subclass says so otherwise.  `leader` is true for the thread that initialises barriers."""

    consumers: ClassVar[str] = "The consumers: wait for a stage, multiply it by wgmma into registers, and free it"

    def __init__(self, work: Work, pool: T.SMEMPool, leader: Expr) -> None:
        self.work, self.config = work, work.config

    def begin(self, group: Expr, warp: Expr) -> None:
        """Set up what the block multiplies with, before the block's other barriers, by this warp of a warpgroup."""

    def ring(self, memory: SharedMemory, at: ClusterPlace, stage: Variable, phase: Variable) -> Ring:
        """The ring, before its first stage."""
        return Ring(self.config, self.work.stage_bytes, memory.stages, memory.full, memory.empty, stage, phase)

    @property
    def drains(self) -> bool:
        """Whether all that other blocks write into a block's shared memory has come when its last stages are free and
        its sums finished: not what says that a next tile's sums may be sent."""
        return not self.work.a.copied and not (self.config.split_k > 1 and self.work.again)

    def drain(self, ring: Ring) -> None:
        """Have the producer wait until its last stages are free, in every block that they were loaded into: consumers
        finish meanwhile, and no block waits for all of the others to end."""
        if self.drains and writers(self.config) > 1:
            with T.serial(self.config.num_stages):
                ring.wait_empty()
                ring.advance()

    def beside_producer(
        self, ring: Ring, memory: SharedMemory, at: ClusterPlace, clusters: Index, warp: Expr, tile: Variable
    ) -> None:
        """What other warps of the producer's do with the block's tiles from number `tile` on."""

    def consumer(
        self,
        ring: Ring,
        memory: SharedMemory,
        at: ClusterPlace,
        clusters: Any,
        member: Member,
        way_out: Callable[..., Results],
    ) -> Any:
        """What runs through the block's tiles, `member` of whose threads this is; `way_out` makes the way out of sums,
        staging memory and member."""
        slots = memory.turned.ring_of_rows() if memory.turned else None
        products = Products(self.work, ring, memory.filters, member, at, slots)
        results = way_out(products.sums, memory.staging, member)
        return Consumer(self.work, memory, ring, at, clusters, member, products, results, slots)

    def end(self, group: Expr, warp: Expr) -> None:
        """Wait for what other blocks of the cluster may still write, and give back what `begin` took."""
        if self.config.cluster > 1 and not self.drains:
            T.evaluate(T.cuda.cluster_sync())
