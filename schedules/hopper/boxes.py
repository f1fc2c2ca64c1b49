"""Operand a from boxes of NCHW data, which TMA brings as they lie and threads turn in shared memory, once for all taps.

Beside the ring of stages, which has filters alone, a block has two more.  Boxes arrive in one: of some of a chunk's
channels all rows and columns that a tile looks at, pixels side by side.  Two warps beside the loads read two neighbours
at a time, of eight channels, and store 16 bytes of each into the other, swizzled, with the channels side by side:
K-major tiles, of which a tap is the same rows, moved.  There pixels stand in groups of eight of a line, as rows of
operand a do for wgmma; a group has the pixels beyond its ends too, which taps along a row reach, so that groups are
`Layout.pitch` rows apart wherever their line ends.  With a stride there are such lines for each remainder of the
coordinates.  TMA fills with zeros what lies beyond the image.

A turned chunk serves the stages of all rows of the kernel.  A chunk may be multiplied faster than two warps turn one:
then three pairs of warps share each, or, where one tap makes it too short for that, take turns at the chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from schedules.core.tvm import T
from schedules.hopper.lanes import BANKS, WARP, Lanes, Word, arranged
from schedules.hopper.shared import PATTERN, SECTOR, UNIT, SharedTile, TensorMap, aligned
from schedules.tirx import BARRIER_PAIR_BYTES
from schedules.tirx.types import Expr, Index

ITEM = 2  # bytes of an element
GROUP = UNIT // ITEM  # channels of a pixel that are stored at once, and pixels of a group
TURNERS = 2  # warps
TOGETHER = TURNERS * GROUP  # channels that arrive at once at least, of which each of these turns a group
SLOTS = 2  # of the ring of turned chunks and of that of boxes, at least
WAITING = 48 * 1024  # bytes of turned chunks in which one more may wait, where each is read but once
ARRIVING = 64 * 1024  # bytes of shared memory that the latter may take for more of them
LARGE = ARRIVING // 4  # of what arrives at once
AHEAD, AHEAD_OF_ONE = 2, 6  # chunks whose boxes it has at most, of several taps or of one
TO = 128  # bytes that TMA writes at a multiple of
GIVEN, SHARED = 64, 128  # bytes in a clock, from L2 and of shared memory
MOST_UNROLLED = 12  # stages


@dataclass(frozen=True)
class Along:
    """An axis of a tile of `size` outputs: the pixels that taps look at, from the first output's on, where it moves
    `stride` at a time; tap r looks `r * dilation - pad` after it."""

    size: int
    k: int
    stride: int
    pad: int
    dilation: int

    @cached_property
    def taps(self) -> Sequence[tuple[int, int]]:
        """Of each tap how many outputs after its own the pixel would be, and the remainder."""
        return [divmod(r * self.dilation - self.pad, self.stride) for r in range(self.k)]

    @cached_property
    def moves(self) -> Mapping[int, tuple[int, int]]:
        """Of each remainder the first and the last that a tap moves by."""
        found: dict[int, tuple[int, int]] = {}
        for moved, remainder in self.taps:
            first, last = found.get(remainder, (moved, moved))
            found[remainder] = min(first, moved), max(last, moved)
        return found

    @property
    def reach(self) -> int:
        """The most that a tap moves by after another of its remainder."""
        return max(last - first for first, last in self.moves.values())

    @property
    def first(self) -> int:
        """The first pixel that is looked at, from the first output's."""
        return -self.pad

    @property
    def beyond(self) -> int:
        """And the one after the last."""
        return (self.size - 1) * self.stride + (self.k - 1) * self.dilation - self.pad + 1


