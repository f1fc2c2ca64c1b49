"""Operand a by way of registers, where it does not lie in shared memory as wgmma takes it: float32 that is MN-major, as
of TF32 wgmma takes only K-major tiles, and pixels of 16 bits in `lines` or `images`.

The consumers' threads read a stage's tile.  Lane l of warp w has rows 16 * w + l // 4 and the eighth below (PTX ISA,
"Register Fragments for wgmma.mma_async").  What a row stands for is free, as long as the results agree: where one read
brings both, the two rows are neighbours of the tile (`tile_row`); else lanes read what lies closer together, which
spreads better over the banks.

The registers of a stage are SETS parts: while wgmma multiplies one, the next is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from schedules.hopper.config import K_BYTES, ROWS
from schedules.hopper.geometry import Member, Operand
from schedules.hopper.images import Images
from schedules.hopper.instructions import FRAGMENT
from schedules.hopper.lines import Lines, beyond
from schedules.hopper.shared import SharedTile
from schedules.tirx.types import Buffer, Expr, Index, Pointer
from schedules.tirx.values import kept, named

SETS = 2
GROUP = 8  # of the reduction in a step
ITEM = 4  # bytes of float32
HALF = 2  # of float16 and bfloat16
RUN = 32  # rows of a tile side by side in 128 bytes
_LINE = RUN * ITEM

_READ = """
__device__ __forceinline__ void hopper_fragment(unsigned int& a0, unsigned int& a1, unsigned int& a2, unsigned int& a3,
    unsigned int even, unsigned int odd) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a0), "=r"(a1) : "r"(even));
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a2), "=r"(a3) : "r"(odd));
}
"""

# of two rows the channels k, k + 1, k + 8, k + 9; a register has two channels of a row, in the order of bytes given
_ONE_BY_ONE = """
__device__ __forceinline__ void hopper_line_fragment(unsigned int& a0, unsigned int& a1, unsigned int& a2,
    unsigned int& a3, unsigned int upper, unsigned int lower, unsigned int upper_order, unsigned int lower_order,
    unsigned int upper_order_8, unsigned int lower_order_8) {{
  unsigned int u0, u1, u8, u9, v0, v1, v8, v9;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(u0) : "r"(upper));
  asm volatile("ld.shared.u16 %0, [%1+{0}];" : "=r"(u1) : "r"(upper));
  asm volatile("ld.shared.u16 %0, [%1+{1}];" : "=r"(u8) : "r"(upper));
  asm volatile("ld.shared.u16 %0, [%1+{2}];" : "=r"(u9) : "r"(upper));
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v0) : "r"(lower));
  asm volatile("ld.shared.u16 %0, [%1+{0}];" : "=r"(v1) : "r"(lower));
  asm volatile("ld.shared.u16 %0, [%1+{1}];" : "=r"(v8) : "r"(lower));
  asm volatile("ld.shared.u16 %0, [%1+{2}];" : "=r"(v9) : "r"(lower));
  a0 = __byte_perm(u0, u1, upper_order); a1 = __byte_perm(v0, v1, lower_order);
  a2 = __byte_perm(u8, u9, upper_order_8); a3 = __byte_perm(v8, v9, lower_order_8);
}}
"""
_INSIDE, _OUTSIDE = 0x5410, 0x3232  # both channels, or twice the upper half of the first, which is zero
# the same of two rows that share an aligned word
_PAIRED = """
__device__ __forceinline__ void hopper_line_fragment(unsigned int& a0, unsigned int& a1, unsigned int& a2,
    unsigned int& a3, unsigned int rows) {{
  unsigned int w0, w1, w8, w9;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w0) : "r"(rows));
  asm volatile("ld.shared.b32 %0, [%1+{0}];" : "=r"(w1) : "r"(rows));
  asm volatile("ld.shared.b32 %0, [%1+{1}];" : "=r"(w8) : "r"(rows));
  asm volatile("ld.shared.b32 %0, [%1+{2}];" : "=r"(w9) : "r"(rows));
  a0 = __byte_perm(w0, w1, 0x5410); a1 = __byte_perm(w0, w1, 0x7632);
  a2 = __byte_perm(w8, w9, 0x5410); a3 = __byte_perm(w8, w9, 0x7632);
}}
"""
# the same where channels may be none: of the first eight of a step, and the others, all bits or no bits of them
_PAIRED_PART = """
__device__ __forceinline__ void hopper_line_fragment_part(unsigned int& a0, unsigned int& a1, unsigned int& a2,
    unsigned int& a3, unsigned int rows, unsigned int bits, unsigned int bits_8) {{
  hopper_line_fragment(a0, a1, a2, a3, rows);
  a0 &= bits; a1 &= bits; a2 &= bits_8; a3 &= bits_8;
}}
"""


def tile_row(lane: Expr, below: int) -> Expr:
    """The tile's row, of the sixteen of a warp, that stands in row lane // 4 + `below` (0 or 8) of a fragment."""
    return T.truncdiv(lane, 4) * 2 + below // 8


