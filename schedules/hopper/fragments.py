"""Operand a by way of registers, for float32 tiles that lie MN-major: of TF32 wgmma takes only K-major ones from shared
memory.

The consumers' threads read a stage's tile.  Lane l of warp w has, of each step of eight along the
reduction, rows 16 * w + l // 4 and the eighth below, of k = l % 4 and of the fourth further (PTX ISA, "Register
Fragments for wgmma.mma_async", .tf32).  What a row or a k stands for is free, as long as the results and operand b
agree: here the two rows are neighbours of the tile, so that one read of 64 bits brings both (`tile_row`), and so are
the two k (`reduction_at`).  Then the lanes of half a warp read 32 bytes of each of four lines that TMA's swizzle put
into different banks.

The registers of a stage are SETS parts: while wgmma multiplies one, the next is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm.script import tirx as T

from schedules.hopper.config import K_BYTES, ROWS
from schedules.hopper.instructions import FRAGMENT
from schedules.hopper.shared import SharedTile

if TYPE_CHECKING:
    from schedules.tirx.types import Buffer, Expr

SETS = 2
GROUP = 8  # of the reduction in a step
ITEM = 4  # bytes
RUN = 32  # rows of a tile side by side in 128 bytes
_LINE = RUN * ITEM

_READ = """
__device__ __forceinline__ void hopper_fragment(unsigned int& a0, unsigned int& a1, unsigned int& a2, unsigned int& a3,
    unsigned int even, unsigned int odd) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a0), "=r"(a1) : "r"(even));
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a2), "=r"(a3) : "r"(odd));
}
"""


def tile_row(lane: Expr, below: int) -> Expr:
    """The tile's row, of the sixteen of a warp, that stands in row lane // 4 + `below` (0 or 8) of a fragment."""
    return T.truncdiv(lane, 4) * 2 + below // 8


def reduction_at(position: int) -> int:
    """Which of eight of the reduction stands at `position` of eight of operand b."""
    return position % 4 * 2 + position // 4


@dataclass(frozen=True)
class Fragments:
    """The registers of a consumer's thread for a stage of `tile`, `blocks_m` times ROWS of its rows."""

    tile: SharedTile
    blocks_m: int

    @property
    def steps(self) -> int:
        return self.tile.k * self.tile.item // K_BYTES

    @property
    def registers(self) -> int:
        return self.steps * self.blocks_m * FRAGMENT

    def of_set(self, number: int) -> range:
        """The steps whose fragments set number `number` holds."""
        each = self.steps // SETS
        return range(number * each, (number + 1) * each)

    def of(self, memory: Buffer, step: int, m: int) -> list[Expr]:
        """The registers in `memory` for a step and a block of rows."""
        first = (step * self.blocks_m + m) * FRAGMENT
        return [memory[first + i] for i in range(FRAGMENT)]

    def offsets(self, warp: Expr, lane: Expr) -> list[Expr]:
        """Bytes from a consumer's first row to what a thread reads in its first step: the even k, and the odd."""
        row = T.truncmod(warp, 2) * 16 + tile_row(lane, 0)
        chunk = T.truncdiv(row, 4)
        offsets = []
        for odd in range(2):
            k = T.truncmod(lane, 4) * 2 + odd
            swizzled = k * _LINE + T.bitwise_xor(chunk, k) * 16 + T.truncmod(row, 4) * ITEM
            offsets.append(T.truncdiv(warp, 2) * self.tile.slab + swizzled)
        return offsets

    def read(self, memory: Buffer, addresses: list[Expr], steps: Iterable[int]) -> None:
        """Fill the registers of `steps` from the stage that begins at `addresses`, in shared memory, less `offsets`."""
        for step in steps:
            for m in range(self.blocks_m):
                apart = step * GROUP * _LINE + m * self.tile.row_offset(ROWS)
                at = [address + apart for address in addresses]
                registers = self.of(memory, step, m)
                T.evaluate(T.cuda.func_call("hopper_fragment", *registers, *at, source_code=_READ))
