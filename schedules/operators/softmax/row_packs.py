"""A row's packs: where its elements lie in them, and how packs are read, widened, rounded and stored.

A pack is four 32-bit words, or two.  Pack i of a row holds its elements from E * i - shift on, E to a pack; thread t of
a row has packs t, t + threads, ...; all loops over them are unrolled, so that what is kept of them lies in registers.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.core.problem import numpy_dtype
from schedules.lowering.accesses import load_statement
from schedules.operators.softmax import pack_sources as sources
from schedules.operators.softmax.definition import Rounding, SoftmaxProblem, Values, row_program
from schedules.operators.softmax.packs import Frame, row_inputs
from schedules.operators.softmax.rows import itemsize_of


class PackConfig(Protocol):
    """What a config says of how a row's packs are dealt to threads and kept."""

    @property
    def threads(self) -> int: ...
    @property
    def access(self) -> int: ...
    @property
    def kept(self) -> str: ...
    @property
    def online(self) -> bool: ...
    @property
    def streaming(self) -> str: ...
    @property
    def team(self) -> int: ...
    @property
    def block(self) -> int: ...
    def rounds(self, problem: SoftmaxProblem) -> int: ...


@dataclass(frozen=True)
class Row:
    """What a thread knows of its row: expressions, int32 unless said."""

    shift: Any  # elements of other rows in the first pack
    packs: Any  # or none, for what is no row
    start: Any  # of the tensors of the problem's dtype: element of the first pack, int64
    own: Any  # False for what is no row but has the packs of one, to be computed and not stored
    number: Any  # of the row, int64
    length: Any = field(default=None, kw_only=True)  # columns that count, where the mask says how many


R = TypeVar("R", bound=Row)


class Scalar:
    """A variable of a thread."""

    def __init__(self, name: str, value: Any, dtype: str = "int32") -> None:
        self.cell = T.alloc_local((1,), dtype)
        IRBuilder.name(name, self.cell)
        self.set(value)

    @property
    def value(self) -> Any:
        return self.cell[0]

    def set(self, value: Any) -> None:
        T.buffer_store(self.cell, value, [0])


@contextlib.contextmanager
def where(condition: Any) -> Iterator[None]:
    """A body that runs where `condition` holds; without an `if` where that is known."""
    if condition is True:
        yield
    elif condition is not False:
        with T.If(condition), T.Then():
            yield


