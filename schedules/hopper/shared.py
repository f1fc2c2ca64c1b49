"""Tensor maps, and tiles in shared memory as TMA writes them and wgmma reads them.

Both swizzle alike: 16-byte chunks of a row are XORed with the row's number, over 1024 bytes for rows of 128 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from schedules.core.problem import numpy_dtype
from schedules.core.tvm import T
from schedules.hopper.config import K_BYTES, STAGING
from schedules.tirx.types import Expr, Index

SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # bytes of a row to CUtensorMapSwizzle, and to TVM's code in descriptors
TFLOAT32 = 11  # CUtensorMapDataType
LONGEST_BOX = 256  # elements of a box along an axis
LONGEST_STEP = 8  # element stride
UNIT = 16  # bytes that descriptors count in
SECTOR = 32  # bytes of L2
FOLDS = (4, 2, 1)  # rows that TMA may move as one line
PATTERN = 8  # lines after which a swizzle repeats, at least


def aligned(size: int) -> int:
    """`size` bytes up to where any swizzle begins anew."""
    return -(-size // 1024) * 1024


def folded(row: Index, fold: int) -> Index:
    """The row of a tensor that lies where row `row` is looked for, if TMA moved `fold` rows as one line.

    TMA takes about as long for a row of 32 bytes as for one of 128, so that neighbours which are contiguous go as one
    line with the swizzle of its length.  A narrower row's swizzle exchanges the same chunks within rows, and not the
    rows of a line: slot q of line i holds row q ^ (i // 2) % 4 of the line for four rows of 32 bytes, q ^ i // 4 % 2
    for two of 64.  Repeats after 8 lines; its own inverse.
    """
    if fold == 1:
        return row
    if isinstance(row, int):
        return row ^ row // 8 % fold
    return T.bitwise_xor(row, T.bitwise_and(T.shift_right(row, T.int32(3)), T.int32(fold - 1)))


@dataclass(frozen=True)
class TensorMap:
    """What ``cuTensorMapEncodeTiled`` is told of the argument `tensor`; axes innermost first.

    `strides` in bytes, of all axes but the first.  `box` counts the elements that arrive, `steps` how far apart they
    are in the tensor.
    """

    tensor: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int  # bytes
    promotion: int = 2  # CUtensorMapL2promotion: what comes from memory into L2 at once, 2 is 128 bytes
    to_tf32: bool = False  # float32 are rounded to TF32 as they arrive: to nearest, infinities and NaN left alone

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def box_bytes(self) -> int:
        """Bytes that a box brings, those beyond the tensor's borders among them."""
        return math.prod(self.box) * numpy_dtype(self.dtype).itemsize

    def of_addends(self, count: int) -> TensorMap:
        """The map of so many tensors like this one, one behind the other, in boxes of one of them."""
        apart = self.strides[-1] * self.sizes[-1]
        return replace(
            self,
            sizes=(*self.sizes, count),
            strides=(*self.strides, apart),
            box=(*self.box, 1),
            steps=(*self.steps, 1),
        )

    def words(self) -> list[int]:
        """The numbers of the call after dtype, rank and pointer: sizes, strides, box, steps, interleave (none),
        swizzle, promotion, fill (zeros), and the type that arrives if it is another."""
        box = [extent * step for extent, step in zip(self.box, self.steps, strict=True)]
        words = [*self.sizes, *self.strides, *box, *self.steps, 0, SWIZZLES[self.swizzle], self.promotion, 0]
        return [*words, TFLOAT32] if self.to_tf32 else words

    def reason(self) -> str | None:
        """Why there is no such tensor map; None if there is.  From the CUDA driver API's description of the call."""
        for stride in self.strides:
            if stride % 16 or stride >= 2**40:
                return f"{self.tensor} has rows {stride} bytes apart, TMA needs a multiple of 16"
        for extent, step in zip(self.box, self.steps, strict=True):
            if step > LONGEST_STEP:
                return f"{self.tensor} is read at every element in {step}, TMA reaches {LONGEST_STEP}"
            if extent * step > LONGEST_BOX:
                return f"a tile of {self.tensor} reaches over {extent * step} elements, TMA over {LONGEST_BOX}"
        return None


@dataclass(frozen=True)
class SharedTile:
    """A tile of an operand, `rows` (m or n) x `k` elements of `item` bytes, in shared memory.

    K-major: [k / run][rows][run], `run` elements of k being a row of bytes that is swizzled.
    MN-major (`transposed`): [rows / run][k][run], `run` rows side by side.
    `fold` rows of a K-major tile come as one line, permuted: wgmma's row i is ``folded(i, fold)``.
    Of a K-major tile, wgmma's groups of eight rows begin `pitch` rows apart.
    """

    rows: int
    k: int
    item: int
    run: int
    transposed: bool = False
    fold: int = 1
    pitch: int = PATTERN

    @property
    def swizzle(self) -> int:
        return self.run * self.item

    @property
    def nbytes(self) -> int:
        return self.rows * self.k * self.item

    @property
    def slab(self) -> int:
        """Bytes from one run to the next."""
        return (self.k if self.transposed else self.rows) * self.swizzle

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Leading and stride offsets in units of 16 bytes, and the swizzle's code.

        The stride is that of eight rows; the leading offset is from run to run where the rows lie across them, and of
        no effect for K-major tiles.
        """
        leading = self.slab // UNIT if self.transposed else 1
        return leading, self.pitch * self.swizzle // UNIT, SWIZZLES[self.swizzle]

    def k_offset(self, step: int) -> int:
        """Bytes to wgmma step `step` of the reduction."""
        if self.transposed:
            return step * (K_BYTES // self.item) * self.swizzle
        each = self.swizzle // K_BYTES
        return step // each * self.slab + step % each * K_BYTES

    def row_offset(self, row: int) -> int:
        """Bytes to a row that is a multiple of 64, or of a run where runs are shorter."""
        return row // self.run * self.slab if self.transposed else row // PATTERN * self.pitch * self.swizzle


@dataclass(frozen=True)
class Runs:
    """What ordinary stores are told of the argument `tensor`, for outputs whose rows TMA's strides cannot follow.

    `rows` rows of a tile side by side are one run of contiguous elements of the tensor, or what of it lies inside; runs
    begin and end at multiples of `vector` elements, which are stored at once.
    """

    tensor: str
    elements: int  # of the tensor
    rows: int
    vector: int

    def reason(self) -> str | None:
        """Why runs cannot be stored; None if they can."""
        return beyond_indices(self.tensor, self.elements)


@dataclass(frozen=True)
class Columns:
    """What stores from registers are told of the argument `tensor`, for outputs whose contiguous axis is that of a
    tile's rows: neighbouring rows of one column are stored at once."""

    tensor: str
    elements: int  # of the tensor

    def reason(self) -> str | None:
        """Why columns cannot be stored; None if they can."""
        return beyond_indices(self.tensor, self.elements)


@dataclass(frozen=True)
class Slots:
    """What ordinary stores are told of the argument `tensor`, for outputs of channels that each have a tile's rows, or
    some of them, side by side: the work says which slot a row has.

    Slots of a channel are stored in vectors of `vector` elements; where `ragged`, the first and the last may be parts.
    """

    tensor: str
    elements: int  # of the tensor
    vector: int
    ragged: bool

    def reason(self) -> str | None:
        """Why slots cannot be stored; None if they can."""
        return beyond_indices(self.tensor, self.elements)


def beyond_indices(tensor: str, elements: int) -> str | None:
    """Why elements of `tensor` cannot be numbered; None if they can."""
    if elements >= 2**31:
        return f"{tensor} has 2**31 elements or more, which 32-bit indices do not reach"
    return None


@dataclass(frozen=True)
class NoStaging:
    """Of results that leave straight from registers: `rows` x `columns` of a consumer, all in one pass."""

    rows: int
    columns: int
    together: ClassVar[int] = 1
    nbytes: ClassVar[int] = 0

    @property
    def width(self) -> int:
        return self.columns


@dataclass(frozen=True)
class Staging:
    """Where a consumer's results wait for their store: `rows` x `width` elements of `item` bytes for each store, and as
    many stores together as STAGING holds.

    The store takes `fold` rows as one line.  Those of the accumulators are permuted as operand a's, of which `fold_a`
    came as one; where the two are alike, the store puts them right.  Rows of 32, 64 or 128
    bytes are swizzled as TMA has it: 16-byte chunk c of row r lies at c ^ (r * row bytes // 128) % chunks of a row.
    """

    rows: int
    width: int
    item: int
    columns: int  # of the block
    fold: int = 1
    fold_a: int = 1

    @property
    def row_bytes(self) -> int:
        return self.width * self.item

    @property
    def swizzle(self) -> int:
        """Bytes of a row where TMA swizzles rows so long; else those of a chunk, with which it leaves them as they
        are."""
        return self.row_bytes if self.row_bytes in SWIZZLES else UNIT

    @property
    def store_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def together(self) -> int:
        """Stores of a pass."""
        stores = self.columns // self.width
        fits = (n for n in range(1, stores + 1) if stores % n == 0 and (n == 1 or n * self.store_bytes <= STAGING))
        return max(fits)

    @property
    def nbytes(self) -> int:
        return self.together * self.store_bytes

    def chunk(self, row: Index, chunk: Index) -> Expr:
        """Bytes to 16-byte chunk number `chunk` of a row of the accumulators."""
        if self.fold != self.fold_a:
            row = folded(folded(row, self.fold_a), self.fold)
        if self.swizzle < self.row_bytes:
            return row * self.row_bytes + chunk * UNIT
        line = T.truncdiv(row, 128 // self.row_bytes)
        return row * self.row_bytes + T.bitwise_xor(chunk, T.truncmod(line, self.row_bytes // 16)) * 16


@dataclass(frozen=True)
class RunStaging:
    """Where a consumer's results wait for ordinary stores: `rows` rows of `width` columns, `pitch` elements of `item`
    bytes apart, in passes over the `columns` of the block.

    The pitch is that of the tensor, so that rows make runs as they lie there, where all columns of the tensor fit; else
    it is 16 bytes more than the width, which spreads the rows over the banks.
    """

    rows: int
    width: int
    pitch: int
    item: int
    columns: int
    together: ClassVar[int] = 1

    @property
    def packed(self) -> bool:
        """Whether a pass holds whole rows of the tensor, without gaps."""
        return self.pitch <= self.width

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch * self.item


@dataclass(frozen=True)
class SlotStaging:
    """Where a consumer's results wait for ordinary stores with the columns outside: `width` columns at a time of the
    block's `columns`, of each as many slots as there are `rows` and a vector more, in which they may begin."""

    rows: int
    width: int
    item: int
    columns: int
    together: ClassVar[int] = 1

    @property
    def pitch(self) -> int:
        """Slots from column to column: eight more than a multiple of 64, which spreads the columns over the banks."""
        return self.rows + UNIT // self.item

    @property
    def nbytes(self) -> int:
        return self.pitch * self.width * self.item


def slot_staging(rows: int, columns: int, item: int) -> SlotStaging:
    """Staging for the results of a consumer, in passes of as many columns as STAGING holds."""
    width = columns
    while width % 32 == 0 and SlotStaging(rows, width, item, columns).nbytes > STAGING:
        width //= 2
    return SlotStaging(rows, width, item, columns)


@dataclass(frozen=True)
class PlaneStaging:
    """Where the results of all `parts` of a tile wait for bulk copies, as they lie in the tensor: of each of the
    `images` of a tile `width` columns at a time of the block's `columns`, and of a column `plane` results side by
    side."""

    rows: int  # of a part
    width: int
    item: int
    columns: int
    images: int
    plane: int
    parts: int
    together: ClassVar[int] = 1

    @property
    def image(self) -> int:
        """Elements of an image's columns."""
        return self.width * self.plane

    @property
    def nbytes(self) -> int:
        """A part's share, in whole 16 bytes."""
        return -(-self.images * self.image * self.item // (self.parts * UNIT)) * UNIT


@dataclass(frozen=True)
class StripStaging:
    """Where the results of all `parts` of a tile wait together for ordinary stores of whole sectors: `width` columns at
    a time of the block's `columns`, of each a strip of `length` results at most, as late after a sector begins as in
    the tensor."""

    rows: int  # of a part
    width: int
    item: int
    columns: int
    length: int
    parts: int
    together: ClassVar[int] = 1

    @property
    def vectors(self) -> int:
        """Of 16 bytes that a strip reaches, whole sectors."""
        each = SECTOR // self.item
        return -(-(self.length + each - 1) // each) * (SECTOR // UNIT)

    @property
    def pitch(self) -> int:
        """Slots from column to column: eight more than a multiple of 16, which spreads the columns over the banks."""
        return (self.vectors + 1) * (UNIT // self.item)

    @property
    def nbytes(self) -> int:
        """A part's share, in whole 16 bytes."""
        return -(-self.width * self.pitch * self.item // (self.parts * UNIT)) * UNIT


J = TypeVar("J", PlaneStaging, StripStaging)


def in_passes(staging: J, room: int = STAGING) -> J:
    """The same in passes of as many columns as `room` bytes hold for each part."""
    while staging.width % 32 == 0 and staging.nbytes > room:
        staging = replace(staging, width=staging.width // 2)
    return staging


@dataclass(frozen=True)
class LineStaging:
    """Where a consumer's results wait for TMA where neighbours in the tensor are rows of the tile: `width` columns at a
    time of the block's `columns`, of each `run` rows that lie side by side there, swizzled, which one store takes of
    all these columns, and then the next of the `rows`."""

    rows: int
    width: int
    item: int
    columns: int
    run: int
    together: ClassVar[int] = 1

    @property
    def row_bytes(self) -> int:
        """Of a column's run."""
        return self.run * self.item

    @property
    def store_bytes(self) -> int:
        return self.width * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.item

    def chunk(self, row: Expr, column: Expr) -> Expr:
        """Bytes to the 16 that have row `row`, a multiple of eight, in a column."""
        chunk, chunks = T.truncdiv(T.truncmod(row, self.run), UNIT // self.item), self.row_bytes // UNIT
        turned = T.truncmod(T.truncdiv(column * self.row_bytes, 128), chunks)
        at = column * self.row_bytes + T.bitwise_xor(chunk, turned) * UNIT
        return T.truncdiv(row, self.run) * self.store_bytes + at


def line_staging(rows: int, columns: int, item: int, line: int, room: int) -> LineStaging:
    """Staging for the results of a consumer, of whose rows `line` lie side by side, in passes of as many columns as
    `room` bytes hold."""
    width, run = columns, math.gcd(line, 128 // item)
    while width % 32 == 0 and rows * width * item > room:
        width //= 2
    return LineStaging(rows, width, item, columns, run)


@dataclass(frozen=True)
class BlockStaging:
    """Where a consumer's results wait for ordinary stores as they lie in the tensor, all in one pass: `blocks` of
    `rows` rows of `run` elements of `item` bytes.  Columns count `piece` elements of a run side by side, then blocks,
    then pieces; those behind the end of a run are dropped."""

    rows: int
    columns: int  # of the consumer
    run: int
    blocks: int
    item: int
    piece: int
    together: ClassVar[int] = 1

    @property
    def width(self) -> int:
        return self.columns

    @property
    def nbytes(self) -> int:
        return self.rows * self.run * self.blocks * self.item


def run_staging(rows: int, columns: int, size: int, item: int) -> RunStaging:
    """Staging for the results of a consumer where a row of the tensor has `size` elements."""
    if size <= columns and rows * size * item <= STAGING:
        return RunStaging(rows, columns, size, item, columns)
    width = _swizzled_width(columns, item, 128 // item)
    return RunStaging(rows, width, width + UNIT // item, item, columns)


def _swizzled_width(columns: int, item: int, widest: int) -> int:
    """Columns of a pass, of at most `widest` and 128 bytes, of which `columns` are whole passes."""
    width = min(widest, 128 // item)
    while columns % width:
        width //= 2
    return width


def staging_for(rows: int, columns: int, item: int, widest: int, folds: tuple[int, int] = (1, 1)) -> Staging:
    """Staging for the results of a consumer, in stores of at most `widest` columns and 128 bytes; `folds` are the
    store's and operand a's.  Where rows of such a store are only one sector of L2, they are longer and not swizzled: of
    eight rows that are an odd number of sectors long, no more than two begin in the same banks."""
    width = _swizzled_width(columns, item, widest)
    if width * item == SECTOR < widest * item and folds == (1, 1):
        fits = (n for n in range(3, columns // width + 1, 2) if columns % (n * width) == 0)
        width *= max((n for n in fits if n * width <= LONGEST_BOX and rows * n * width * item <= STAGING), default=1)
    return Staging(rows, width, item, columns, *folds)
