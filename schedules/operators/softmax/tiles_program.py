"""The kernel of `tiles`: rows out of a tile in shared memory, under the row program on packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.pack_program import PackKernel, module
from schedules.operators.softmax.pack_sources import STORE, STORE_SHARED
from schedules.operators.softmax.packs import PACK
from schedules.operators.softmax.row_packs import Row, Scalar, where
from schedules.operators.softmax.tiles_config import TilesConfig
from schedules.steps.story import inside_part, part
from schedules.tirx.values import named

_CARRIERS = {2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}  # bytes to a type of that size
_COPY = """
__device__ __forceinline__ void tile_copy_{bytes}(void* to, const void* from) {{
  *({type}*)to = *(const {type}*)from;
}}
"""
_WRITE = """
__device__ __forceinline__ void tile_write_{bytes}({parameters}, void* to) {{ *({type}*)to = {value}; }}
"""
_VALUES = {2: "(unsigned short)a", 4: "a", 8: "make_uint2(a, b)", 16: "make_uint4(a, b, c, d)"}
_READ_HALF = """
__device__ __forceinline__ void tile_read_2(unsigned& x, const void* from) { x = *(const unsigned short*)from; }
"""


def program(problem: SoftmaxProblem, config: TilesConfig) -> tvm.IRModule:
    """The module with one function "main" that takes ``problem.arguments()``."""

    def blocks(rows: Any) -> Any:
        return T.Cast("int32", T.truncdiv(rows + (config.rows - 1), T.int64(config.rows)))

    def emit(tensors: dict[str, Any], rows: Any, block: Any, warp: Any, lane: Any) -> None:
        TilesKernel(problem, config, tensors, rows, warp, lane).emit(block)

    return module(problem, config.block // 32, blocks, config.min_blocks, emit)


class TilesKernel(PackKernel[Row]):
    """The body of the kernel for one thread; its methods emit statements.

    A row's `start` is its first element in the tile, int32.
    """

    fused = True

    def __init__(
        self, problem: SoftmaxProblem, config: TilesConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        super().__init__(problem, config, tensors, rows, warp, lane)
        self.config = config

    def emit(self, block: Any) -> None:
        part("The tile: which rows are the block's, and where they lie")
        config, cols = self.config, self.problem.cols
        self.thread = T.thread_id([config.block])
        self.of_row = Scalar("of_row", T.bitwise_and(self.thread, config.threads - 1)).value
        group = Scalar("group", T.shift_right(self.thread, config.threads.bit_length() - 1)).value
        first = self.first_row = named("first_row", T.Cast("int64", block) * config.rows)
        self.begin = named("begin", first * cols)
        # variables, since TVM would compute them anew in 64 bits for every use
        self.count = Scalar("count", T.Cast("int32", T.min(self.rows - first, T.int64(config.rows)))).value
        self.elements = Scalar("elements", self.count * cols).value
        self.tile = {}
        for argument in self.inputs:
            self.tile[argument.name] = T.alloc_shared((config.rows * cols,), argument.dtype)
            IRBuilder.name(f"{argument.name}_tile", self.tile[argument.name])
        self.bring()
        if config.rows_per_group == 1:
            self.compute_row(group)
        else:
            turn = Scalar("turn", 0)
            with T.While(turn.value < config.rows_per_group):
                self.compute_row(group + turn.value * config.groups)
                turn.set(turn.value + 1)
        self.send()

    def compute_row(self, number: Any) -> None:
        part("Where a row lies in the tile; threads without one compute the last, and do not write it")
        own = Scalar("own", number < self.count, "bool").value
        computed = Scalar("computed", T.min(number, self.count - 1)).value
        start = Scalar("start", computed * self.problem.cols + self.of_row * self.pack).value
        self.fresh = True
        length = self.length_of(self.first_row + T.Cast("int64", computed))
        self.compute(Row(0, self.least, start, own, self.first_row + T.Cast("int64", computed), length=length))

    # ---- The tile ----

    @property
    def turns(self) -> int:
        """Packs of a thread in a full tile, at most."""
        return -(-self.config.rows * self.problem.cols * self.item // (PACK * self.config.block))

    def packs_of_thread(self, name: str) -> list[list[Any]]:
        """The words of each of them."""
        words = T.alloc_local((4 * self.turns,), "uint32")
        IRBuilder.name(f"{name}_packs", words)
        return [[words[4 * k + j] for j in range(4)] for k in range(self.turns)]

    def whole_packs(self) -> Iterator[tuple[int, Any]]:
        """The thread's packs of the tile (number, first element), those of full tiles for which there is one."""
        of_pack = PACK // self.item
        for k in range(self.turns):
            at = self.thread * of_pack + k * of_pack * self.config.block
            with where(at + of_pack <= self.elements):
                yield k, at

    def left_over(self) -> Iterator[Any]:
        """The element of the tile's last pack that is the thread's, where the tensors end inside that."""
        of_pack = PACK // self.item
        at = named("left", T.bitwise_and(self.elements, -of_pack) + self.thread)
        with where(at < self.elements):
            yield at

    def bring(self) -> None:
        part("Bring the tile into shared memory: all of a thread's packs in flight at once")
        packs = {name: self.packs_of_thread(name) for name in self.tile}
        for name, words in packs.items():
            for k, at in self.whole_packs():
                self.load(words[k], self.tensors[name].ptr_to([self.begin + at]), self.streaming)
        for name, tile in self.tile.items():
            for k, at in self.whole_packs():
                self.call("pack_store_shared", *packs[name][k], tile.ptr_to([at]), source=STORE_SHARED)
            if self.unaligned_end:
                for at in self.left_over():
                    self.copy_one(tile.ptr_to([at]), self.tensors[name].ptr_to([self.begin + at]))
        T.evaluate(T.cuda.cta_sync())

    def send(self) -> None:
        if not self.outputs:
            return
        part("Send the tile: results lie where the first input's elements lay")
        T.evaluate(T.cuda.cta_sync())
        (output,), tile, packs = self.outputs, self.tile[self.inputs[0].name], self.packs_of_thread("out")
        kind, instruction = ("streaming", "__stcs") if self.streaming_stores else ("whole", "__stwb")
        source = STORE.format(name=kind, store=instruction)
        for k, at in self.whole_packs():
            self.load(packs[k], tile.ptr_to([at]))
            self.call(f"pack_store_{kind}", *packs[k], self.tensors[output].ptr_to([self.begin + at]), source=source)
        if self.unaligned_end:
            for at in self.left_over():
                self.copy_one(self.tensors[output].ptr_to([self.begin + at]), tile.ptr_to([at]))

    @property
    def unaligned_end(self) -> bool:
        """Whether some number of rows is no whole packs."""
        return self.problem.cols * self.item % PACK != 0

    def copy_one(self, to: Any, source: Any) -> None:
        text = _COPY.format(bytes=self.item, type=_CARRIERS[self.item])
        self.call(f"tile_copy_{self.item}", to, source, source=text)

    # ---- A row ----

    def behind_first(self, row: Row) -> None:
        """Nothing: no memory is to be filled again."""

    def each_pack(self, row: Row, *needs: str, stored: bool = False) -> Iterator[tuple[int, Any]]:
        """Accesses to the row, out of registers once it is read; threads without one in the last round hold neutral
        elements."""
        if self.fresh:
            self.fresh = False
            with inside_part("Read the row out of the tile"):
                self.read_row(row)
        for p in range(self.rounds):
            i = self.of_row + p * self.threads
            sure = (p + 1) * self.threads <= self.least
            with where(True if sure or not stored else i < self.least):
                yield p, i

    def read_row(self, row: Row) -> None:
        for p in range(self.rounds):
            i = self.of_row + p * self.threads
            sure = (p + 1) * self.threads <= self.least
            for name in self.words:
                words = [self.word(name, p, k) for k in range(self.each)]
                if not sure:
                    for k in range(self.each):
                        T.buffer_store(self.words[name], T.uint32(self.neutral(name)), [p * self.each + k])
                with where(True if sure else i < self.least):
                    if name in self.tile:
                        at = self.tile[name].ptr_to([row.start + p * self.threads * self.pack])
                    else:
                        at = self.tensors[name].ptr_to([i * self.pack])
                    self.load_words(words, at)
                self.fill(name, row, p, i)

    def load_words(self, words: list[Any], at: Any) -> None:
        if self.config.access > 2:
            self.load(words, at)
        else:
            self.call("tile_read_2", *words, at, source=_READ_HALF)

    def store(self, name: str, row: Row, p: int, i: Any, words: Any) -> None:
        """Access i of the row back to where it lay."""
        to = self.tile[self.inputs[0].name].ptr_to([row.start + p * self.threads * self.pack])
        size = self.config.access
        parameters = ", ".join(f"unsigned {letter}" for letter in "abcd"[: self.each])
        source = _WRITE.format(bytes=size, type=_CARRIERS[size], parameters=parameters, value=_VALUES[size])
        self.call(f"tile_write_{size}", *(words[k] for k in range(self.each)), to, source=source)
