"""Tensor maps, and tiles in shared memory as TMA writes them and wgmma reads them.

Both swizzle alike: 16-byte chunks of a row are XORed with the row's number, over 1024 bytes for rows of 128 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedules.hopper.config import K_BYTES, STAGING

SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}  # bytes of a row to CUtensorMapSwizzle, and to TVM's code in descriptors
LONGEST_BOX = 256  # elements of a box along an axis
LONGEST_STEP = 8  # element stride
UNIT = 16  # bytes that descriptors count in


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

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def words(self) -> list[int]:
        """The numbers of the call after dtype, rank and pointer: sizes, strides, box, steps, interleave (none),
        swizzle, promotion, fill (zeros)."""
        box = [extent * step for extent, step in zip(self.box, self.steps, strict=True)]
        return [*self.sizes, *self.strides, *box, *self.steps, 0, SWIZZLES[self.swizzle], self.promotion, 0]

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
    """

    rows: int
    k: int
    item: int
    run: int
    transposed: bool = False

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
        return leading, 8 * self.swizzle // UNIT, SWIZZLES[self.swizzle]

    def k_offset(self, step: int) -> int:
        """Bytes to wgmma step `step` of the reduction."""
        if self.transposed:
            return step * (K_BYTES // self.item) * self.swizzle
        each = self.swizzle // K_BYTES
        return step // each * self.slab + step % each * K_BYTES

    def row_offset(self, row: int) -> int:
        """Bytes to a row that is a multiple of 64, or of a run where runs are shorter."""
        return row // self.run * self.slab if self.transposed else row * self.swizzle


@dataclass(frozen=True)
class Staging:
    """Where a consumer's results wait for their store: `rows` x `width` elements of `item` bytes for each store, and as
    many stores together as STAGING holds.

    Rows are swizzled as TMA has it: 16-byte chunk c of row r lies at c ^ (r * row bytes // 128) % chunks of a row.
    """

    rows: int
    width: int
    item: int
    columns: int  # of the block

    @property
    def row_bytes(self) -> int:
        return self.width * self.item

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

    def chunk(self, row: Any, chunk: Any) -> Any:
        """Bytes to 16-byte chunk number `chunk` of a row."""
        from tvm.script import tirx as T

        line = T.truncdiv(row, 128 // self.row_bytes)
        return row * self.row_bytes + T.bitwise_xor(chunk, T.truncmod(line, self.row_bytes // 16)) * 16


def staging_for(rows: int, columns: int, item: int, widest: int) -> Staging:
    """Staging for the results of a consumer, in stores of at most `widest` columns and 128 bytes."""
    width = min(widest, 128 // item)
    while columns % width:
        width //= 2
    return Staging(rows, width, item, columns)