def row_of(operand: Operand, lane: Expr, below: int) -> Expr:
    """The tile's row, of the sixteen of a warp, whose sums stand in row lane // 4 + `below` (0 or 8) of a fragment."""
    return tile_row(lane, below) if operand.pairs_rows else T.truncdiv(lane, 4) + below


def reduction_at(position: int) -> int:
    """Which of eight of the reduction stands at `position` of eight of operand b."""
    return position % 4 * 2 + position // 4


@dataclass
class Fragments(ABC):
    """The registers of a consumer's thread for a stage of `steps` of the reduction and `blocks_m` times ROWS rows."""

    steps: int
    blocks_m: int

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

    @abstractmethod
    def locate(self, rows: Pointer, first: Index, member: Member) -> None:
        """Find where the thread of `member` reads in the first stage, where `rows` is; the consumer's rows are the
        tile's from number `first` on."""

    @abstractmethod
    def begin_tile(self, position: Any) -> None:
        """Go to the tile that begins with output pixel number `position`, where its pixels lie in lines."""

    @abstractmethod
    def begin_stage(self, start: Expr, ry: Index, chunk: Expr) -> None:
        """Go to the stage `start` bytes into the memory, of a chunk of the channels and of row `ry` of the kernel, if
        the stage has its taps."""

    @abstractmethod
    def begin_product(self, number: int) -> None:
        """Go to what the stage's product number `number` takes."""

    @abstractmethod
    def read(self, memory: Buffer, step: int, m: int) -> None:
        """Fill the registers for a step and a block of rows from the stage."""


@dataclass
class Tf32Fragments(Fragments):
    """Of `tile`, float32 that TMA brought MN-major.

    Of each step of eight along the reduction a lane has k = l % 4 and the fourth further; what they stand for is free
    too, and they are neighbours (`reduction_at`).  Then the lanes of half a warp read 32 bytes of each of four lines
    that TMA's swizzle put into different banks.
    """

    tile: SharedTile
    addresses: list[Expr] = field(default_factory=list)  # in the first stage: of the even k, and of the odd
    at: list[Expr] = field(default_factory=list)  # in the present one

    def locate(self, rows: Pointer, first: Index, member: Member) -> None:
        start = T.Cast("int32", T.cuda.cvta_generic_to_shared(rows)) + first // RUN * self.tile.slab
        offsets = self.offsets(member.warp, member.lane)
        self.addresses = [kept(name, start + offset) for name, offset in zip(("even", "odd"), offsets, strict=True)]

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

    def begin_tile(self, position: Any) -> None:
        """All tiles lie alike."""

    def begin_product(self, number: int) -> None:
        """All products take the same."""

    def begin_stage(self, start: Expr, ry: Index, chunk: Expr) -> None:
        start = named("begin", start)
        self.at = [address + start for address in self.addresses]

    def read(self, memory: Buffer, step: int, m: int) -> None:
        apart = step * GROUP * _LINE + m * self.tile.row_offset(ROWS)
        at = [address + apart for address in self.at]
        T.evaluate(T.cuda.func_call("hopper_fragment", *self.of(memory, step, m), *at, source_code=_READ))


@dataclass
class PixelFragments(Fragments):
    """Of pixels of 16 bits that lie side by side: those of neighbouring rows are read at once where they share an
    aligned word."""

    source: Lines | Images
    memory: int | Expr = 0  # where the first stage begins
    rows: list[Expr] = field(default_factory=list)  # of the tile, which the thread reads
    channel: int | Expr = 0  # bytes to the first channel that it reads
    at: list[Expr] = field(default_factory=list)  # of each row what the present product takes
    orders: list[Expr] = field(default_factory=list)  # of bytes, of its rows

    @property
    @abstractmethod
    def pitch(self) -> int:
        """Elements from channel to channel."""

    def locate(self, rows: Pointer, first: Index, member: Member) -> None:
        self.memory = T.Cast("int32", T.cuda.cvta_generic_to_shared(rows))
        self.channel = T.truncmod(member.lane, 4) * (2 * self.pitch * HALF)
        self.rows = [
            first + m * ROWS + member.warp * 16 + row for m in range(self.blocks_m) for row in self._rows(member.lane)
        ]

    def _rows(self, lane: Expr) -> list[Expr]:
        """Of the sixteen of a warp, those that the thread reads, of neighbours that share a word the first."""
        return [tile_row(lane, 0)] if self.source.paired else [T.truncdiv(lane, 4) + below for below in (0, 8)]

    def there(self, channel: int) -> Expr | None:
        """Whether the stage has eight channels from number `channel` on; None if it always has."""
        return None

    def read(self, memory: Buffer, step: int, m: int) -> None:
        pitch = self.pitch * HALF
        both = [self.there(step * 16 + first) for first in (0, 8)]
        more = T.uint32(step * 16 * pitch)
        name, source = "hopper_line_fragment", _PAIRED if self.source.paired else _ONE_BY_ONE
        source = source.format(pitch, 8 * pitch, 9 * pitch)
        if self.source.paired:
            call = [self.at[m] + more]
            if both[0] is not None:
                name, source = f"{name}_part", source + _PAIRED_PART.format()
                call += [T.Select(there, T.uint32(0xFFFFFFFF), T.uint32(0)) for there in both]
        else:
            call = [at + more for at in self.at[2 * m : 2 * m + 2]]
            for there, order in product(both, self.orders[2 * m : 2 * m + 2]):
                call.append(order if there is None else T.Select(there, order, T.uint32(_OUTSIDE)))
        T.evaluate(T.cuda.func_call(name, *self.of(memory, step, m), *call, source_code=source))