@dataclass(frozen=True)
class Layout:
    """Rows of a turned tile of `y.size` x `x.size` outputs, the latter whole groups: of each remainder of x, and each
    of y, its lines, of each line its groups, of each group `pitch` pixels."""

    y: Along
    x: Along

    @cached_property
    def pitch(self) -> int:
        return GROUP + self.x.reach

    @cached_property
    def line(self) -> int:
        """Rows of a line."""
        return self.x.size // GROUP * self.pitch

    @cached_property
    def lines(self) -> int:
        """Of all remainders of y."""
        return sum(self._lines_of(remainder) for remainder in self.y.moves)

    @property
    def rows(self) -> int:
        return len(self.x.moves) * self.lines * self.line

    def _lines_of(self, remainder: int) -> int:
        """0 of a remainder that no tap has."""
        first, last = self.y.moves.get(remainder, (self.y.size, 0))
        return self.y.size + last - first

    def _before(self, remainder: int) -> int:
        """Lines of the remainders before."""
        found = 0
        for other in self.y.moves:
            if other == remainder:
                return found
            found += self._lines_of(other)
        raise AssertionError(remainder)

    def moved_down(self, ry: int) -> int:
        """Rows to what row `ry` of the kernel looks at."""
        moved, remainder = self.y.taps[ry]
        return (self._before(remainder) + moved - self.y.moves[remainder][0]) * self.line

    def moved_across(self, rx: int) -> int:
        moved, remainder = self.x.taps[rx]
        return list(self.x.moves).index(remainder) * self.lines * self.line + moved - self.x.moves[remainder][0]

    @property
    def left(self) -> int:
        """Pixels of a box before the first output's, in whole 16 bytes."""
        return -(-self.x.pad // GROUP) * GROUP

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of a box."""
        return -(-(self.left + self.x.beyond) // GROUP) * GROUP, self.y.beyond - self.y.first

    @property
    def loaded(self) -> int:
        """Bytes that L2 gives for a channel's box: whole sectors, in which its rows begin and end."""
        width, height = self.box
        return height * (-(-width * ITEM // SECTOR) + (width * ITEM % SECTOR == 0 and self.left > 0)) * SECTOR

    @property
    def cost(self) -> float:
        """Cycles of a channel, about: in which L2 gives its box, shared memory takes that in, and threads turn it."""
        width, height = self.box
        return self.loaded / GIVEN + (width * height + self.rows) * ITEM / SHARED + self.reads

    @property
    def reads(self) -> int:
        """Cycles in which shared memory gives a channel's words to the warps that turn them, at best."""
        return max(Counter(place % BANKS for place in {word.place for word in self.words}).values())

    @cached_property
    def lanes(self) -> Lanes:
        """What the lanes of the warps that turn a channel turn of it."""
        return arranged(self.words)

    @cached_property
    def words(self) -> Sequence[Word]:
        """What there is to turn of a channel, in the order of the box."""
        (width, height), plane = self.box, self.lines * self.line
        found = []
        for at in range(height):
            moved, remainder = divmod(at + self.y.first, self.y.stride)
            line = moved - self.y.moves.get(remainder, (moved + 1, 0))[0]
            if not 0 <= line < self._lines_of(remainder):
                continue
            for group in range(self.x.size // GROUP):
                row = (self._before(remainder) + line) * self.line + group * self.pitch
                halves: dict[int, list[int]] = {}
                for number, (b, (first, last)) in enumerate(self.x.moves.items()):
                    for pixel in range(GROUP + last - first):
                        column = self.left + (group * GROUP + pixel + first) * self.x.stride + b
                        rows = halves.setdefault(column // 2, [-1, -1])
                        rows[column % 2] = number * plane + row + pixel
                found += [Word(at * width + 2 * column, *rows) for column, rows in sorted(halves.items())]
        return found

    @property
    def in_units(self) -> bool:
        """Whether every eight rows are a unit: eight neighbours of a line, as of a 1x1 kernel at a stride of 1."""
        y, x = self.y, self.x
        return (y.size, y.k, x.k) == (1, 1, 1) and (y.first, x.first, x.stride) == (0, 0, 1)

    @property
    def pixels(self) -> Sequence[tuple[int, int] | None]:
        """Of each row the line and the column of its pixel, from the first that taps look at; None if no tap does."""
        found: list[tuple[int, int] | None] = [None] * self.rows
        for at, *rows in self.words:
            for i, row in enumerate(rows):
                if row >= 0:
                    line, column = divmod(at + i, self.box[0])
                    found[row] = line, column - self.left - self.x.first
        return found


# of a row of the turned tile, the sum of two numbers: bytes to its pixel in what TMA brought, and whether there is one
Pixel = Callable[[Index, Expr], tuple[Expr, Expr]]


def one_of(number: Index, values: Sequence[int]) -> Index:
    """The value number `number`, or the last."""
    if isinstance(number, int):
        return values[min(number, len(values) - 1)]
    found: Index = values[-1]
    for at, value in reversed(list(enumerate(values[:-1]))):
        found = T.Select(number == at, T.int32(value), T.int32(found) if isinstance(found, int) else found)
    return found


@dataclass(frozen=True)
class TurnedData(ABC):
    """What a block has of operand a: what TMA brings by `source`, so many channels `together`, turned into rows of
    `tile`; stages of `taps` of a row of the kernel each take it, one after the other."""

    source: TensorMap
    tile: SharedTile
    together: int
    taps: int
    pairs: int = field(default=1, kw_only=True)  # of warps that turn

    @property
    @abstractmethod
    def kernel(self) -> tuple[int, int]:
        """Rows of the kernel, and taps of each."""

    @abstractmethod
    def moved_down(self, ry: int) -> int:
        """Rows of the tile to what row `ry` of the kernel looks at."""

    @abstractmethod
    def moved_across(self, rx: int) -> int:
        """And from there to what tap `rx` of it does."""

    @property
    @abstractmethod
    def offsets(self) -> Sequence[int]:
        """Bytes to a pixel in each of eight channels, in what TMA brought."""

    @property
    @abstractmethod
    def group_bytes(self) -> int:
        """Bytes from there to the next eight channels."""

    @property
    @abstractmethod
    def arriving_bytes(self) -> int:
        """Of shared memory for what TMA brings at once."""

    @property
    @abstractmethod
    def loaded_bytes(self) -> int:
        """That come from L2 for a channel, about."""

    @property
    def late(self) -> Sequence[int] | None:
        """Where every eight rows are a unit, eight neighbours of a line: how many pixels after a multiple of 16 bytes
        each of eight channels begins; None where they are not."""
        return None

    @property
    def arrivals(self) -> int:
        """Of a chunk."""
        return self.tile.k // self.together

    @property
    def stages(self) -> int:
        """That take a turned chunk."""
        return self.kernel[0] * self.kernel[1] // self.taps

    @property
    def nbytes(self) -> int:
        """Of a stage: none."""
        return 0

    @property
    def tensor(self) -> str:
        return self.source.tensor

    @property
    def loaded(self) -> int:
        """Bytes that come in for a stage, about."""
        return self.tile.k * self.loaded_bytes // self.stages

    @property
    def slot_bytes(self) -> int:
        return aligned(self.tile.nbytes)

    @property
    def in_turn(self) -> int:
        """Pairs that take turns at the chunks: all where the kernel has one tap.  A chunk of several is multiplied for
        longer: all pairs share it, and need no slots of their own."""
        return self.pairs if self.kernel == (1, 1) else 1

    @property
    def turners(self) -> int:
        """Warps that turn a chunk."""
        return TURNERS * self.pairs // self.in_turn

    @property
    def slots(self) -> int:
        """Of the ring of turned chunks: where a chunk is multiplied as fast as it is turned, neither waits for the
        other.  Of pairs in turn each has slots of its own: it never waits for what another pair has not come to."""
        if self.in_turn > 1:
            return self.in_turn * (1 + (2 * self.in_turn * self.slot_bytes <= WAITING))
        return SLOTS + (self.stages == 1 and (SLOTS + 1) * self.slot_bytes <= WAITING)

    @property
    def beside_stages(self) -> int:
        """Bytes of shared memory for both rings."""
        rings = (self.slots, self.slot_bytes), (self.arriving_slots, self.arriving_bytes)
        return sum(aligned(slots * nbytes) + slots * BARRIER_PAIR_BYTES for slots, nbytes in rings)

    @property
    def arriving_slots(self) -> int:
        """Of the ring of boxes: a load takes longer than a chunk of one tap is multiplied."""
        most = self.arrivals * (AHEAD_OF_ONE if self.kernel == (1, 1) else max(AHEAD, self.pairs))
        found = max(SLOTS + (self.arrivals > 1), min(most, ARRIVING // self.arriving_bytes))
        each = self.in_turn * self.arrivals if self.in_turn > 1 else 1  # those of a chunk of each
        return max(each, found // each * each)

    def reason(self) -> str | None:
        """Why TMA brings no such boxes; None if it does."""
        return self.source.reason()

    @property
    def unrolled(self) -> int:
        """Of these stages, how many follow each other in the code: all, or those of a row of the kernel."""
        return next((count for count in (self.stages, self.kernel[1] // self.taps) if count <= MOST_UNROLLED), 1)

    def moved(self, number: Index) -> Index:
        """Units of a descriptor to what the first tap of stage number `number` of a chunk looks at."""
        k, unit = self.kernel[1] // self.taps, self.tile.swizzle // UNIT
        down = [self.moved_down(ry) * unit for ry in range(self.kernel[0])]
        # a stage of all taps of a row has products that say how far each moves
        across = [self.moved_across(rx) * unit for rx in range(k)] if k > 1 else [0]
        row, tap = divmod(number, k) if isinstance(number, int) else (T.truncdiv(number, k), T.truncmod(number, k))
        return one_of(row, down) + one_of(tap, across)


@dataclass(frozen=True)
class TurnedLayout(TurnedData):
    """Into the rows of `layout`."""

    layout: Layout

    @property
    def kernel(self) -> tuple[int, int]:
        return self.layout.y.k, self.layout.x.k

    def moved_down(self, ry: int) -> int:
        return self.layout.moved_down(ry)

    def moved_across(self, rx: int) -> int:
        return self.layout.moved_across(rx)


@dataclass(frozen=True)
class TurnedBoxes(TurnedLayout):
    """Of boxes whose innermost axes are (x, y, channels)."""

    @property
    def apart(self) -> int:
        """Bytes from channel to channel."""
        width, height = self.layout.box
        return width * height * ITEM

    @property
    def offsets(self) -> Sequence[int]:
        return [i * self.apart for i in range(GROUP)]

    @property
    def group_bytes(self) -> int:
        return GROUP * self.apart

    @property
    def late(self) -> Sequence[int] | None:
        return [0] * GROUP if self.layout.in_units else None

    @property
    def arriving_bytes(self) -> int:
        return -(-self.source.box_bytes // TO) * TO

    @property
    def loaded_bytes(self) -> int:
        return self.layout.loaded


D = TypeVar("D", bound=TurnedData)


def in_parts(brought: Callable[[int], D], channels: int) -> D:
    """What is `brought` of a chunk of so many `channels`: all at once, or, where several taps look at a large box, as
    few as give each warp that turns a group."""
    whole = brought(channels)
    return whole if whole.kernel == (1, 1) or whole.arriving_bytes <= LARGE else brought(TOGETHER)


def turned_tile(layout: Layout, k: int, run: int) -> SharedTile:
    """The tile of operand a that `k` channels of `layout` are turned into."""
    rows = -(-layout.rows // WARP) * WARP  # whole warps of pixels, and patterns of the swizzle
    assert rows % PATTERN == 0
    return SharedTile(rows, k, ITEM, run, pitch=layout.pitch)
