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

_LOWER, _UPPER = 0x5410, 0x7632  # the lower halves of two words, or the upper ones
_TURNED = {_LOWER: 0x1054, _UPPER: 0x3276}  # the same of two words that were read in the other order
_OUTSIDE = 0x3232  # twice the upper half of the first, which is zero
_TURNS = ", int second, unsigned int even_rows, unsigned int odd_rows"  # parameters for that other order
_PASSED = ", second, even_rows, odd_rows"


def _one_by_one_source(pitch: int, odd_first: bool) -> str:
    """Of two rows the channels k, k + 1, k + 8, k + 9; a register has two channels of a row, in the order of bytes
    given."""
    loads = [
        f'asm volatile("ld.shared.u16 %0, [%1{at}];" : "=r"({row[0]}{number}) : "r"({row}{more}));'
        for row in ("upper", "lower")
        for number, (at, more) in _channels(pitch, odd_first).items()
    ]
    return """
__device__ __forceinline__ void hopper_line_fragment(unsigned int& a0, unsigned int& a1, unsigned int& a2,
    unsigned int& a3, unsigned int upper, unsigned int lower, unsigned int upper_order, unsigned int lower_order,
    unsigned int upper_order_8, unsigned int lower_order_8{more}) {{
  unsigned int u0, u1, u8, u9, l0, l1, l8, l9;
  {loads}
  a0 = __byte_perm(u0, u1, upper_order); a1 = __byte_perm(l0, l1, lower_order);
  a2 = __byte_perm(u8, u9, upper_order_8); a3 = __byte_perm(l8, l9, lower_order_8);
}}
""".format(loads="\n  ".join(loads), more=", int second" if odd_first else "")


def _paired_source(pitch: int, odd_first: bool) -> str:
    """The same of two rows that share an aligned word."""
    loads = [
        f'asm volatile("ld.shared.b32 %0, [%1{at}];" : "=r"(w{number}) : "r"(rows{more}));'
        for number, (at, more) in _channels(pitch, odd_first).items()
    ]
    return """
__device__ __forceinline__ void hopper_line_fragment(unsigned int& a0, unsigned int& a1, unsigned int& a2,
    unsigned int& a3, unsigned int rows{more}) {{
  unsigned int w0, w1, w8, w9;
  {loads}
  a0 = __byte_perm(w0, w1, {first}); a1 = __byte_perm(w0, w1, {second});
  a2 = __byte_perm(w8, w9, {first}); a3 = __byte_perm(w8, w9, {second});
}}
""".format(
        loads="\n  ".join(loads),
        more=_TURNS if odd_first else "",
        first="even_rows" if odd_first else _LOWER,
        second="odd_rows" if odd_first else _UPPER,
    )


def _channels(pitch: int, odd_first: bool) -> dict[int, tuple[str, str]]:
    """Of the channels k, k + 1, k + 8 and k + 9, `pitch` bytes apart, where a thread reads each: behind its own first
    one, and what it adds to that; `odd_first` those of a pair are `second` bytes apart, of some threads backwards."""
    found = {}
    for channel in (0, 1, 8, 9):
        at = channel - channel % 2 if odd_first else channel
        found[channel] = f"+{at * pitch}" if at else "", " + second" if odd_first and channel % 2 else ""
    return found


# the same where channels may be none: of the first eight of a step, and the others, all bits or no bits of them
_PAIRED_PART = """
__device__ __forceinline__ void hopper_line_fragment_part(unsigned int& a0, unsigned int& a1, unsigned int& a2,
    unsigned int& a3, unsigned int bits, unsigned int bits_8, unsigned int rows{more}) {{
  hopper_line_fragment(a0, a1, a2, a3, rows{passed});
  a0 &= bits; a1 &= bits; a2 &= bits_8; a3 &= bits_8;
}}
"""


def tile_row(lane: Expr, below: int) -> Expr:
    """The tile's row, of the sixteen of a warp, that stands in row lane // 4 + `below` (0 or 8) of a fragment."""
    return T.truncdiv(lane, 4) * 2 + below // 8


