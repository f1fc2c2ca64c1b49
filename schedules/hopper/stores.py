"""How a consumer's results get to global memory.

By boxes: they pass through staging memory, from where TMA stores `width` columns of all of a consumer's rows and clips
them at the tensor's end.  Several stores make a pass, as many as the memory holds.  By runs: where the tensor's rows
are not whole 16 bytes apart, which TMA needs, the consumer's threads store them from that memory, in the widest vectors
that the tensor's alignment allows.  By blocks: the same where they lie in that memory as in the tensor.  By slots: the
same where neighbours in the tensor are rows of the tile, of which some may be left out; by planes and by strips those
of all consumers leave together (`joined`).  By columns: where neighbours in the tensor are rows of the tile, of which a
thread has two side by side (`fragments`), they are stored from its
registers.  By lines: by TMA, where neighbours in the tensor are rows of the tile, which are turned on their way into
staging memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from schedules.core.problem import numpy_dtype
from schedules.hopper.config import ROWS, WARPGROUP
from schedules.hopper.fragments import row_of, tile_row
from schedules.hopper.geometry import Member, Work
from schedules.hopper.shared import (
    FOLDS,
    BlockStaging,
    Columns,
    LineStaging,
    Runs,
    RunStaging,
    Slots,
    SlotStaging,
    Staging,
    TensorMap,
)
from schedules.tirx.types import Buffer, Expr, Index, Pointer, Tensors, Variable
from schedules.tirx.values import kept, named, where
from schedules.tirx.words import pack_8, pack_16

Writer = Callable[..., None]
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group"
_STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
_STMATRIX_TURNED = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
_FIRST_BARRIER = 1  # named barriers of the consumers; 0 is the whole block's
# u and v are groups of eight columns, two bytes of row lane / 4 and two of the row eight below.  Neighbouring lanes
# exchange, so that even ones have four bytes of u and odd ones four of v.
_STORE_8 = """
__device__ __forceinline__ void hopper_store_s8(unsigned int u, unsigned int v, void* above, void* below, int lane) {
  unsigned int mine = lane & 1 ? v : u, other = lane & 1 ? u : v;
  unsigned int got = __shfl_xor_sync(0xffffffffu, other, 1);
  unsigned int left = lane & 1 ? got : mine, right = lane & 1 ? mine : got;
  int at = (lane & 1) * 8 + (lane >> 1 & 1) * 4;
  *(unsigned int*)((char*)above + at) = __byte_perm(left, right, 0x5410);
  *(unsigned int*)((char*)below + at) = __byte_perm(left, right, 0x7632);
}
"""
_KINDS = {"float32": "float", "int32": "int"}
_STORE_32 = """
__device__ __forceinline__ void hopper_store_{0}({0} a, {0} b, void* at) {{ *({0}2*)at = make_{0}2(a, b); }}
"""

# A word of two elements, of which those there are.  Where no thread stores the second, ptxas (13.0 to 13.3) converts
# the first ones of two words at once, and moves that above the wait for wgmma's sums (`inspect.sums_read_early`).  A
# permutation of the word that changes nothing keeps it from that, and is no instruction in the end.
_WHOLE = 'asm("prmt.b32 %0, %0, 0, 0x3210;" : "+r"(word));'
PUT = {
    "hopper_put_two": """
__device__ __forceinline__ void hopper_put_two(unsigned int word, void* at, int there) {
  if (there > 0) *(unsigned int*)at = word;
}
""",
    "hopper_put": f"""
__device__ __forceinline__ void hopper_put(unsigned int word, void* at, int there) {{
  {_WHOLE}
  if (there > 0) ((unsigned short*)at)[0] = (unsigned short)word;
  if (there > 1) ((unsigned short*)at)[1] = (unsigned short)(word >> 16);
}}
""",
    "hopper_put_apart": f"""
