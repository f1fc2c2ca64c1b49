"""Pixels of NCHW data turned on their way into shared memory, where TMA cannot read their rows, or not turn them.

A stage has spans: runs of positions in planes of the data (an operator's `Work` says which pixel stands at each, or
that there is none), each with the channels of the stage side by side, swizzled as TMA would.  A tap's operand is such a
span from some row on: K-major descriptors may begin at any row, since the XOR is of bits of the address.  So what a
stage has is turned once for all its taps.

The producer's threads read along pixels, eight channels of one each, pack these to 16 bytes in registers and store
them.  `ahead` such units of a stage are on their way at once, of small stages those of several: the first of a stage
are loaded before it is free, and the last are stored when the loop comes to a later stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from schedules.core.tvm import IRBuilder, T
from schedules.hopper.config import WARPGROUP
from schedules.hopper.shared import UNIT, SharedTile, beyond_indices
from schedules.tirx.types import Buffer, Expr
from schedules.tirx.values import kept, named

if TYPE_CHECKING:
    from schedules.hopper.ring import Ring

ITEM = 2  # bytes of an element
GROUP = UNIT // ITEM  # channels of a unit
WARP = 32  # rows of a unit
WARPS = WARPGROUP // WARP  # whose units are neighbouring groups of channels
OTHERS, MOST = 56, 10  # registers of a thread that wait for no load, about; units that do, at most

# eight channels of a pixel or two, {0} bytes apart, of which those exist that `there` counts
_LOAD = """
__device__ __forceinline__ void hopper_span_load_{0}(unsigned int& a, unsigned int& b, unsigned int& c, unsigned int& d,
    unsigned int& e, unsigned int& f, unsigned int& g, unsigned int& h, const void* from, int there) {{
  asm volatile("{{\\n.reg .pred p;\\n"
{1}
    "}}\\n" : "=&r"(a), "=&r"(b), "=&r"(c), "=&r"(d), "=&r"(e), "=&r"(f), "=&r"(g), "=&r"(h) : "l"(from), "r"(there));
}}
"""
_PUT = """
__device__ __forceinline__ void hopper_span_put(unsigned int to, unsigned int order, unsigned int a, unsigned int b,
    unsigned int c, unsigned int d, unsigned int e, unsigned int f, unsigned int g, unsigned int h) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(__byte_perm(a, b, order)),
    "r"(__byte_perm(c, d, order)), "r"(__byte_perm(e, f, order)), "r"(__byte_perm(g, h, order)) : "memory");
}
"""
_LOWER, _UPPER = 0x5410, 0x7632  # of two words the halves that are one pixel's


def _load_source(plane: int, ragged: bool, bits: str) -> str:
    """Without a branch, and in the order of the program."""
    lines = []
    for i in range(GROUP):
        if i == 0 or ragged:
            lines.append(f"setp.gt.s32 p, %9, {i};")
        lines += [f"mov.b32 %{i}, 0;", f"@p ld.global.nc.{bits} %{i}, [%8+{i * plane * ITEM}];"]
    return _LOAD.format(plane * ITEM, "\n".join(f'    "{line}\\n"' for line in lines))


@dataclass(frozen=True)
class Spans:
    """What fills the `rows` of operand a with `k` channels: elements of `tensor`, of whose images each has `channels`
    of `plane` pixels; `registers` are those of a thread of the producer, `stages` those of the ring.

    With `pairs` a thread loads two pixels at once, which share an aligned word: those of rows that are so many apart,
    neighbours or such of two planes.
    """

    tensor: str
    elements: int
    channels: int
    plane: int
    rows: int
    k: int
    registers: int
    pairs: int
    stages: int

    arrivals: ClassVar[int] = WARPS  # that say that a stage is filled

    @property
    def at_once(self) -> int:
        """Rows of a unit of all lanes, side by side."""
        return 2 * WARP if self.pairs == 1 else WARP

    @property
    def asked(self) -> int:
        """Rows that loads are for, which bring those of a second plane too."""
        return self.pairs if self.pairs > 1 else self.rows

    @property
    def each(self) -> int:
        """Units of a thread for as many rows."""
        return self.k // GROUP // WARPS

    @property
    def units(self) -> int:
        """Of a thread in a stage."""
        return self.asked // self.at_once * self.each

    @property
    def most(self) -> int:
        """Units of a thread that there are registers for."""
        return max(1, min(MOST, (self.registers - OTHERS) // GROUP))

    @property
    def rounds(self) -> int:
        return -(-self.units // self.most)

    @property
    def ahead(self) -> int:
        """Units on their way at once, as many in each round."""
        return -(-self.units // self.rounds)

    @property
    def sets(self) -> int:
        """Stages that are on their way at once, at most: of each the last round."""
        return max(1, min(self.most // self.ahead, self.stages - 1))

    @property
    def nbytes(self) -> int:
        """Of shared memory."""
        return self.rows * self.k * ITEM

    @property
    def loaded(self) -> int:
        return self.nbytes

    def reason(self) -> str | None:
        """Why the tensor cannot be read so; None if it can."""
        return beyond_indices(self.tensor, self.elements)


# of the first row of a block and a row from there: the element, and whether there is one
Pixel = Callable[[int, Expr], tuple[Expr, Expr]]


class Turner:
    """A `thread` of the producer that fills the stages of `ring` with `spans` of `source`, as rows of `tile`."""

    def __init__(self, spans: Spans, tile: SharedTile, ring: Ring, source: Buffer, thread: Expr) -> None:
        self.spans, self.tile, self.ring, self.source = spans, tile, ring, source
        self.warp = named("warp_of_producer", T.truncdiv(thread, WARP))
        self.lane = named("lane_of_producer", T.truncmod(thread, WARP))
        self.words = [_local("on_their_way", spans.ahead * GROUP, "uint32") for _ in range(spans.sets)]
        # of each set the number of the stage that is on its way, and -1 while there is none; and whose turn it is
        self.before = [_local("stage_before", 1, "int32") for _ in range(spans.sets)]
        self.turn = _local("turn", 1, "int32")
        T.buffer_store(self.turn, T.int32(0), [0])
        for before in self.before:
            T.buffer_store(before, T.int32(-1), [0])
        base = T.Cast("int32", T.cuda.cvta_generic_to_shared(ring.memory.ptr_to([0])))
        lower, upper = T.uint32(_LOWER), T.uint32(_UPPER)
        # of a unit: where even and odd ones lie, and the order of halves
        self.stores: list[tuple[list[Expr], Expr]] = []
        if spans.pairs == 1:
            # every other four lanes begin with the second of their rows: so eight lanes are of eight rows
            second = named("second", T.bitwise_and(T.shift_right(self.lane, T.int32(2)), T.int32(1)))
            for row in (second, 1 - second):
                order = named("order", T.Select(row == 0, lower, upper))
                self.stores.append((self._places(base, self.lane * 2 + row), order))
        else:
            rows = (0, spans.pairs) if spans.pairs else (0,)
            self.stores += [
                (self._places(base, self.lane + row), order) for row, order in zip(rows, (lower, upper), strict=False)
            ]

    def _places(self, base: Expr, row: Expr) -> list[Expr]:
        """Where a row of the first unit lies in the first stage, and of the second, whose chunk is WARPS further."""
        line = self.tile.swizzle
        turned = T.bitwise_and(T.shift_right(row * line, T.int32(7)), T.int32(line // UNIT - 1))
        first = kept("place", base + row * line + T.bitwise_xor(self.warp, turned) * UNIT)
        return [first, kept("place", T.bitwise_xor(first, T.int32(WARPS * UNIT)))]

    def fill(self, pixel: Pixel, chunk: Expr, opened: Callable[[], None]) -> None:
        """Load what the ring's stage has of a chunk of the channels, and store it but for the last round; `opened`
        waits for the stage."""
        s = self.spans
        start, channel = named("start", self.ring.start), named("first_channel", chunk * s.k + self.warp * GROUP)
        for number in range(s.sets):
            with T.If(self.turn[0] == number), T.Then():
                self._store_last(number)
                for slot in range(s.ahead):
                    self._load(pixel, channel, slot, number, slot)
                T.buffer_store(self.before[number], self.ring.stage, [0])
        self._advance()
        opened()
        for unit in range(s.ahead, s.rounds * s.ahead):
            slot = unit % s.ahead
            self._put(start, unit - s.ahead, 0, slot)
            self._load(pixel, channel, unit, 0, slot)

    def finish(self) -> None:
        """Store what is still on its way."""
        with T.serial(self.spans.sets):
            for number in range(self.spans.sets):
                with T.If(self.turn[0] == number), T.Then():
                    self._store_last(number)
            self._advance()

    def _advance(self) -> None:
        if self.spans.sets > 1:
            last = self.turn[0] == self.spans.sets - 1
            T.buffer_store(self.turn, T.Select(last, 0, self.turn[0] + 1), [0])

    def _store_last(self, number: int) -> None:
        """Store the last round of a set's stage, if there is one, and say that it is filled."""
        s, stage = self.spans, self.before[number][0]
        with T.If(stage >= 0), T.Then():
            start = named("start_before", stage * self.ring.stage_bytes)
            for slot in range(s.ahead):
                self._put(start, (s.rounds - 1) * s.ahead + slot, number, slot)
            # before anything else is loaded, for which the fence would wait
            T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
            T.evaluate(T.cuda.warp_sync())
            with T.If(self.lane == 0), T.Then():
                T.evaluate(T.ptx.mbarrier.arrive.shared__cta.b64(self.ring.full.ptr_to([stage])))

    def _load(self, pixel: Pixel, channel: Expr, unit: int, number: int, slot: int) -> None:
        s = self.spans
        if unit >= s.units:
            return
        block, group = divmod(unit, s.each)
        if group == 0 or slot == 0:
            element, exists = pixel(block * s.at_once, self.lane * (2 if s.pairs == 1 else 1))
            self.element = named("element", element + channel * s.plane)
            self.exists = named("exists", exists)
        more = group * WARPS * GROUP
        there: Expr = T.Select(self.exists, s.channels - (channel + more) if s.channels % s.k else T.int32(GROUP), 0)
        at = self.source.ptr_to([self.element + more * s.plane])
        text = _load_source(s.plane, s.channels % GROUP > 0, "b32" if s.pairs else "u16")
        call = f"hopper_span_load_{s.plane * ITEM}", *self._of(number, slot), at, there
        T.evaluate(T.cuda.func_call(*call, source_code=text))

    def _put(self, start: Expr, unit: int, number: int, slot: int) -> None:
        s, tile = self.spans, self.tile
        if unit >= s.units:
            return
        block, group = divmod(unit, s.each)
        slab, odd = divmod(group, max(1, tile.swizzle // UNIT // WARPS))
        more = start + (slab * tile.slab + block * s.at_once * tile.swizzle)
        for places, order in self.stores:
            to = T.Cast("uint32", places[odd] + more)
            T.evaluate(T.cuda.func_call("hopper_span_put", to, order, *self._of(number, slot), source_code=_PUT))

    def _of(self, number: int, slot: int) -> list[Expr]:
        """The registers of a unit on its way."""
        return [self.words[number][slot * GROUP + i] for i in range(GROUP)]


def _local(name: str, count: int, dtype: str) -> Any:
    found = T.alloc_local((count,), dtype)
    IRBuilder.name(name, found)
    return found
