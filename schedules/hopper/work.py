"""What an operator tells the skeleton: its tensors, its tiles, and where each comes from and goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedules.hopper.config import HopperConfig
from schedules.hopper.shared import SharedTile, Staging, TensorMap
from schedules.problem import Argument, Pair

Tensors = Mapping[str, Any]  # argument name to its TIRx buffer
# (number of the sums, 64 rows of the consumer's, group of eight columns, register of its four) to an accumulator
Fragment = Callable[[int, int, int, int], Any]


@dataclass(frozen=True)
class Member:
    """The numbers of a thread that multiplies: consumer, warp of it, lane of the warp, and thread of the consumer."""

    consumer: Any
    warp: Any
    lane: Any
    thread: Any


@dataclass(frozen=True)
class Load:
    """One TMA box: `offset` bytes into the operand's tile, from the coordinates `at` (innermost first)."""

    offset: Any
    at: tuple[Any, ...]


@dataclass(frozen=True)
class Operand:
    """An operand's tiles in a stage, one behind the other, and the tensor map of the boxes that fill them."""

    tile: SharedTile
    source: TensorMap
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.count * self.tile.nbytes


@dataclass(frozen=True)
class Product:
    """Something that a stage adds to the sums number `sums`: rows of operand a from `a` bytes on, times operand b from
    `b` bytes on."""

    sums: int
    a: int
    b: int


@dataclass(frozen=True)
class Output:
    """How results leave: elements of `dtype` through the staging memory, by boxes of the tensor map."""

    dtype: str
    staging: Staging
    target: TensorMap


class Work(ABC):
    """A convolution as tiles of a matrix product.  Coordinates are int32 expressions; `place` is whatever the operator
    makes of a tile's number."""

    config: HopperConfig
    arguments: tuple[Argument, ...]
    kernel: Pair  # taps, each a stage for a chunk of the channels
    products: tuple[Product, ...] = (Product(0, 0, 0),)  # of each stage
    margin: int = 0  # columns of a consumer's before the first that is stored, whole groups of eight
    chunks: int  # stages of one tap
    clusters: int  # tiles of a whole cluster
    a: Operand
    b: Operand
    output: Output

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return self.arguments[0].dtype

    @property
    def sums(self) -> int:
        """Sets of accumulators."""
        return 1 + max(each.sums for each in self.products)

    @property
    def stage_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def reason(self) -> str | None:
        """Why TMA cannot move these tiles; None if it can."""
        return self.a.source.reason() or self.b.source.reason() or self.output.target.reason()

    @abstractmethod
    def place(self, tile: Any, rank_m: Any, rank_n: Any) -> Any:
        """Where tile number `tile` of a cluster lies, for the block at (rank_m, rank_n) of it."""

    def taps(self, place: Any) -> tuple[Any, Any, Any, Any]:
        """First and last (exclusive) ry, first and last rx that a tile needs; at least one tap."""
        return 0, self.kernel[0], 0, self.kernel[1]

    @abstractmethod
    def loads_a(self, place: Any, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        """The boxes of part number `part` (of cluster_n) of operand a, for a tap and a chunk of the channels."""

    @abstractmethod
    def loads_b(self, place: Any, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        """The same for operand b, in cluster_m parts."""

    def emit_results(
        self, tensors: Tensors, output_map: Any, place: Any, sums: Any, memory: Any, member: Member
    ) -> None:
        """Finish a consumer's tile: its `sums` by way of the staging `memory` to the output."""
        from schedules.hopper import epilogue

        epilogue.emit(self, tensors, output_map, place, sums, memory, member)

    @abstractmethod
    def store_at(self, place: Any, consumer: Any, column: int) -> tuple[Any, ...]:
        """Coordinates in the output of a consumer's rows and its stored columns from `column` on."""

    def totals(self, fragment: Fragment, m: int, group: int, below: int, lane: Any) -> Sequence[Any]:
        """The two sums of a thread in columns 8 * `group` + lane % 4 * 2 + (0, 1) of its consumer, in 64 rows number
        `m`, there 8 * `below` rows down; all threads of a warp ask together."""
        return [fragment(0, m, group, 2 * below + j) for j in range(2)]

    def row_term(self, tensors: Tensors, place: Any, consumer: Any, row: Any) -> Any:
        """What the epilogue needs of a row of the consumer's, found once for all columns; None if nothing."""
        return None

    def column_term(self, tensors: Tensors, place: Any, column: Any) -> Any:
        """What the epilogue needs of a column of the block's, read once for all rows; None if nothing."""
        return None

    @abstractmethod
    def finish(self, tensors: Tensors, place: Any, total: Any, of_row: Any, of_column: Any, column: Any) -> Any:
        """The output, float32 or int32, not yet rounded, of a sum in a column of the block's; with the terms of its row
        and of its column."""
