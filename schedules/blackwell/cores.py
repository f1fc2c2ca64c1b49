"""Tensor memory and its barriers, the warp that multiplies, and the consumers that read its sums.

A tile's sums take the buffers of tensor memory in turn.  Two mbarriers of a buffer: `full` completes when all products
of a tile are there; `empty`, when all warps that finish it have read them, of both blocks where two multiply together.
Of those the first issues the products, waits for both blocks' loads, and has the stages of both freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, TCGen05Bar
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.blackwell.config import LANES, PIECE, BlackwellConfig
from schedules.blackwell.instructions import EIGHT, Multiply, descriptor, read_sums
from schedules.hopper.config import K_BYTES, WARPS
from schedules.hopper.consumer import Cores
from schedules.hopper.epilogue import Results
from schedules.hopper.geometry import ClusterPlace, Member, Work
from schedules.hopper.instructions import column_mask, row_mask
from schedules.hopper.launch import SharedMemory, wait_for_block
from schedules.hopper.products import units
from schedules.hopper.ring import Ring
from schedules.hopper.shared import aligned
from schedules.steps.story import part
from schedules.tirx.cluster import in_block
from schedules.tirx.types import Buffer, Expr, Index, Pointer, Variable
from schedules.tirx.values import named

MULTIPLIER = 1  # warp of the producer's warpgroup; its first loads
_COMMIT = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster{}.b64"


@dataclass
class PairRing(Ring):
    """The ring of one of two blocks that multiply together, number `rank` of them: the loads of both arrive at the
    first one's barriers, which alone says what to expect."""

    rank: Index
    group: ClassVar[str] = ".cta_group::2"

    @property
    def arrived(self) -> Expr:
        return named("arrived", in_block(self.full.ptr_to([self.stage]), 0))

    def expect(self, nbytes: Index) -> None:
        with T.If(self.rank == 0), T.Then():
            super().expect(nbytes * self.config.cta_group)


@dataclass
class TensorMemory:
    """The tensor memory of a block, which begins where `cell` of shared memory says, and the barriers of its buffers;
    `full` and `empty` as above."""

    config: BlackwellConfig
    cell: Buffer
    full: TCGen05Bar
    empty: MBarrier

    @property
    def start(self) -> Expr:
        return named("tensor_memory", self.cell[0])


class TensorCores(Cores):
    """One thread multiplies by tcgen05 into tensor memory, from where the consumers finish tiles."""

    consumers: ClassVar[str] = "The consumers: wait for a tile's sums, and read them out of tensor memory"
    config: BlackwellConfig

    def __init__(self, work: Work, pool: T.SMEMPool, leader: Expr) -> None:
        super().__init__(work, pool, leader)
        buffers = self.config.buffers
        cell = pool.alloc((1,), "uint32", align=16)
        IRBuilder.name("tensor_memory_at", cell)
        barriers = (kind(pool, buffers, leader=leader) for kind in (TCGen05Bar, MBarrier))
        self.memory = TensorMemory(self.config, cell, *barriers)

    def begin(self, group: Expr, warp: Expr) -> None:
        config, memory = self.config, self.memory
        part("Tensor memory: a warp allocates columns for the sums, and lets other blocks allocate theirs")
        memory.full.init(1)
        memory.empty.init(config.consumers * WARPS * config.cta_group)
        cta_group = f"cta_group::{config.cta_group}"
        if config.cta_group > 1:  # both blocks allocate together
            T.evaluate(T.cuda.cluster_sync())
        with T.If(self._multiplies(group, warp)), T.Then():
            alloc = T.ptx[f"tcgen05.alloc.{cta_group}.sync.aligned.shared::cta.b32"]
            T.evaluate(alloc(memory.cell.ptr_to([0]), T.uint32(config.tensor_columns)))
            T.evaluate(T.ptx[f"tcgen05.relinquish_alloc_permit.{cta_group}.sync.aligned"]())

    def _multiplies(self, group: Expr, warp: Expr) -> Expr:
        return tirx.all(group == self.config.consumers, warp == MULTIPLIER)

    def ring(self, memory: SharedMemory, at: ClusterPlace, stage: Variable, phase: Variable) -> Ring:
        if self.config.cta_group == 1:
            return super().ring(memory, at, stage, phase)
        place = self.config, self.work.stage_bytes, memory.stages, memory.full, memory.empty, stage, phase
        return PairRing(*place, at.rank_m)

    def drain(self, ring: Ring) -> None:
        with T.serial(self.config.num_stages):
            ring.wait_empty()
            ring.advance()

    def beside_producer(
        self, ring: Ring, memory: SharedMemory, at: ClusterPlace, clusters: Index, warp: Expr, tile: Variable
    ) -> None:
        multiplies = [at.rank_m == 0] if self.config.cta_group > 1 else []
        with T.If(tirx.all(warp == MULTIPLIER, *multiplies)), T.Then():
            part("The multiplier: a warp has the tensor cores multiply every stage that is full")
            Multiplier(self.work, self.memory, memory, ring, at, clusters).run(tile)

    def consumer(
        self,
        ring: Ring,
        memory: SharedMemory,
        at: ClusterPlace,
        clusters: Any,
        member: Member,
        way_out: Callable[..., Results],
    ) -> Finisher:
        sums = T.alloc_local((min(PIECE, self.config.columns),), Multiply.of(self.work).accumulator)
        IRBuilder.name("sums", sums)
        results = way_out(sums, memory.staging, member)
        assert isinstance(results, TensorResults)
        return Finisher(self.work, self.memory, at, clusters, results)

    def end(self, group: Expr, warp: Expr) -> None:
        config = self.config
        T.evaluate(T.ptx["tcgen05.fence::before_thread_sync"]())
        if config.cluster > 1:
            T.evaluate(T.cuda.cluster_sync())
        else:
            wait_for_block(config)
        T.evaluate(T.ptx["tcgen05.fence::after_thread_sync"]())
        with T.If(self._multiplies(group, warp)), T.Then():
            dealloc = T.ptx[f"tcgen05.dealloc.cta_group::{config.cta_group}.sync.aligned.b32"]
            T.evaluate(dealloc(self.memory.start, T.uint32(config.tensor_columns)))


