"""Rows whose packs threads load straight from global memory into registers, under the row program on packs."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from schedules.operators.softmax.graph import is_kept
from schedules.operators.softmax.pack_program import PackKernel
from schedules.operators.softmax.row_packs import Row, Scalar, where
from schedules.steps.story import inside_part, part
from schedules.tirx.values import named

# units from `first` to before `last`; the others of the words stay
_LOAD_SOME = """
__device__ __forceinline__ void pack_load_some_{words}_{unit}({parameters}, const void* from, int first, int last) {{
  unsigned v[{words}] = {{{names}}};
#pragma unroll
  for (int i = 0; i < {words} * 4 / {unit}; ++i)
    if (i >= first && i < last) {assign}
  {out}
}}
"""
_ASSIGN = {  # unit i, of so many bytes, of the words
    1: "v[i / 4] = (v[i / 4] & ~(0xffu << (i % 4 * 8))) | ((unsigned)((const unsigned char*)from)[i] << (i % 4 * 8));",
    2: "v[i / 2] = (v[i / 2] & ~(0xffffu << (i % 2 * 16))) | "
    "((unsigned)((const unsigned short*)from)[i] << (i % 2 * 16));",
    4: "v[i] = ((const unsigned*)from)[i];",
}


@dataclass(frozen=True)
class LoadedRow(Row):
    """A row in global memory."""

    whole: Any  # packs that do not pass the tensors' end
    first: Any  # element of the thread's first pack, int64


class LoadedKernel(PackKernel[LoadedRow]):
    """The body of a kernel for one thread; its methods emit statements.

    Rounds before `first_in_registers` are for whoever emits the kernel to read.
    """

    always: bool  # whether there is a row for every thread

    def compute_row(self) -> None:
        self.fresh = True  # nothing of the row is read
        self.compute(self.place())

    @abstractmethod
    def place(self) -> LoadedRow:
        """The row, or what of it is computed here."""

    def placed(self, number: Any, before: Any = 0, most: int | None = None) -> LoadedRow:
        """Row `number`: all its packs, or those from number `before` on, at most `most`.

        Threads without a row of their own read and compute the last one, so that none of their loads has a condition.
        """
        part("Where a row lies: its packs of 16 bytes, and how far into the first of them it starts")
        cols, pack = self.problem.cols, self.pack
        own: Any = True
        if not self.always:
            own = Scalar("own", number < self.rows, "bool").value
            number = Scalar("computed", T.min(number, self.rows - 1), "int64").value
        begin = named("begin", number * cols)
        shift = 0 if self.aligned else named("shift", T.bitwise_and(T.Cast("int32", begin), pack - 1))
        start = begin if self.aligned else named("start", begin - T.Cast("int64", shift))
        packs: Any = -(-cols // pack)
        if not self.aligned:
            packs = named("row_packs", T.truncdiv(shift + (cols + pack - 1), pack))
        whole = packs
        if self.frame.unit < pack:
            end = start + T.Cast("int64", packs) * pack
            whole = T.Select(end > self.rows * cols, packs - 1, packs)
        if most is not None:
            skipped = named("skipped", before * pack)
            shift, start = shift - skipped, start + T.Cast("int64", skipped)
            packs, whole = (T.min(count - before, most) for count in (packs, whole))
        first = Scalar("first", start + T.Cast("int64", self.of_row * pack), "int64")
        if not isinstance(packs, int):
            packs, whole = Scalar("packs", packs).value, Scalar("whole", whole).value
        return LoadedRow(shift, packs, start, own, number, whole, first.value, length=self.length_of(number))

    def first_of(self, row: LoadedRow, p: int, i: Any) -> Any:
        return row.first + T.int64(p * self.threads * self.pack)

    def behind_first(self, row: LoadedRow) -> None:
        """Nothing: no memory is to be filled again."""

    # ---- Packs ----

    def number(self, p: int) -> Any:
        return self.of_row + p * self.threads if p else self.of_row

    def each_pack(self, row: LoadedRow, *needs: str, stored: bool = False) -> Iterator[tuple[int, Any]]:
        """Packs out of registers, which hold neutral elements where there is none; rounds that only rows with elements
        in one pack more have are left out by the others."""
        if self.fresh:
            self.fresh = False
            self.read_row(row)
        for p in range(self.first_in_registers, self.rounds):
            i = self.number(p)
            sure = (p + 1) * self.threads <= self.least
            with where(i < row.packs if (stored and not sure) or p * self.threads >= self.least else True):
                yield p, i
        if self.zero is not None and not stored:
            self.settle()

    def read_row(self, row: LoadedRow) -> None:
        """All packs of all inputs into words: those inside the tensors first, all in flight at once, then what is left
        of the tensors' ends."""
        with inside_part("Read the row: all packs of all inputs in flight, then what the tensors' ends cut off"):
            self.read_packs(row)

    def read_packs(self, row: LoadedRow) -> None:
        of_rows, rounds = [argument.name for argument in self.inputs], range(self.first_in_registers, self.rounds)
        whole = row.whole
        # packs none of whose columns counts are not read, but what drops their -inf
        if row.length is not None and not (self.problem.is_log and self.problem.has_dropout):
            counted = T.shift_right(row.shift + row.length + (self.pack - 1), self.pack.bit_length() - 1)
            whole = Scalar("counted", T.min(whole, counted)).value
        for p in rounds:
            i = self.number(p)
            last = self.least - (self.frame.unit < self.pack)  # packs that no row has at the tensors' end
            sure = (p + 1) * self.threads <= last and row.length is None
            if not sure:
                for name in self.words:
                    for k in range(self.words_of(name)):
                        T.buffer_store(self.words[name], T.uint32(self.neutral(name)), [self.place_of(name, p, k)])
            with where(True if sure else i < whole):
                for name in of_rows:
                    at = self.tensors[name].ptr_to([self.first_of(row, p, i)])
                    self.load(self.words_at(name, p), at, self.streaming, half=self.frame.access == 2)
                if "mask" not in of_rows and "mask" in self.words and self.aligned:
                    at = self.tensors["mask"].ptr_to([i * self.pack - row.shift])
                    self.load(self.words_at("mask", p), at, half=self.frame.access == 2)
        if self.problem.is_drawn and "drop" in self.words:
            self.draw(row)
        for p in rounds:
            i = self.number(p)
            if self.frame.unit < self.pack and (p + 1) * self.threads >= self.least:
                first, last = self.bounds(row, i)
                with where(tirx.all(i >= row.whole, i < row.packs)):
                    for name in of_rows:
                        at = self.tensors[name].ptr_to([self.first_of(row, p, i)])
                        self.load_some(name, self.words_at(name, p), at, first, last)
            if "mask" not in of_rows and "mask" in self.words and not self.aligned:
                self.gather_mask(self.words["mask"], p * self.each, row, p, i)
        for p in rounds:
            for name in of_rows:
                if name != "drop":
                    self.fill(name, row, p, self.number(p))

    def draw(self, row: LoadedRow) -> None:
        """A bit of each element of all packs, which are in order and whole fours, while the packs are on their way."""
        seed, offset = (named(name, self.tensors["philox"][k]) for k, name in enumerate(("seed", "offset")))
        for p in range(self.rounds):
            first = T.shift_right(self.first_of(row, p, self.number(p)), T.int64(2)) * 4
            bits = [
                T.Select(is_kept(self.problem, seed, offset, first + v), T.uint32(1 << v), T.uint32(0))
                for v in range(self.pack)
            ]
            T.buffer_store(self.words["drop"], functools.reduce(T.bitwise_or, bits), [p])

    def gather_mask(self, words: Any, first: int, row: LoadedRow, p: int, i: Any) -> None:
        """The columns of pack i of the mask of columns, which starts at any of them, into `words` from `first` on."""
        at = self.tensors["mask"].ptr_to([i * self.pack - row.shift])
        all_words = [words[first + k] for k in range(self.each)]
        if self.edge(row, p, i) is None:
            self.load_some("mask", all_words, at, 0, self.pack)
            return
        for k in range(self.each):  # columns that there are not
            T.buffer_store(words, T.uint32(0), [first + k])
        self.load_some("mask", all_words, at, *self.bounds(row, i))

    def bounds(self, row: LoadedRow, i: Any) -> tuple[Any, Any]:
        """The first element of pack i that is the row's, its last (exclusive)."""
        return row.shift - i * self.pack, row.shift + self.problem.cols - i * self.pack

    def load_some(self, name: str, words: list[Any], at: Any, first: Any, last: Any) -> None:
        """The elements of a pack of an input from `first` to before `last`, in the widest units that rows are multiples
        of."""
        item = 1 if name == "drop" else self.item
        unit = min(4, self.frame.unit * item)
        names = "xyzw"[: len(words)]
        source = _LOAD_SOME.format(
            words=len(words),
            unit=unit,
            parameters=", ".join(f"unsigned& {name}" for name in names),
            names=", ".join(names),
            assign=_ASSIGN[unit],
            out=" ".join(f"{name} = v[{k}];" for k, name in enumerate(names)),
        )

        def units(count: Any) -> Any:
            if item >= unit:
                return count * (item // unit)
            return count // (unit // item) if isinstance(count, int) else T.shift_right(count, unit // item // 2)

        self.call(f"pack_load_some_{len(words)}_{unit}", *words, at, units(first), units(last), source=source)

    def place_of(self, name: str, p: int, k: int) -> int:
        return p * self.words_of(name) + k

    def words_at(self, name: str, p: int) -> list[Any]:
        return [self.word(name, p, k) for k in range(self.words_of(name))]
