"""The kernel of `cluster`: parts of a row in the blocks of a cluster, under the row program on packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.hopper.instructions import arrive_at_cluster, in_block, wait_for_cluster
from schedules.hopper.program import named
from schedules.softmax.cluster import ClusterConfig
from schedules.softmax.definition import SoftmaxProblem, Values
from schedules.softmax.loaded_program import LoadedKernel, LoadedRow
from schedules.softmax.pack_program import Scalar, module, where
from schedules.softmax.rows import itemsize_of

_SEND = """
__device__ __forceinline__ void cluster_send(float value, unsigned at) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(at), "f"(value) : "memory");
}
"""


def program(problem: SoftmaxProblem, config: ClusterConfig) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""

    def blocks(rows: Any) -> Any:
        most = config.grid // config.cluster
        return T.Cast("int32", T.min(rows, T.int64(most)) if most else rows) * config.cluster

    def emit(tensors: dict[str, Any], rows: Any, block: Any, warp: Any, lane: Any) -> None:
        Kernel(problem, config, tensors, rows, warp, lane).emit(block, blocks(rows))

    return module(problem, config.threads // 32, blocks, config.blocks_sm, emit, config.cluster)


class Kernel(LoadedKernel):
    """The body of the kernel for one thread; its methods emit statements."""

    always = True

    def __init__(
        self, problem: SoftmaxProblem, config: ClusterConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        self.config = config
        self.kept_from = config.in_shared
        self.part, self.least = config.part(problem), config.least(problem)
        self.steps = [step.name for step in self.program.reductions]

    def emit(self, block: Any, blocks: Any) -> None:
        config = self.config
        arrive_at_cluster()
        pool = T.SMEMPool()
        self.memory = {
            argument.name: pool.alloc(
                (config.in_shared * config.threads * self.pack * itemsize_of(argument.dtype),), "uint8", align=16
            )
            for argument in (self.inputs if config.in_shared else ())
        }
        self.exchange = pool.alloc((2 * config.threads // 32,), "float32", align=16)
        self.slots = pool.alloc((len(self.steps) * config.cluster,), "float32", align=16)
        pool.commit()
        self.thread = self.of_row = named("thread", self.warp * 32 + self.lane)
        self.rank = named("rank", T.truncmod(block, config.cluster))
        self.before = named("before", self.rank * self.part)  # packs of the row's earlier blocks
        if config.kept == "packed" and self.item < 4:
            self.zero = self.unknown_zero()
        self.row = Scalar("row", T.Cast("int64", T.truncdiv(block, config.cluster)), "int64")
        if not config.grid:
            self.fetch_first()
            self.compute_row()
            return
        self.clusters = named("clusters", T.Cast("int64", T.truncdiv(blocks, config.cluster)))
        self.fetch_first()
        with T.While(self.row.value < self.rows):
            self.compute_row()
            self.row.set(self.row.value + self.clusters)
        wait_for_cluster()

    # ---- What waits in shared memory ----

    def fetch_first(self) -> None:
        """Have the packs of the first row copied that wait in shared memory."""
        if self.kept_from:
            first = self.place().first
            for p in range(self.kept_from):
                self.fetch(p, first)

    def fetch(self, p: int, first: Any) -> None:
        """Have round p of the row copied whose first pack of this thread begins with element `first`."""
        at = first + T.int64(p * self.threads * self.pack)
        for argument in self.inputs:
            size = self.pack * itemsize_of(argument.dtype)
            form = "cp.async.cg.shared.global" if size == 16 else "cp.async.ca.shared.global"
            target, source = self.waiting(argument.name, p), self.tensors[argument.name].ptr_to([at])
            T.evaluate(T.ptx[form](target, source, size))
        T.evaluate(T.ptx.cp.async_.commit_group())

    def waiting(self, name: str, p: int) -> Any:
        """Where this thread's pack of round p waits."""
        size = self.words_of(name) * 4
        return self.memory[name].ptr_to([(p * self.threads + self.thread) * size])

    def fetch_next(self, p: int) -> None:
        """Have round p of the cluster's next row copied, if there is one, into the place of this row's."""
        with where(self.following < self.rows):
            self.fetch(p, self.following_first)

    # ---- A row ----

    def place(self) -> LoadedRow:
        return self.placed(self.row.value, self.before, self.part)

    def each_pack(self, row: LoadedRow, *needs: str, stored: bool = False) -> Iterator[tuple[int, Any]]:
        """Packs out of shared memory, then those out of registers."""
        first, self.fresh = self.fresh, False
        if first:
            self.read_row(row)
        for p in range(self.kept_from):
            i = self.number(p)
            if first:
                T.evaluate(T.ptx.cp.async_.wait_group(self.kept_from - 1 - p))
            for name in self.words:
                if name in needs:
                    self.read_waiting(name, row, p, i)
            yield p, i
            if stored and self.config.grid:
                self.fetch_next(p)
        yield from super().each_pack(row, *needs, stored=stored)
        if self.kept_from and not stored:
            T.evaluate(T.cuda.warp_sync())  # or the compiler would keep in registers what it reads again

    def read_waiting(self, name: str, row: LoadedRow, p: int, i: Any) -> None:
        """Pack i of an input into its words: out of shared memory, but the mask of columns, which all rows share."""
        words = self.words_at(name, p)
        if name in self.memory:
            self.load(words, self.waiting(name, p))
            if name != "drop":
                self.fill(name, row, p, i)
        elif self.aligned:
            self.load(words, self.tensors[name].ptr_to([i * self.pack - row.shift]))
        else:
            self.read_mask(row, p, i)

    def combined(self, part: Values) -> Values:
        """Each block's reductions in the slot of its rank in every block, then the row's of all of them."""
        cluster = self.config.cluster
        wait_for_cluster()  # all blocks have begun, and read the row's before
        with where(tirx.all(self.warp == 0, self.lane < cluster)):
            for k, name in enumerate(self.steps):
                to = in_block(self.slots.ptr_to([k * cluster + self.rank]), self.lane)
                T.evaluate(T.cuda.func_call("cluster_send", part[name], to, source_code=_SEND))
        arrive_at_cluster()
        wait_for_cluster()
        other = self.lane % cluster
        found = {name: named(f"{name}_of_block", self.slots[k * cluster + other]) for k, name in enumerate(self.steps)}
        if self.config.grid:
            arrive_at_cluster()
        return self.merged(found, cluster)

    def write(self, row: LoadedRow, results: Values) -> None:
        if self.kept_from and self.config.grid:
            self.following = named("following", self.row.value + self.clusters)
            self.following_first = self.placed(self.following, self.before, self.part).first
        super().write(row, results)