class RowPacks(ABC, Generic[R]):
    """The packs of one thread; its methods emit statements.  Where packs come from, `each_pack` knows."""

    words: dict[str, Any]  # of the packs of each input
    fused: bool = False  # exponents by one operation: fewer instructions, at times a few registers more

    def __init__(
        self, problem: SoftmaxProblem, config: PackConfig, tensors: dict[str, Any], rows: Any, warp: Any, lane: Any
    ) -> None:
        self.problem, self.rows = problem, rows
        self.threads, self.team, self.kept, self.online = config.threads, config.team, config.kept, config.online
        self.streaming = config.streaming
        self.streaming_stores = config.streaming in ("stores", "both")
        # columns that do not count are neutral elements here
        counted = replace(problem, mask="none", queries=0) if problem.is_cut else problem
        self.added = counted.mask != "none"
        self.program = row_program(counted, rounding=Rounding(fma, times) if self.fused else None)
        self.inputs = row_inputs(problem)
        self.frame = Frame.of_row(problem, config.access)
        self.pack, self.item, self.each = self.frame.pack, self.frame.itemsize, self.frame.words
        self.aligned = self.frame.aligned  # rows consist of whole packs
        self.rounds = config.rounds(problem)
        self.least = -(-problem.cols // self.pack)  # packs of a row
        self.in_dtype, self.outputs = problem.in_dtype, [argument.name for argument in problem.element_outputs]
        self.out_dtype = problem.element_outputs[0].dtype if self.outputs else problem.dtype
        self.out_item = itemsize_of(self.out_dtype)
        self.known: Values = {}  # of the row before it is reduced
        self.warp, self.lane = warp, lane
        self.tensors = {
            name: T.decl_buffer((rows * problem.cols,), buffer.dtype, data=buffer.data) if len(buffer.shape) == 2
            else buffer
            for name, buffer in tensors.items()
        }  # fmt: skip

    def length_of(self, number: Any) -> Any:
        """How many columns of row `number` count, at most all; None if the mask does not say."""
        cols, queries = self.problem.cols, self.problem.queries
        if self.problem.mask == "lengths":
            return Scalar("length", T.min(self.tensors["lengths"][number], cols)).value
        if self.problem.mask == "causal":
            of_matrix = T.Cast("int32", T.truncmod(number, T.int64(queries)))
            return Scalar("length", of_matrix + (cols - queries + 1)).value
        return None

    @abstractmethod
    def each_pack(self, row: R, *needs: str, stored: bool = False) -> Iterator[tuple[int, Any]]:
        """The rounds with the number of the thread's pack, with the inputs of it that the body needs in words.  The
        body is for packs that there are; unless it is `stored`, for neutral ones too."""

    def edge(self, row: R, p: int, i: Any) -> tuple[Any, Any, Any] | None:
        """(whether pack i holds elements of other rows, its first own element, its last (exclusive)); None if it never
        does."""
        threads = self.threads
        if self.aligned or not (p == 0 or (p + 1) * threads >= self.least):
            return None
        first, last = row.shift - i * self.pack, row.shift + self.problem.cols - i * self.pack
        return tirx.any(first > 0, last < self.pack), first, last

    def fill(self, name: str, row: R, p: int, i: Any) -> None:
        """Have elements of other rows in pack i of an input count as neutral, and columns that do not count."""
        edge = self.edge(row, p, i)
        if row.length is not None and name == "x":
            first, last = row.shift - i * self.pack, row.shift + row.length - i * self.pack
            edge = tirx.any(first > 0, last < self.pack), first, last
        if edge:
            mixed, first, last = edge
            bits = 8 * self.item
            names = "xyzw"[: self.each]
            source = sources.FILL.format(
                bits=bits,
                ones="0xffffffff" if bits == 32 else "0xffff",
                words=self.each,
                parameters=", ".join(f"unsigned& {name}" for name in names),
                names=", ".join(names),
                out=" ".join(f"{name} = v[{k}];" for k, name in enumerate(names)),
            )
            words = [self.word(name, p, k) for k in range(self.each)]
            with where(mixed):
                self.call(
                    f"pack_fill_{self.each}_{bits}", *words, first, last, T.uint32(self.neutral(name)), source=source
                )

    def neutral(self, name: str) -> int:
        """A word of neutral elements of an input."""
        return 0 if name == "drop" else repeated(self.program.fill[name], self.in_dtype)

    def words_of(self, name: str) -> int:
        """Words of a pack of that input: bytes of drop stand for elements, or bits where it is drawn."""
        if name == "drop":
            return 1 if self.problem.is_drawn else self.pack // 4
        return self.each

    def word(self, name: str, p: int, k: int) -> Any:
        return self.words[name][p * self.words_of(name) + k]

    def load(self, words: list[Any], at: Any, streaming: str = "no", half: bool = False) -> None:
        """A pack's words, or the first `half` of one, from any memory; from global memory as `streaming` says."""
        count = len(words)
        names = "xyzw"[:count]
        kind = f"uint{count}" if count > 1 else "unsigned short" if half else "unsigned"
        how, load = load_statement(kind, streaming)
        name = f"{how}{2 if half else 4 * count}"
        source = sources.LOAD.format(
            name=name,
            parameters=", ".join(f"unsigned& {name}" for name in names),
            load=load,
            assign=" ".join(f"{name} = value.{name};" for name in names) if count > 1 else "x = value;",
        )
        self.call(f"pack_load_{name}", *words, at, source=source)

    def call(self, name: str, *arguments: Any, source: str) -> None:
        T.evaluate(T.cuda.func_call(name, *arguments, source_code=source))

    def element(self, name: str, p: int, v: int) -> Any:
        """Element v of a pack in words, as float32."""
        if name == "drop":
            if self.problem.is_drawn:
                bit = T.bitwise_and(self.word(name, p, 0), T.uint32(1 << v))
                return T.Select(bit != 0, T.float32(1), T.float32(0))
            return T.Cast("float32", _bits(self.word(name, p, v // 4), 8 * (v % 4), 8))
        per = 4 // self.item
        return self.widened(self.word(name, p, v // per), v % per, self.in_dtype)

    def widened(self, word: Any, half: int, dtype: str) -> Any:
        """An element of `dtype` in a word, as float32."""
        if dtype == "float32":
            return T.reinterpret("float32", word)
        if dtype == "bfloat16":  # the upper half of a float32
            return T.reinterpret(
                "float32", T.bitwise_and(word, T.uint32(0xFFFF0000)) if half else T.shift_left(word, T.uint32(16))
            )
        return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", _bits(word, 16 * half, 16))))

    def columns(self, row: R, p: int, i: Any, v: int) -> Values:
        """Element v of pack i, the thread's number p, of each input, and which column it is; none is negative."""

        def element(name: str) -> Any:
            if name != "col":
                return self.element(name, p, v)
            col, sure = i * self.pack + (v - row.shift), (p + 1) * self.threads <= self.least
            return col if sure else T.Select(i < row.packs, col, -1)

        return Columns(element)

    def two(self, a: Any, b: Any) -> Any:
        """The word of two numbers rounded to 16 bits, `a` in its low half."""
        if self.out_dtype == "bfloat16":
            return T.cuda.float22bfloat162_rn(a, b)
        return T.reinterpret("uint32", T.Cast("float16x2", T.Shuffle([a, b], [0, 1])))

    def packed(self, name: str, values: list[Any]) -> Any:
        """A pack's words of elements rounded to the output's dtype."""
        per = 4 // self.out_item
        words = T.alloc_local((max(1, len(values) // per),), "uint32")
        IRBuilder.name(f"{name}_words", words)
        for k in range(int(words.shape[0])):
            of_word = values[k * per : (k + 1) * per]
            word = self.two(of_word[0], of_word[-1]) if per == 2 else T.reinterpret("uint32", of_word[0])
            T.buffer_store(words, word, [k])
        return words

    def store(self, name: str, row: R, p: int, i: Any, words: Any) -> None:
        """Pack i of an output, of the row's elements, up to four words at a time: where other rows share it, its own in
        parts."""
        kind, instruction = ("streaming", "__stcs") if self.streaming_stores else ("whole", "__stwb")
        count, edge = int(words.shape[0]), self.edge(row, p, i)
        each = min(4, count)
        called, text = sources.STORES[each if self.pack * self.out_item > 2 else 0]
        whole = text.format(name=kind, store=instruction)
        unit = self.frame.unit * self.out_item
        for k in range(0, count, each):
            before = 4 * k // self.out_item  # elements
            to = self.tensors[name].ptr_to([self.first_of(row, p, i) + before])
            some = [words[k + j] for j in range(each)]
            if edge is None:
                self.call(f"{called}_{kind}", *some, to, source=whole)
                continue
            mixed, first, last = edge
            all_words = some + [T.uint32(0)] * (4 - each)
            ends = (first - before) * self.out_item, T.min((last - before) * self.out_item, 4 * each)
            with T.If(mixed):
                with T.Then():
                    of_unit = sources.STORE_SOME.format(unit=unit)
                    self.call(f"pack_store_some_{unit}", *all_words, to, *ends, source=of_unit)
                with T.Else():
                    self.call(f"{called}_{kind}", *some, to, source=whole)

    def first_of(self, row: R, p: int, i: Any) -> Any:
        """The first element of pack i, int64."""
        return row.start + T.Cast("int64", i * self.pack)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return T.call_pure_extern("float32", "fmaf", a, b, c)


def times(a: Any, b: Any) -> Any:
    """a * b, rounded: the compiler does not fuse it with an addition."""
    return T.call_pure_extern("float32", "__fmul_rn", a, b)


class Columns(dict[str, Any]):
    """One column of the inputs, each widened when it is asked for."""

    def __init__(self, element: Callable[[str], Any]) -> None:
        super().__init__()
        self.element = element

    def __missing__(self, name: str) -> Any:
        return self.element(name)


def _bits(word: Any, first: int, count: int) -> Any:
    """`count` bits of a word from bit `first` on."""
    shifted = T.shift_right(word, T.uint32(first)) if first else word
    return shifted if first + count == 32 else T.bitwise_and(shifted, T.uint32((1 << count) - 1))


def repeated(value: float, dtype: str) -> int:
    """The bits of a word of which each element is `value`."""
    element = np.array(value, numpy_dtype(dtype))
    return int(np.repeat(element, 4 // element.itemsize).view(np.uint32)[0])