def row_of(operand: Operand, member: Member, below: int, warp_rows: int = 16) -> Expr:
    """The tile's row whose sums stand in row lane // 4 + `below` (0 or 8) of a thread's fragment; warps have rows from
    every so manyth on."""
    row = tile_row(member.lane, below) if operand.pairs_rows else T.truncdiv(member.lane, 4) + below
    return member.warp * (warp_rows // 2) + spread_row(row) if operand.spreads_rows else member.warp * warp_rows + row


def spread_row(row: Expr) -> Expr:
    """Where the first warp's row of sixteen is, if the latter eight are half of 64 further (`lanes.QuadOrder`)."""
    return row + T.truncdiv(row, 8) * (ROWS // 2 - 8)


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

    operand: Operand
    source: Lines | Images
    memory: int | Expr = 0  # where the first stage begins
    rows: list[Expr] = field(default_factory=list)  # of the tile, which the thread reads
    channel: int | Expr = 0  # bytes to the first channel that it reads
    second: int | Expr = 0  # from there to the other one of a pair, if that is not the next one for all threads
    inside: list[Expr] = field(default_factory=list)  # orders of bytes, of the lower halves of a pair and the upper
    at: list[Expr] = field(default_factory=list)  # of each row what the present product takes
    orders: list[Expr] = field(default_factory=list)  # of bytes, of its rows

    @property
    @abstractmethod
    def pitch(self) -> int:
        """Elements from channel to channel."""

    @property
    def odd_first(self) -> bool:
        """Whether half of the threads read the odd channel of a pair first (`lanes.QuadOrder`)."""
        return False

    def locate(self, rows: Pointer, first: Index, member: Member) -> None:
        self.memory = T.Cast("int32", T.cuda.cvta_generic_to_shared(rows))
        pair, pitch = T.truncmod(member.lane, 4), self.pitch * HALF
        self.channel, self.inside = pair * (2 * pitch), [T.uint32(_LOWER), T.uint32(_UPPER)]
        if self.odd_first:
            turned = named("turned", pair >= 2)
            self.channel += T.Select(turned, T.int32(pitch), T.int32(0))
            self.second = kept("second", T.Select(turned, T.int32(-pitch), T.int32(pitch)))
            self.inside = [
                named("order", T.Select(turned, T.uint32(_TURNED[order]), T.uint32(order)))
                for order in (_LOWER, _UPPER)
            ]
        self.rows = [first + m * ROWS + row for m in range(self.blocks_m) for row in self._rows(member)]

    def _rows(self, member: Member) -> list[Expr]:
        """Of 64, those that the thread reads, of neighbours that share a word the first."""
        return [row_of(self.operand, member, below) for below in ((0,) if self.source.paired else (0, 8))]

    def there(self, channel: int) -> Expr | None:
        """Whether the stage has eight channels from number `channel` on; None if it always has."""
        return None

    def read(self, memory: Buffer, step: int, m: int) -> None:
        pitch = self.pitch * HALF
        both = [self.there(step * 16 + first) for first in (0, 8)]
        more = T.uint32(step * 16 * pitch)
        name, odd_first = "hopper_line_fragment", self.odd_first
        if self.source.paired:
            source, call = _paired_source(pitch, odd_first), [self.at[m] + more]
            if both[0] is not None:
                words = dict(more=_TURNS, passed=_PASSED) if odd_first else dict(more="", passed="")
                name, source = f"{name}_part", source + _PAIRED_PART.format(**words)
                call = [T.Select(there, T.uint32(0xFFFFFFFF), T.uint32(0)) for there in both] + call
            call += [self.second, *self.inside] if odd_first else []
        else:
            source, call = _one_by_one_source(pitch, odd_first), [at + more for at in self.at[2 * m : 2 * m + 2]]
            for there, order in product(both, self.orders[2 * m : 2 * m + 2]):
                call.append(order if there is None else T.Select(there, order, T.uint32(_OUTSIDE)))
            call += [self.second] if odd_first else []
        T.evaluate(T.cuda.func_call(name, *self.of(memory, step, m), *call, source_code=source))


@dataclass
class LineFragments(PixelFragments):
    """Of pixels that lie in lines, as far apart as few wait for the same banks."""

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
                self.orders.append(self.inside[0])
                continue
            x = x * p.stride[1] + (moved - p.pad[1])
            inside = tirx.all(y >= 0, y < p.h, x >= 0, x < p.w)
            self.orders.append(named("order", T.Select(inside, self.inside[0], T.uint32(_OUTSIDE))))


@dataclass
class ImageFragments(PixelFragments):
    """Of pixels of whole images, the same for all tiles."""

    source: Images
    places: list[Expr] = field(default_factory=list)  # of rows' pixels in the first stage
    left: Index = 0  # channels of the present stage

    @property
    def pitch(self) -> int:
        return self.source.plane

    @property
    def odd_first(self) -> bool:
        return self.source.order.odd_first

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
        self.orders, self.left = [self.inside[0]] * len(self.at), self.source.left(chunk)

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
        return LineFragments(steps, blocks_m, operand, operand.source)
    if isinstance(operand.source, Images):
        return ImageFragments(steps, blocks_m, operand, operand.source)
    return Tf32Fragments(steps, blocks_m, operand.tile)