class Multiplier:
    """The warp that multiplies the stages of `ring` into tensor memory, of the block at `at` of one of `clusters`: it
    waits as one, and one of its threads issues, as the producer's do."""

    def __init__(
        self, work: Work, sums: TensorMemory, memory: SharedMemory, ring: Ring, at: ClusterPlace, clusters: Index
    ) -> None:
        self.work, self.config, self.sums = work, sums.config, sums
        self.ring, self.at, self.clusters = ring, at, clusters
        self.multiply = Multiply.of(work)
        self.start = sums.start
        self.a = descriptor("a_tile", work.a.tile, ring.memory.ptr_to([0]))
        filters = memory.filters.ptr_to([0 if self.config.stationary else work.b_start])
        self.b = descriptor("b_tile", work.b.tile, filters)

    @T.inline
    def run(self, tile: Variable) -> None:
        """Multiply the block's tiles, which begin with number `tile`."""
        buffer: T.int32
        buffer = 0
        turn: T.int32
        turn = 0
        while tile < self.work.clusters:
            place = T.meta_var(self.work.place(tile, self.at.rank_m, self.at.rank_n))
            count = T.meta_var(named("count", self.work.stages_at(place, 0)))
            part("A buffer whose sums have been read, for the next tile's")
            self.sums.empty.wait(buffer, turn ^ 1)
            T.ptx["tcgen05.fence::after_thread_sync"]()
            part("The tile's stages: multiplied, and freed when that is done")
            for step in T.serial(count):
                self.ring.wait_full()
                T.ptx["tcgen05.fence::after_thread_sync"]()
                if T.cuda.elect_sync():
                    self.multiply_stage(step, buffer)
                    self.commit(self.ring.empty.ptr_to([self.ring.stage]), self.readers())
                self.ring.advance()
            if T.cuda.elect_sync():
                self.commit(self.sums.full.ptr_to([buffer]), self.finishers())
            buffer = buffer + 1
            if buffer == self.config.buffers:
                buffer = 0
                turn = turn ^ 1
            tile = tile + self.clusters

    def multiply_stage(self, step: Expr, buffer: Expr) -> None:
        """Issue the products of the ring's stage, number `step` of a tile whose sums are in a buffer."""
        work, tile = self.work, self.work.a.tile
        sums = named("sums_at", self.start + T.Cast("uint32", buffer * self.config.tile_columns))
        steps, blocks = range(tile.k * tile.item // K_BYTES), range(self.config.block_m // LANES)
        for k, (number, each), block in product(steps, enumerate(work.products), blocks):
            offset = each.a + tile.k_offset(k) + tile.row_offset(block * LANES)
            a = self.a + units(self.ring.stage, work.stage_bytes, offset)
            add = step > 0 if k == number == 0 else T.bool(True)
            self.multiply.emit(sums + T.uint32(block * self.config.block_n), a, self._b(each.b, k, step), add)

    def _b(self, begin: int, k: int, step: Expr) -> Expr:
        """Operand b; where it stays, the tile's stages lie one behind the other."""
        offset = begin + self.work.b.tile.k_offset(k)
        if self.config.stationary:
            return self.b + units(step, aligned(self.work.b.nbytes), offset)
        return self.b + units(self.ring.stage, self.work.stage_bytes, offset)

    def commit(self, barrier: Pointer, blocks: Expr | None) -> None:
        """Arrive at the barrier, of this block or of `blocks` as bits, when all that was issued is done."""
        form = _COMMIT.format(self.config.cta_group, "" if blocks is None else ".multicast::cluster")
        T.evaluate(T.ptx[form](barrier, *([] if blocks is None else [blocks])))

    def readers(self) -> Expr | None:
        """The blocks whose loads write into the stages that this one reads; None for itself alone."""
        m, n, first = self.config.cluster_m, self.config.cluster_n, self.at.first
        row, column = row_mask(n, first + self.at.rank_m * n), column_mask(m, n, first + self.at.rank_n)
        return row if column is None else column if row is None else T.bitwise_or(row, column)

    def finishers(self) -> Expr | None:
        """The blocks that finish what this one multiplies."""
        return self.readers() if self.config.cta_group > 1 else None


class TensorResults(Results):
    """The way out of tensor memory: `sums` are those of PIECE columns, which `fetch` brings."""

    def begin(self, at: Expr, free: Callable[[], None]) -> None:
        """Go to the sums that begin at `at` for this thread's warp; `free` says that all have been read."""
        self.at, self.free = at, free

    def _piece(self, column: int) -> tuple[int, int]:
        """The first column of those that are fetched together with `column`, and how many they are."""
        first = column // PIECE * PIECE
        return first, min(PIECE, self.work.config.columns - first)

    def fetch(self, column: int) -> None:
        first, count = self._piece(column)
        if column != first:
            return
        targets = [self.sums[i] for i in range(count)]
        read_sums(targets, self.at + T.uint32(first), self.sums.dtype)
        if first + count == self.work.config.columns:
            self.free()

    def fragment(self, which: int, m: int, group: int, register: int) -> Expr:
        first, count = self._piece(group * EIGHT)
        return self.sums[(m * count + group * EIGHT - first) // 2 + register]


@dataclass(frozen=True)
class Finisher:
    """The consumer that finishes tiles, of a block at `at` of one of `clusters`."""

    work: Work
    sums: TensorMemory
    at: ClusterPlace
    clusters: Any
    results: TensorResults

    @T.inline
    def run(self, tile: Variable) -> None:
        """Finish the block's tiles, which begin with number `tile`."""
        start = T.meta_var(self.start())
        buffer: T.int32
        buffer = 0
        turn: T.int32
        turn = 0
        while tile < self.work.clusters:
            place = T.meta_var(self.work.place(tile, self.at.rank_m, self.at.rank_n))
            self.sums.full.wait(buffer, turn)
            T.ptx["tcgen05.fence::after_thread_sync"]()
            part("The way out: a tile's results leave while the next is multiplied")
            self.begin(start, buffer)
            self.results.emit(place)
            buffer = buffer + 1
            if buffer == self.sums.config.buffers:
                buffer = 0
                turn = turn ^ 1
            tile = tile + self.clusters

    def start(self) -> Expr:
        """Where the warp's lanes have the first consumer's sums of the first buffer."""
        member = self.results.member
        lanes = T.shift_left(member.warp * 32, 16)
        return named("own_sums", self.sums.start + T.Cast("uint32", lanes + member.consumer * self.work.config.block_n))

    def begin(self, start: Expr, buffer: Expr) -> None:
        """Have the way out read the sums of a buffer, and free it then."""
        at = named("sums_at", start + T.Cast("uint32", buffer * self.sums.config.tile_columns))
        self.results.begin(at, lambda: self.free(buffer))

    def free(self, buffer: Expr) -> None:
        """Say that this warp has read a buffer."""
        T.evaluate(T.ptx["tcgen05.fence::before_thread_sync"]())
        T.evaluate(T.cuda.warp_sync())
        with T.If(self.results.member.lane == 0), T.Then():
            if self.sums.config.cta_group > 1:
                self.sums.empty.arrive(buffer, remote=0)
            else:
                self.sums.empty.arrive(buffer)
