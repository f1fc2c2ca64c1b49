"""The kernel of `cluster`: parts of a row in the blocks of a cluster, under the row program on packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import TMABar
from tvm.script import tirx as T

from schedules.operators.softmax.cluster_config import ClusterConfig, pack_sizes
from schedules.operators.softmax.definition import SoftmaxProblem, Values
from schedules.operators.softmax.loaded_program import LoadedKernel, LoadedRow
from schedules.operators.softmax.pack_program import module
from schedules.operators.softmax.pack_sources import STORE_SHARED
from schedules.operators.softmax.row_packs import Scalar, where
from schedules.steps.story import inside_part, part
from schedules.tirx.cluster import in_block, say_begun, wait_in_cluster, wait_until_begun
from schedules.tirx.values import named

# the block's reductions into a slot of another block, whose mbarrier counts the bytes
_SEND = """
__device__ __forceinline__ void cluster_send_{count}({parameters}, unsigned at, unsigned barrier) {{
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.f32 [%{count}], {values}, [%{last}];"
    :: {operands}, "r"(at), "r"(barrier) : "memory");
}}
"""


def program(problem: SoftmaxProblem, config: ClusterConfig) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""

    def blocks(rows: Any) -> Any:
        most = config.grid // config.cluster
        return T.Cast("int32", T.min(rows, T.int64(most)) if most else rows) * config.cluster

    def emit(tensors: dict[str, Any], rows: Any, block: Any, warp: Any, lane: Any) -> None:
        ClusterKernel(problem, config, tensors, rows, warp, lane).emit(block, blocks(rows))

    return module(problem, config.threads // 32, blocks, config.blocks_sm, emit, config.cluster)


class ClusterKernel(LoadedKernel):
    """The body of the kernel for one thread; its methods emit statements."""

    always = True
    redux = True

    def __init__(
        self, problem: SoftmaxProblem, config: ClusterConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        self.config = config
        self.first_in_registers = config.in_shared
        self.part, self.least = config.part(problem), config.least(problem)
        self.sizes = pack_sizes(problem)
        self.steps = [step.name for step in self.program.reductions]

    def emit(self, block: Any, blocks: Any) -> None:
        part("Shared memory: packs that wait there, what warps and blocks exchange, a barrier that counts its bytes")
        config = self.config
        pool = T.SMEMPool()
        packs = config.in_shared * config.threads
        self.memory = {
            name: pool.alloc((packs * size,), "uint8", align=16) for name, size in self.sizes.items() if packs
        }
        turns = 2 if config.grid else 1  # the next row's may come while this row's are read
        alternate = turns > 1 and self.exchanges == 1
        self.exchange = pool.alloc(((1 + alternate) * self.exchanged * config.threads // 32,), "float32", align=16)
        self.slots = pool.alloc((turns * self.senders * sent(len(self.steps)),), "float32", align=16)
        self.arrived = TMABar(pool, turns)
        pool.commit()
        part("Which rows are whose: a cluster to each, and of it a part to each block")
        self.thread = self.of_row = T.thread_id([config.threads])
        self.warp, self.lane = T.shift_right(self.thread, 5), T.bitwise_and(self.thread, 31)
        self.rank = named("rank", T.truncmod(block, config.cluster))
        self.before = named("before", self.rank * self.part)  # packs of the row's earlier blocks
        if config.kept == "packed" and self.item < 4:
            self.zero = self.unknown_zero()
        self.row = Scalar("row", T.Cast("int64", T.truncdiv(block, config.cluster)), "int64")
        self.fetch_first()
        if not config.grid:
            self.compute_row()
            return
        self.set_up()
        self.clusters = named("clusters", T.Cast("int64", T.truncdiv(blocks, config.cluster)))
        self.turn = Scalar("turn", 0) if alternate else None
        self.rows_before = Scalar("rows_before", 0)
        wait_until_begun()
        with T.While(self.row.value < self.rows):
            self.compute_row()
            self.row.set(self.row.value + self.clusters)
            self.rows_before.set(self.rows_before.value + 1)

    def set_up(self) -> None:
        with inside_part("Set up the barrier, and have the cluster know"):
            self.arrived.init(1)
            T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
            say_begun()

    def read_row(self, row: LoadedRow) -> None:
        """While a lone row is on its way, there is time to set up what waits for it."""
        super().read_row(row)
        if not self.config.grid:
            self.set_up()

    # ---- What waits in shared memory ----

    def fetch_first(self) -> None:
        """Have the packs of the first row copied that wait in shared memory."""
        if self.first_in_registers:
            row = self.place()
            with inside_part("Fetch: each thread has those packs copied that wait in shared memory"):
                for p in range(self.first_in_registers):
                    self.fetch(row, p)

    def fetch_next(self, p: int) -> None:
        """Have round p of the cluster's next row copied, if there is one, into the place of this row's."""
        with inside_part("Fetch the next row's pack into the place of this one"), where(self.following < self.rows):
            self.fetch(self.following_row, p, mask=not self.aligned)

    def fetch(self, row: LoadedRow, p: int, mask: bool = True) -> None:
        """Have round p of a row copied, of the mask of columns only with `mask`: where rows are whole packs, a thread
        has the same columns of all."""
        at = self.first_of(row, p, self.number(p))
        for name, size in self.sizes.items():
            to = self.waiting(name, p)
            if self.has_rows(name):
                form = "cp.async.cg.shared.global" if size == 16 else "cp.async.ca.shared.global"
                # without a cache policy: with one (.L2::cache_hint) an H200 called it an illegal instruction
                T.evaluate(T.ptx[form](to, self.tensors[name].ptr_to([at]), size))
            elif self.aligned and mask:
                source = self.tensors[name].ptr_to([self.number(p) * self.pack - row.shift])
                T.evaluate(T.ptx["cp.async.cg.shared.global"](to, source, size))
            elif mask:
                words = T.alloc_local((self.each,), "uint32")
                self.gather_mask(words, 0, row, p, self.number(p))
                self.call("pack_store_shared", *(words[k] for k in range(self.each)), to, source=STORE_SHARED)
        T.evaluate(T.ptx.cp.async_.commit_group())

    def waiting(self, name: str, p: int) -> Any:
        """Where this thread's pack of round p waits."""
        return self.memory[name].ptr_to([(p * self.threads + self.thread) * self.sizes[name]])

    def has_rows(self, name: str) -> bool:
        return name in (argument.name for argument in self.inputs)

    # ---- A row ----

    def place(self) -> LoadedRow:
        return self.placed(self.row.value, self.before, self.part)

    def each_pack(self, row: LoadedRow, *needs: str, stored: bool = False) -> Iterator[tuple[int, Any]]:
        """Packs out of shared memory and out of registers; these are stored first, and are free for the others then."""
        first, self.fresh = self.fresh, False
        if first:
            self.read_row(row)
        if stored:
            yield from super().each_pack(row, *needs, stored=stored)
        for p in range(self.first_in_registers):
            i = self.number(p)
            if first:
                T.evaluate(T.ptx.cp.async_.wait_group(self.first_in_registers - 1 - p))
            for name in self.words:
                if name in needs and name in self.sizes:
                    self.load(self.words_at(name, p), self.waiting(name, p))
                    if name != "drop" and self.has_rows(name):
                        self.fill(name, row, p, i)
            yield p, i
            if stored and self.config.grid:
                self.fetch_next(p)
            # or the compiler would read many at once, and keep in registers what it is to read again
            T.evaluate(T.cuda.warp_sync())
        if not stored:
            yield from super().each_pack(row, *needs, stored=stored)

    @property
    def senders(self) -> int:
        """Of a cluster's parts of a row: its blocks, or all their warps."""
        return self.config.cluster * (self.threads // 32 if self.config.direct else 1)

    def combined(self, reductions: Values) -> Values:
        """The row's reductions from the block's, unless its warps have sent theirs."""
        if self.config.direct:
            return reductions
        return self.merged(self.exchanged_parts(reductions, self.thread, self.rank), self.config.cluster)

    def over_warps(self, mine: Values, first: LoadedRow | None) -> Values:
        if not self.config.direct:
            return super().over_warps(mine, first)
        of_lane = self.exchanged_parts(mine, self.lane, self.rank * (self.threads // 32) + self.warp)
        return self.merged(of_lane, 1, "_of_lane")

    @property
    def shares(self) -> int:
        return min(32, self.senders) if self.config.direct else super().shares

    def exchanged_parts(self, mine: Values, by: Any, slot: Any) -> list[Values]:
        """What `mine` came to into that slot of every block, by the threads that `by` numbers from 0; then all
        slots, of which each lane has some.

        Rows take turns at two sets of slots, each with its barrier.  A block is at most one row ahead of another, since
        it waits for what that sends; and none sends before all its threads have read the slots of the row before, since
        they have met in between."""
        part("The row's reductions of those of its parts, which each block, or warp, sends to all blocks")
        cluster, count, senders = self.config.cluster, sent(len(self.steps)), self.senders
        turn: Any = 0
        parity: Any = 0
        if self.config.grid:
            turn = named("slots_turn", T.bitwise_and(self.rows_before.value, 1))
            parity = named("parity", T.bitwise_and(T.shift_right(self.rows_before.value, 1), 1))
        else:
            wait_until_begun()
        first = turn * (senders * count)
        arrived = self.arrived.ptr_to([turn])
        with where(self.thread == 0):
            T.evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(arrived, T.uint32(4 * senders * count)))
        with where(by < cluster):
            to = in_block(self.slots.ptr_to([first + slot * count]), self.lane)
            numbers = [mine[name] for name in self.steps]
            numbers += numbers[-1:] * (count - len(numbers))
            self.call(f"cluster_send_{count}", *numbers, to, in_block(arrived, self.lane), source=send(count))
        wait_in_cluster(arrived, parity)
        return [
            {name: named(f"{name}_sent", self.slots[at + k]) for k, name in enumerate(self.steps)}
            for at in (first + (self.lane % senders + s) * count for s in range(0, senders, 32))
        ]

    @property
    def leads(self) -> Any:
        return tirx.all(self.thread == 0, self.rank == 0)

    def write(self, row: LoadedRow, results: Values) -> None:
        if self.first_in_registers and self.config.grid:
            self.following = named("following", self.row.value + self.clusters)
            self.following_row = self.placed(self.following, self.before, self.part)
        super().write(row, results)
        if self.config.grid and not self.outputs:  # else each pack's place is free when it is stored
            for p in range(self.first_in_registers):
                self.fetch_next(p)


def sent(count: int) -> int:
    """How many numbers are sent for so many: a power of two."""
    return 1 << (count - 1).bit_length()


def send(count: int) -> str:
    """The function that stores `count` numbers, one, two or four, in another block."""
    names = "abcd"[:count]
    values = ", ".join(f"%{k}" for k in range(count))
    return _SEND.format(
        count=count,
        last=count + 1,
        parameters=", ".join(f"float {name}" for name in names),
        vector=f".v{count}" if count > 1 else "",
        values=f"{{{values}}}" if count > 1 else values,
        operands=", ".join(f'"f"({name})' for name in names),
    )