__device__ __forceinline__ void hopper_put_apart(unsigned int word, void* at, int there, void* next, int there_too) {{
  {_WHOLE}
  if (there > 0) *(unsigned short*)at = (unsigned short)word;
  if (there_too > 0) *(unsigned short*)next = (unsigned short)(word >> 16);
}}
""",
}
PUT_APART = """
__device__ __forceinline__ void hopper_put_apart_{0}(unsigned int word, void* at, bool there) {{
  if (there) {{
    ((unsigned short*)at)[0] = (unsigned short)word;
    ((unsigned short*)at)[{0}] = (unsigned short)(word >> 16);
  }}
}}
"""
PUT_APART_32 = """
__device__ __forceinline__ void hopper_put_apart_{0}(float a, float b, void* at, bool there) {{
  if (there) {{
    ((float*)at)[0] = a;
    ((float*)at)[{0}] = b;
  }}
}}
"""
_COPY = """
__device__ __forceinline__ void hopper_copy_{0}(void* to, const void* from) {{ *({1}*)to = *(const {1}*)from; }}
"""
# of a vector of {0} elements those from `begin` on that are before `end`
COPY_PART = """
__device__ __forceinline__ void hopper_copy_part_{0}(void* to, const void* from, int begin, int end) {{
  union {{ {1} all; {2} each[{0}]; }} v;
  v.all = *(const {1}*)from;
  const unsigned all = (1u << {0}) - 1;
  unsigned there = all << (begin > 0 ? begin : 0) & all >> (end < {0} ? {0} - end : 0);
  if (there == all) {{
    *({1}*)to = v.all;
  }} else {{
#pragma unroll
    for (int i = 0; i < {0}; ++i)
      if (there >> i & 1) (({2}*)to)[i] = v.each[i];
  }}
}}
"""
LINE = 128  # bytes that neighbouring threads store side by side, or half as many
VECTORS = {2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}


def copy_vector(nbytes: int, to: Pointer, source: Pointer) -> None:
    """Copy a vector of so many bytes, which both places are multiples of."""
    text = _COPY.format(nbytes, VECTORS[nbytes])
    T.evaluate(T.cuda.func_call(f"hopper_copy_{nbytes}", to, source, source_code=text))


def barrier(consumer: Expr) -> None:
    """Wait for all threads of the consumer."""
    T.evaluate(T.ptx.bar.sync(T.Cast("uint32", _FIRST_BARRIER + consumer), T.uint32(WARPGROUP)))


@dataclass
class Stores(ABC):
    """The stores of a consumer's tile at `place`, or of its columns from `begin` on, `member` of whose threads this is;
    its staging memory begins `start` bytes into `memory`."""

    work: Work
    tensors: Tensors
    output_map: Variable | None
    place: Any
    begin: Index
    memory: Buffer | None
    start: Expr
    member: Member

    @abstractmethod
    def before(self) -> None:
        """Wait until what all of the consumer's threads stored before has left the memory."""

    @abstractmethod
    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        """Put a thread's eight values, of its warp's 16 rows number `m` and of the 16 columns number `pair` of a
        store, into the memory."""

    def row(self, m: int) -> Expr:
        """The consumer's row where the warp's sixteen number `m` begin."""
        block, warp = self.work.config.sixteens
        return m * block + self.member.warp * warp

    def row_of(self, m: int, below: int) -> Expr:
        """The consumer's row of which the thread has sums, of those number `m`, and the upper or the lower eight."""
        block, warp = self.work.config.sixteens
        return m * block + row_of(self.work.a, self.member, below, warp)

    @abstractmethod
    def written(self) -> None:
        """Wait until those of all of the consumer's threads are seen by what stores them."""

    @abstractmethod
    def store(self, first: int) -> None:
        """Store what the memory holds, from store number `first` on."""


@dataclass
class TmaStores(Stores):
    """Results leave by TMA, issued by one thread."""

    memory: Buffer

    def before(self) -> None:
        with T.If(self.member.thread == 0), T.Then():
            T.evaluate(T.ptx.cp.async_.bulk.wait_group.read(0))
        barrier(self.member.consumer)

    def written(self) -> None:
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        barrier(self.member.consumer)


