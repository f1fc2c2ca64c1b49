"""What an operator tells the skeleton: its tensors, its tiles, and where each comes from and goes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedules.hopper.config import HopperConfig
from schedules.hopper.shared import SharedTile, Staging, TensorMap
from schedules.problem import Argument, Pair

Tensors = Mapping[str, Any]  # argument name to its TIRx buffer


@dataclass(frozen=True)
class Load:
    """One TMA box: `offset` bytes into the operand's tile, from the coordinates `at` (innermost first)."""

    offset: Any
    at: tuple[Any, ...]


@dataclass(frozen=True)
class Operand:
    """An operand's tile, and the tensor map of the boxes that fill it.

    A stage may hold `tiles` of them one behind the other, for several kernel taps; `taps` says at how many bytes each
    of these begins.
    """

    tile: SharedTile
    source: TensorMap
    tiles: int = 1
    taps: tuple[int, ...] = (0,)

    @property
    def nbytes(self) -> int:
        return self.tiles * self.tile.nbytes


@dataclass(frozen=True)
class Output:
    """How results leave: elements of `dtype` through the staging memory, by boxes of the tensor map.

    None is greater than `bound` before it is rounded and saturated.
    """

    dtype: str
    staging: Staging
    target: TensorMap
    bound: float = math.inf


class Work(ABC):
    """A convolution as tiles of a matrix product.  Coordinates are int32 expressions; `place` is whatever the operator
    makes of a tile's number."""

    config: HopperConfig
    arguments: tuple[Argument, ...]
    kernel: Pair  # taps, or groups of taps of which a stage holds all
    chunks: int  # stages of one tap, or group of them
    clusters: int  # tiles of a whole cluster
    a: Operand
    b: Operand
    output: Output

    @property
    def dtype(self) -> str:
        """Of the operands."""
        return self.arguments[0].dtype

    @property
    def b_start(self) -> int:
        """Bytes from the start of a stage to operand b, where any swizzle begins anew."""
        return -(-self.a.nbytes // 1024) * 1024

    @property
    def stage_bytes(self) -> int:
        """Bytes from one stage to the next."""
        return self.b_start + self.b.nbytes

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

    @abstractmethod
    def store_at(self, place: Any, consumer: Any, column: int) -> tuple[Any, ...]:
        """Coordinates in the output of a consumer's rows and the columns from `column` of the block."""

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