@dataclass
class LineFragments(PixelFragments):
    """Of pixels that lie in lines."""

    source: Lines
    places: list[Expr] = field(default_factory=list)  # of rows' pixels, were there no tap and one stage
    pixels: list[tuple[Expr, Expr, Expr]] = field(default_factory=list)  # their line, and pixel (y, x) of it
    starts: list[Expr] = field(default_factory=list)  # what the present stage's first tap looks at there
    y: list[Expr] = field(default_factory=list)  # and its row of the image

    @property
    def pitch(self) -> int:
        return self.source.pitch

    def begin_tile(self, position: Any) -> None:
        lines = self.source
        line_0, _, before = (named("start", value) for value in lines.start(position))
        self.places, self.pixels = [], []
        for row in self.rows:
            line = named("line", T.truncdiv(position + row, lines.length))
            pixel = named("pixel", position + row - line * lines.length)
            slot = (line - line_0) * lines.apart + pixel * lines.step - before
            self.places.append(kept("place", self.memory + self.channel + slot * HALF))
            y, x = T.truncdiv(pixel, lines.problem.out_w), T.truncmod(pixel, lines.problem.out_w)
            self.pixels.append((line, named("y", y), named("x", x)) if lines.padded else (line, pixel, pixel))

    def begin_stage(self, start: Expr, ry: Index, chunk: Expr) -> None:
        lines, start = self.source, named("begin", start)
        self.starts, self.y = [], []
        for place, (line, y, _) in zip(self.places, self.pixels, strict=True):
            at = place + start + beyond(lines.begin(line, ry)) * HALF
            self.starts.append(named("from_row", T.Cast("uint32", at)))
            self.y.append(named("y", y * lines.problem.stride[0] + lines.row(line, ry)))

    def begin_product(self, number: int) -> None:
        p, moved = self.source.problem, number * self.source.problem.dilation[1]
        self.at, self.orders = [start + T.uint32(moved * HALF) for start in self.starts], []
        for y, (_, _, x) in zip(self.y, self.pixels, strict=True):
            if not self.source.padded:
                self.orders.append(T.uint32(_INSIDE))
                continue
            x = x * p.stride[1] + (moved - p.pad[1])
            inside = tirx.all(y >= 0, y < p.h, x >= 0, x < p.w)
            self.orders.append(named("order", T.Select(inside, T.uint32(_INSIDE), T.uint32(_OUTSIDE))))


@dataclass
class ImageFragments(PixelFragments):
    """Of pixels of whole images, the same for all tiles."""

    source: Images
    places: list[Expr] = field(default_factory=list)  # of rows' pixels in the first stage
    left: Index = 0  # channels of the present stage

    @property
    def pitch(self) -> int:
        return self.source.plane

    def locate(self, rows: Pointer, first: Index, member: Member) -> None:
        super().locate(rows, first, member)
        images, p = self.source, self.source.problem
        for row in self.rows:
            # rows beyond the last image, whose sums no one wants, are pixels of it
            last = images.images * images.outputs - (2 if images.paired else 1)
            row = named("row", tirx.min(row, last))
            image, pixel = T.truncdiv(row, images.outputs), T.truncmod(row, images.outputs)
            y, x = T.truncdiv(pixel, p.out_w) * p.stride[0], T.truncmod(pixel, p.out_w) * p.stride[1]
            at = image * images.image + y * p.w + x
            self.places.append(kept("place", self.memory + self.channel + at * HALF))

    def begin_tile(self, position: Any) -> None:
        """All tiles lie alike."""

    def begin_stage(self, start: Expr, ry: Index, chunk: Expr) -> None:
        start = named("begin", start)
        self.at = [named("from_image", T.Cast("uint32", place + start)) for place in self.places]
        self.orders, self.left = [T.uint32(_INSIDE)] * len(self.at), self.source.left(chunk)

    def begin_product(self, number: int) -> None:
        """There is one."""

    def there(self, channel: int) -> Expr | None:
        return channel < self.left if self.source.ragged else None


def fragments_of(operand: Operand, blocks_m: int) -> Fragments | None:
    """How operand a comes by way of registers; None if it does not."""
    if not operand.by_registers:
        return None
    steps = operand.tile.k * operand.tile.item // K_BYTES
    if isinstance(operand.source, Lines):
        return LineFragments(steps, blocks_m, operand.source)
    if isinstance(operand.source, Images):
        return ImageFragments(steps, blocks_m, operand.source)
    return Tf32Fragments(steps, blocks_m, operand.tile)