@dataclass
class BoxStores(TmaStores):
    """By boxes of rows of the tensor."""

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.staging, Staging) and isinstance(output.target, TensorMap)
        self.staging = output.staging
        self.form, self.writer = STORE.format(output.target.rank), _writer(self.work)

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        base = self.start + store * self.staging.store_bytes
        self.writer(self.staging, self.memory, base, values, self.row(m), pair, lane)

    def store(self, first: int) -> None:
        staging = self.staging
        with T.If(self.member.thread == 0), T.Then():
            for store in range(staging.together):
                column = self.begin + (first + store) * staging.width
                to = self.work.store_at(self.place, self.member.part, column)
                source = self.memory.ptr_to([self.start + store * staging.store_bytes])
                T.evaluate(T.ptx[self.form](T.address_of(self.output_map), *to, source))
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())


@dataclass
class LineStores(TmaStores):
    """By lines, of rows of the tile that lie side by side in the tensor: one store for each."""

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.staging, LineStaging) and isinstance(output.target, TensorMap)
        self.staging, self.form = output.staging, STORE.format(output.target.rank)

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        words = [pack_16(self.work.output.dtype, *values[at : at + 2]) for at in range(0, 8, 2)]
        column = pair * 16 + T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)
        at = self.staging.chunk(self.row(m) + T.truncmod(T.truncdiv(lane, 8), 2) * 8, column)
        T.evaluate(T.ptx[_STMATRIX_TURNED](self.memory.ptr_to([self.start + at]), *words))

    def store(self, first: int) -> None:
        staging = self.staging
        with T.If(self.member.thread == 0), T.Then():
            for number in range(staging.rows // staging.run):
                column = self.begin + first * staging.width
                to = self.work.line_at(self.place, self.member.part, number * staging.run, column)
                source = self.memory.ptr_to([self.start + number * staging.store_bytes])
                T.evaluate(T.ptx[self.form](T.address_of(self.output_map), *to, source))
            T.evaluate(T.ptx.cp.async_.bulk.commit_group())


@dataclass
class RunStores(Stores):
    """Results leave by ordinary stores of whole vectors, neighbouring threads storing neighbouring ones."""

    memory: Buffer

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.staging, RunStaging) and isinstance(output.target, Runs) and self.output_map is None
        self.staging, self.target, self.output = output.staging, output.target, self.tensors["flat output"]

    def before(self) -> None:
        barrier(self.member.consumer)  # the stores before were done when their instructions were

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        staging = self.staging
        for half in range(2):
            group = pair * 16 + half * 8
            if group >= staging.pitch:
                continue
            left = group + T.truncmod(lane, 4) * 2
            for below in range(2):
                at = (self.row(m) + T.truncdiv(lane, 4) + 8 * below) * staging.pitch + left
                target = self.memory.ptr_to([self.start + at * staging.item])
                two = values[4 * half + 2 * below : 4 * half + 2 * below + 2]
                if staging.item == 4:  # never packed
                    kind = _KINDS[self.work.output.dtype]
                    T.evaluate(
                        T.cuda.func_call(f"hopper_store_{kind}", *two, target, source_code=_STORE_32.format(kind))
                    )
                    continue
                word = pack_16(self.work.output.dtype, *two)
                # how many of the two are columns of the tensor
                there = T.int32(2) if group + 8 <= staging.pitch else staging.pitch - left
                name = "hopper_put_two" if staging.pitch % 2 == 0 else "hopper_put"
                T.evaluate(T.cuda.func_call(name, word, target, there, source_code=PUT[name]))

    def written(self) -> None:
        barrier(self.member.consumer)

    def store(self, first: int) -> None:
        staging, target = self.staging, self.target
        elements = target.rows * staging.pitch if staging.packed else staging.width
        vectors = elements // target.vector
        count = staging.rows // target.rows * vectors
        with T.serial(-(-count // WARPGROUP)) as turn:
            at = named("at", turn * WARPGROUP + self.member.thread)
            run = named("run", T.truncdiv(at, vectors))
            element = named("element", T.truncmod(at, vectors) * target.vector)
            row, column = run * target.rows, self.begin + first * staging.width
            if not staging.packed:  # a vector is a run
                column = column + element
            index, inside = self.work.run_at(self.place, self.member.part, row, column)
            if staging.packed:
                index, inside = index + element, inside - element
            stored = inside > 0 if count % WARPGROUP == 0 else tirx.all(at < count, inside > 0)
            with T.If(stored), T.Then():
                source = self.memory.ptr_to([self.start + (row * staging.pitch + element) * staging.item])
                copy_vector(target.vector * staging.item, self.output.ptr_to([index]), source)


@dataclass
class BlockStores(Stores):
    """Results leave as they lie in the tensor, by vectors of 16 bytes where it allows them."""

    memory: Buffer

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.staging, BlockStaging) and isinstance(output.target, Runs) and self.output_map is None
        self.staging, self.target, self.output = output.staging, output.target, self.tensors["flat output"]

    def before(self) -> None:
        barrier(self.member.consumer)  # the stores before were done when their instructions were

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        staging = self.staging
        apart = staging.piece % 2 or staging.run % 2
        name = "hopper_put_apart" if apart else "hopper_put_two"
        for half, below in product(range(2), range(2)):
            column = pair * 16 + half * 8 + T.truncmod(lane, 4) * 2
            row = self.row(m) + T.truncdiv(lane, 4) + 8 * below
            word = pack_16(self.work.output.dtype, *values[4 * half + 2 * below : 4 * half + 2 * below + 2])
            at = [each for i in range(2 if apart else 1) for each in self._at(row, column + i)]
            T.evaluate(T.cuda.func_call(name, word, *at, source_code=PUT[name]))

    def _at(self, row: Expr, column: Expr) -> tuple[Pointer, Expr]:
        """Where the element of a row and a column waits, and whether there is one, or two side by side."""
        staging = self.staging
        outer = T.truncdiv(column, staging.piece)
        block = T.truncmod(outer, staging.blocks)
        element = T.truncdiv(outer, staging.blocks) * staging.piece + T.truncmod(column, staging.piece)
        at = (block * staging.rows + row) * staging.run + element
        there = T.Cast("int32", element < staging.run)
        return self.memory.ptr_to([self.start + at * staging.item]), there

    def written(self) -> None:
        barrier(self.member.consumer)

    def store(self, first: int) -> None:
        staging, vector = self.staging, self.target.vector
        elements = staging.rows * staging.run
        with T.serial(-(-staging.blocks * elements // vector // WARPGROUP)) as turn:
            at = named("at", (turn * WARPGROUP + self.member.thread) * vector)
            block = named("block", T.truncdiv(at, elements))
            element = named("element", T.truncmod(at, elements))
            index, inside = self.work.run_at(self.place, self.member.part, block, self.begin + first)
            with T.If(tirx.all(block < staging.blocks, element < inside)), T.Then():
                source = self.memory.ptr_to([self.start + at * staging.item])
                copy_vector(vector * staging.item, self.output.ptr_to([index + element]), source)


@dataclass
class SlotStores(Stores):
    """Results leave by ordinary stores, a channel's side by side, without the rows that are not stored."""

    memory: Buffer

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.staging, SlotStaging) and isinstance(output.target, Slots)
        self.staging, self.target, self.output = output.staging, output.target, self.tensors["flat output"]
        first, last = self.work.slots_at(self.place, self.member.part)
        self.first, self.last = named("first_result", first), named("last_result", last)
        self.base = named("base", T.truncdiv(self.first, self.target.vector) * self.target.vector)
        # where all rows are stored they wait in their order, and where they are stored one by one
        in_order = (not self.target.ragged or self.target.vector == 1) and not self.work.a.pairs_rows
        self.whole = in_order and self.staging.item == 2  # which stmatrix turns
        self.rows = []
        for m, below in () if self.whole else product(range(self.staging.rows // ROWS), (0, 8)):
            number, there = self.work.slot_of(self.place, self.member.part, self.row_of(m, below))
            self.rows.append((kept("slot", number - self.base), named("there", there)))
        self.left = T.truncmod(self.member.lane, 4) * 2

    def before(self) -> None:
        barrier(self.member.consumer)

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        pitch, dtype = self.staging.pitch, self.work.output.dtype
        wide = self.staging.item == 4
        name, source = f"hopper_put_apart_{pitch}", (PUT_APART_32 if wide else PUT_APART).format(pitch)
        if self.whole:  # eight rows of a column at once
            words = [pack_16(dtype, *values[at : at + 2]) for at in range(0, 8, 2)]
            column = pair * 16 + T.truncdiv(lane, 16) * 8 + T.truncmod(lane, 8)
            at = column * pitch + self.row(m) + T.truncmod(T.truncdiv(lane, 8), 2) * 8
            T.evaluate(T.ptx[_STMATRIX_TURNED](self.memory.ptr_to([self.start + at * self.staging.item]), *words))
            return

        def target(column: int, slot: Expr) -> Pointer:
            at = (self.left + pair * 16 + column) * pitch + slot
            return self.memory.ptr_to([self.start + at * self.staging.item])

        if self.work.a.pairs_rows:  # rows are neighbours, and so are their slots
            slot, there = self.rows[2 * m]
            for half, j in product(range(2), range(2)):
                word = pack_16(dtype, values[4 * half + j], values[4 * half + 2 + j])
                call = "hopper_put_two", word, target(half * 8 + j, slot), T.Select(there, T.int32(2), T.int32(0))
                T.evaluate(T.cuda.func_call(*call, source_code=PUT["hopper_put_two"]))
            return
        for half, below in product(range(2), range(2)):
            slot, there = self.rows[2 * m + below]
            two = values[4 * half + 2 * below : 4 * half + 2 * below + 2]
            words = list(two) if wide else [pack_16(dtype, *two)]
            T.evaluate(T.cuda.func_call(name, *words, target(half * 8, slot), there, source_code=source))

    def written(self) -> None:
        barrier(self.member.consumer)

    def store(self, first: int) -> None:
        staging, vector = self.staging, self.target.vector
        parts = self.target.ragged and vector > 1  # of the vectors that the results begin and end in
        vectors = staging.rows // vector + parts
        beside = LINE // (vector * staging.item)
        if vectors % beside and vectors <= 2 * beside:
            beside //= 2
        columns = WARPGROUP // beside  # at once
        name, element = f"hopper_copy_part_{vector}", VECTORS[staging.item]
        text = COPY_PART.format(vector, VECTORS[vector * staging.item], element)
        with T.serial(-(-vectors // beside)) as turn:
            at = turn * beside + T.truncmod(self.member.thread, beside)
            if self.whole and vector == 1:
                number, there = self.work.slot_of(self.place, self.member.part, at)
                stored = named("there", there)
            else:
                number = named("number", self.base + at * vector)
                begin, end = named("begin", self.first - number), named("end", self.last - number)
                stored = tirx.all(begin < vector, end > 0)
            start, is_inside = self.work.slot_in(self.place, number)
            start = named("start", start)
            if is_inside is not None:
                stored = tirx.all(stored, is_inside)
            with T.serial(-(-staging.width // columns)) as more:
                column = named("column", more * columns + T.truncdiv(self.member.thread, beside))
                column_of_tile = self.begin + first * staging.width + column
                channel, inside = self.work.column_start(self.place, self.member.part, column_of_tile)
                with T.If(tirx.all(at < vectors, column < staging.width, stored, inside)), T.Then():
                    source = self.memory.ptr_to([self.start + (column * staging.pitch + at * vector) * staging.item])
                    to = self.output.ptr_to([start + channel])
                    if parts:
                        T.evaluate(T.cuda.func_call(name, to, source, begin, end, source_code=text))
                    else:
                        copy_vector(vector * staging.item, to, source)


@dataclass
class ColumnStores(Stores):
    """Results leave a thread's registers at once, two rows of a column side by side."""

    def __post_init__(self) -> None:
        output = self.work.output
        assert isinstance(output.target, Columns) and self.work.a.by_registers and self.memory is None
        self.output = self.tensors["flat output"]
        self.kind = _KINDS[output.dtype]
        # of each 64 rows: the element of the thread's first column, those to the next, and the columns from it inside
        self.columns = []
        left = T.truncmod(self.member.lane, 4) * 2
        for m in range(output.staging.rows // ROWS):
            row = self.row(m) + tile_row(self.member.lane, 0)
            start, pitch, inside = self.work.columns_at(self.place, self.member.part, row)
            inside = None if inside is None else named("inside", inside - left)
            self.columns.append((kept("element", start + left * pitch), pitch, inside))

    def before(self) -> None:
        """Nothing is waited for."""

    def write(self, store: int, values: Sequence[Expr], m: int, pair: int, lane: Expr) -> None:
        element, pitch, inside = self.columns[m]
        source = _STORE_32.format(self.kind)
        for half, j in product(range(2), range(2)):
            column = pair * 16 + 8 * half + j
            two = [values[4 * half + 2 * below + j] for below in range(2)]
            to = self.output.ptr_to([element + column * pitch])
            with where(None if inside is None else column < inside):
                T.evaluate(T.cuda.func_call(f"hopper_store_{self.kind}", *two, to, source_code=source))

    def written(self) -> None:
        """Nothing is shared."""

    def store(self, first: int) -> None:
        """They were stored as they were written."""


def _writer_16(kind: str) -> Writer:
    def write(
        staging: Staging, memory: Buffer, base: Expr, values: Sequence[Expr], row: Expr, pair: int, lane: Expr
    ) -> None:
        words = [pack_16(kind, *values[at : at + 2]) for at in range(0, 8, 2)]
        at = staging.chunk(row + T.truncmod(lane, 16), 2 * pair + T.truncdiv(lane, 16))
        T.evaluate(T.ptx[_STMATRIX](memory.ptr_to([base + at]), *words))

    return write


def _writer_apart(kind: str) -> Writer:
    """The same where lanes are exchanged, which stmatrix takes no account of."""

    def write(
        staging: Staging, memory: Buffer, base: Expr, values: Sequence[Expr], row: Expr, pair: int, lane: Expr
    ) -> None:
        for half, below in product(range(2), range(2)):
            at = staging.chunk(row + T.truncdiv(lane, 4) + 8 * below, 2 * pair + half)
            target = memory.ptr_to([base + at + T.truncmod(lane, 4) * 4])
            word = pack_16(kind, *values[4 * half + 2 * below : 4 * half + 2 * below + 2])
            put = PUT["hopper_put_two"]
            T.evaluate(T.cuda.func_call("hopper_put_two", word, target, T.int32(2), source_code=put))

    return write


def _writer_8(relu: bool) -> Writer:
    def write(
        staging: Staging, memory: Buffer, base: Expr, values: Sequence[Expr], row: Expr, pair: int, lane: Expr
    ) -> None:
        words = [pack_8(values[at : at + 4], relu) for at in (0, 4)]
        rows = [row + T.truncdiv(lane, 4) + below for below in (0, 8)]
        targets = [memory.ptr_to([base + staging.chunk(at, pair)]) for at in rows]
        T.evaluate(T.cuda.func_call("hopper_store_s8", *words, *targets, lane, source_code=_STORE_8))

    return write


def _writer_32(kind: str) -> Writer:
    kind = _KINDS[kind]

    def write(
        staging: Staging, memory: Buffer, base: Expr, values: Sequence[Expr], row: Expr, pair: int, lane: Expr
    ) -> None:
        for half in range(2):
            for below in range(2):
                at = staging.chunk(
                    row + T.truncdiv(lane, 4) + 8 * below, 4 * pair + 2 * half + T.truncdiv(T.truncmod(lane, 4), 2)
                )
                target = memory.ptr_to([base + at + T.truncmod(lane, 2) * 8])
                two = values[4 * half + 2 * below : 4 * half + 2 * below + 2]
                T.evaluate(T.cuda.func_call(f"hopper_store_{kind}", *two, target, source_code=_STORE_32.format(kind)))

    return write


_WRITERS: dict[str, Writer] = {
    "float16": _writer_16("float16"),
    "bfloat16": _writer_16("bfloat16"),
    "float32": _writer_32("float32"),
    "int32": _writer_32("int32"),
}


def _writer(work: Work) -> Writer:
    output = work.output
    if output.dtype == "int8":
        return _writer_8(work.epilogue.saturates_below)
    if numpy_dtype(output.dtype).itemsize == 2 and work.b.tile.fold == FOLDS[0]:
        return _writer_apart(output.dtype)
    return _WRITERS[output.dtype]
