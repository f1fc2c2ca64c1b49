"""What fills operand a from boxes (`hopper.boxes`): a warp that has TMA bring them, pairs that take turns at turning
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.hopper.boxes import GROUP, ITEM, TURNERS, Pixel, TurnedBoxes, TurnedData
from schedules.hopper.geometry import ClusterPlace, Load, Work
from schedules.hopper.lanes import WARP
from schedules.hopper.ring import FILLS
from schedules.hopper.shared import UNIT
from schedules.tirx.types import Buffer, Expr, Index, Variable
from schedules.tirx.values import kept, named, where

LOADER, FIRST_TURNER = 1, 2  # of the producer's warps
OTHERS = {"b32": 48, "u16": 56}  # registers of a thread that wait for no word, about, by what it reads at once
MOST = 4  # units that are read before the first is stored
WORD, LINE = 4, 128  # bytes of a register, and of all banks of shared memory

# of a pixel, or of two neighbours, eight channels
_READ = """
__device__ __forceinline__ void hopper_turned_read(unsigned int& a, unsigned int& b, unsigned int& c, unsigned int& d,
    unsigned int& e, unsigned int& f, unsigned int& g, unsigned int& h, unsigned int from) {{
{0}
}}
"""
# of one of them, whose halves `order` takes, unless it goes nowhere
_PUT = """
__device__ __forceinline__ void hopper_turned_put(int to, int more, unsigned int order, unsigned int a, unsigned int b,
    unsigned int c, unsigned int d, unsigned int e, unsigned int f, unsigned int g, unsigned int h) {
  asm volatile("{\\n.reg .pred p;\\nsetp.ge.s32 p, %0, 0;\\n@p st.shared.v4.b32 [%1], {%2, %3, %4, %5};\\n}\\n"
    :: "r"(to), "r"(to + more), "r"(__byte_perm(a, b, order)), "r"(__byte_perm(c, d, order)),
    "r"(__byte_perm(e, f, order)), "r"(__byte_perm(g, h, order)) : "memory");
}
"""
_LOWER, _UPPER = 0x5410, 0x7632
_ZEROS = 0x3232  # of a word that is half of one
# a unit: of eight neighbours, eight channels each
_UNITS = """
__device__ __forceinline__ void hopper_turned_units(unsigned int from, unsigned int to) {{
  unsigned int {words};
{loads}
{stores}
}}
"""
_TABLE = """
__device__ __forceinline__ int hopper_turned_{0}(int number) {{
  static const short values[{1}] = {{{2}}};
  return number < {1} ? values[number] : {3};
}}
"""


def _read_source(source: TurnedData, bits: str) -> str:
    lines = [
        f'  asm volatile("ld.shared.{bits} %0, [%1+{offset}];" : "=r"({name}) : "r"(from));'
        for name, offset in zip("abcdefgh", source.offsets, strict=True)
    ]
    return _READ.format("\n".join(lines))


def units_source(source: TurnedData) -> str:
    """How a thread turns a unit, eight neighbours in eight channels: it reads the words of each channel that have them,
    from one multiple of 16 bytes or two, and stores each pixel's eight channels, halves of words, as a row's 16 bytes.
    """
    late = source.late
    assert late
    loads: list[str] = []
    stores: list[str] = []
    registers: list[str] = []

    def read(names: Sequence[str], at: int) -> None:
        kind, count = ("b32", 1) if len(names) == 1 else (f"v{len(names)}.b32", len(names))
        targets = ", ".join(f"%{i}" for i in range(count))
        targets = targets if count == 1 else f"{{{targets}}}"
        registers.extend(names)
        outs = ", ".join(f'"=r"({name})' for name in names)
        loads.append(f'  asm volatile("ld.shared.{kind} {targets}, [%{count}+{at}];" : {outs} : "r"(from));')

    each = UNIT // WORD
    for i, (offset, pixels) in enumerate(zip(source.offsets, late, strict=True)):
        first, last = pixels // 2, (pixels + GROUP - 1) // 2
        names, start = [f"w{i}_{number}" for number in range(2 * each)], offset - pixels * ITEM
        # as much at once as there is: of three words four
        begin = first if first >= each // 2 else 0
        read(names[begin:each], start + begin * WORD)
        if last >= each:
            end = last + 1 if last < each + 2 else 2 * each
            read(names[each:end], start + UNIT)

    def half(i: int, pixel: int) -> tuple[str, int]:
        number, upper = divmod(late[i] + pixel, 2)
        return f"w{i}_{number}", upper

    line = source.tile.swizzle
    for pixel in range(GROUP):
        halves = [half(i, pixel) for i in range(GROUP)]
        words = [
            f"__byte_perm({a}, {b}, {(0x7600 if above else 0x5400) + (0x32 if upper else 0x10)})"
            for (a, upper), (b, above) in zip(halves[::2], halves[1::2], strict=True)
        ]
        place = f"to ^ {pixel * line // LINE % (line // UNIT) * UNIT}"
        values = ", ".join(f'"r"({word})' for word in words)
        stores.append(
            f'  asm volatile("st.shared.v4.b32 [%0+{pixel * line}], {{%1, %2, %3, %4}};"\n'
            f'    :: "r"({place}), {values} : "memory");'
        )
    return _UNITS.format(words=", ".join(registers), loads="\n".join(loads), stores="\n".join(stores))


def _local(name: str, dtype: str = "int32", count: int = 1) -> Any:
    found = T.alloc_local((count,), dtype)
    IRBuilder.name(name, found)
    if dtype == "int32":
        T.buffer_store(found, T.int32(0), [0])
    return found


class SlotRing:
    """A ring of slots in `memory`, `nbytes` apart, as a warp or a warpgroup goes around it; `full` and `empty` have a
    barrier for each."""

    def __init__(self, name: str, memory: Buffer, nbytes: int, full: MBarrier, empty: MBarrier) -> None:
        self.memory, self.nbytes, self.full, self.empty, self.count = memory, nbytes, full, empty, full.depth
        self._slot, self._phase, self._left = (_local(f"{name}_{each}") for each in ("slot", "phase", "slot_before"))

    @property
    def slot(self) -> Expr:
        return self._slot[0]

    def wait_full(self) -> None:
        self.full.wait(self.slot, self._phase[0])

    def wait_empty(self) -> None:
        self.empty.wait(self.slot, self._phase[0] ^ 1)

    def skip(self, count: Expr) -> None:
        """Go on by so many slots."""
        at = named("at_slot", self.slot + count)
        T.buffer_store(self._phase, self._phase[0] ^ (T.truncdiv(at, self.count) & 1), [0])
        T.buffer_store(self._slot, T.truncmod(at, self.count), [0])

    def advance(self) -> None:
        """Go on to the next slot; this one may be said to be read later (`release`)."""
        T.buffer_store(self._left, self.slot, [0])
        self.skip(T.int32(1))

    def release(self, by: Expr) -> None:
        """Have the thread for which `by` is true say that the slot before has been read."""
        with T.If(by), T.Then():
            self.empty.arrive(self._left[0])


class Turned:
    """Both rings of a block, in the memory for `boxes` and for turned `rows`, with barriers from `pool`; `readers` say
    that they have read a turned chunk."""

    def __init__(
        self, source: TurnedData, boxes: Buffer, rows: Buffer, readers: int, pool: T.SMEMPool, leader: Expr
    ) -> None:
        self.source, self.boxes, self.rows, self.readers = source, boxes, rows, readers
        self.arrived = TMABar(pool, source.arriving_slots, leader=leader)
        self.read = MBarrier(pool, source.arriving_slots, leader=leader)
        self.full, self.empty = (MBarrier(pool, source.slots, leader=leader) for _ in range(2))

    def init(self) -> None:
        """Set the barriers up."""
        self.arrived.init(FILLS)
        self.read.init(self.source.turners)
        self.full.init(self.source.turners)
        self.empty.init(self.readers)

    def ring_of_boxes(self) -> SlotRing:
        return SlotRing("box", self.boxes, self.source.arriving_bytes, self.arrived, self.read)

    def ring_of_rows(self) -> SlotRing:
        return SlotRing("turned", self.rows, self.source.slot_bytes, self.full, self.empty)


@dataclass(frozen=True)
class BoxTurner:
    """What both kinds of warps do with all chunks of a block's tiles from a number on, of `clusters` in all, each
    `apart` from the one before; `place` says where a tile lies, `pixel` of one of runs where its rows' pixels are."""

    memory: Turned
    tensor_map: Variable
    place: Callable[[Expr], Any]
    pixel: Callable[[Any], Pixel]
    clusters: Index
    apart: Index
    chunks: int
    first: Index  # of the chunks, this block's, which takes every so manyth
    every: int
    registers: int  # of a thread that turns

    @T.inline
    def load(self, tile: Variable, boxes: Callable[..., Sequence[Load]]) -> None:
        """Have TMA bring them, by one warp; `boxes` are those of a place, by the number of an arrival."""
        ring = T.meta_var(self.memory.ring_of_boxes())
        arrivals = T.meta_var(self.memory.source.arrivals)
        while tile < self.clusters:
            place = T.meta_var(self.place(tile))
            chunk: T.int32
            chunk = self.first
            while chunk < self.chunks:
                # while: unrolled, loads would need more registers than the producer keeps
                arrival: T.int32
                arrival = chunk * arrivals
                while arrival < (chunk + 1) * arrivals:
                    self.bring(ring, boxes(place, chunk=arrival))
                    arrival = arrival + 1
                chunk = chunk + self.every
            tile = tile + self.apart

    def bring(self, ring: SlotRing, loads: Sequence[Load]) -> None:
        """Fill the ring's slot when it is free."""
        source = self.memory.source.source
        ring.wait_empty()
        with T.If(T.cuda.elect_sync()), T.Then():
            always = sum(load.when is None for load in loads)
            count = sum((T.Cast("int32", load.when) for load in loads if load.when is not None), T.int32(always))
            self.memory.arrived.arrive(ring.slot, count * source.box_bytes)
            form = f"cp.async.bulk.tensor.{source.rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
            for load in loads:
                to = ring.memory.ptr_to([ring.slot * ring.nbytes + load.offset])
                barrier = self.memory.arrived.ptr_to([ring.slot])
                with where(load.when):
                    T.evaluate(T.ptx[form](to, T.address_of(self.tensor_map), *load.at, barrier))
        ring.advance()

    @T.inline
    def turn(self, tile: Variable, number: Expr, lane: Expr) -> None:
        """Turn them, by `lane` of warp `number` of those that do: all chunks, or of pairs in turn its own's, each after
        those of the other pairs."""
        boxes = T.meta_var(self.memory.ring_of_boxes())
        rows = T.meta_var(self.memory.ring_of_rows())
        pairs = T.meta_var(self.memory.source.in_turn)
        arrivals = T.meta_var(self.memory.source.arrivals)
        warp = T.meta_var(number if pairs == 1 else named("of_pair", number % TURNERS))
        fixed = T.meta_var(self.places(warp, lane))
        others: T.int32  # chunks of other pairs before this one's next
        others = 0
        if pairs > 1:
            others = T.truncdiv(number, TURNERS)
            rows.skip(others)
            boxes.skip(others * arrivals)
        while tile < self.clusters:
            places = T.meta_var(self.places_of(tile, warp, lane) if fixed is None else fixed)
            chunk: T.int32
            chunk = self.first
            while chunk < self.chunks:
                if pairs == 1:
                    self.turn_next(boxes, rows, places, warp, lane)
                else:
                    if others == 0:
                        self.turn_next(boxes, rows, places, warp, lane)
                        boxes.skip(T.int32((pairs - 1) * arrivals))
                        others = pairs
                    others = others - 1
                chunk = chunk + self.every
            tile = tile + self.apart

    @T.inline
    def turn_next(self, boxes: SlotRing, rows: SlotRing, places: Any, warp: Expr, lane: Expr) -> None:
        """Turn the pair's next chunk, and go on to the one after that."""
        rows.wait_empty()
        self.turn_chunk(boxes, rows, places, warp, lane)
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        T.evaluate(T.cuda.warp_sync())
        if lane == 0:
            rows.full.arrive(rows.slot)
        rows.skip(T.int32(self.memory.source.in_turn))

    def _units(self, warp: Expr, lane: Expr) -> Units:
        """The unit and the group of eight channels that a thread turns first.  Lanes side by side have the groups of
        one unit; where these would be read from the same banks, those of several units."""
        source = self.memory.source
        groups, line = source.tile.k // GROUP, source.tile.swizzle
        number, group = named("unit", T.truncdiv(lane, groups)), named("group", T.truncmod(lane, groups))
        shared = source.group_bytes // UNIT
        units = min(WARP // groups, shared & -shared)  # groups are a multiple of so many units apart
        number = named("unit", T.bitwise_xor(number, T.truncdiv(group * units, GROUP)))
        number = number + warp * (WARP // groups)
        base = T.Cast("int32", T.cuda.cvta_generic_to_shared(self.memory.boxes.ptr_to([0])))
        to = T.Cast("int32", T.cuda.cvta_generic_to_shared(self.memory.rows.ptr_to([0])))
        word = kept("first_unit", base + group * source.group_bytes + number * UNIT)
        row = kept("first_rows", to + number * (GROUP * line) + group * UNIT)
        return Units(word, row, WARP // groups)

    def places(self, warp: Expr, lane: Expr) -> Places | Units | None:
        """What the thread turns of each block of words, in the channels that its warp begins with: where these are in
        the first box, and where its first and its second pixel go in the first turned tile; None if that is not the
        same for all tiles."""
        source = self.memory.source
        if source.late:
            return self._units(warp, lane)
        if not isinstance(source, TurnedBoxes):
            return None
        base, to, turner, share = self._bases(warp)
        lanes = source.layout.lanes
        words = lanes.words
        odd_first: Expr = T.bool(False)
        if lanes.odd_first:
            odd_first = named("odd_first", T.bitwise_and(T.shift_right(lane, T.int32(2)), T.int32(1)) == 1)
        orders = [
            named(name, T.Select(odd_first == odd, T.uint32(_UPPER), T.uint32(_LOWER)))
            for name, odd in (("first_order", True), ("second_order", False))
        ]
        found = Places("b32")
        for first in range(0, len(words), self._at_once):
            at, even, odd = (
                named(name, _looked_up(name, [getattr(word, name) for word in words], beyond, lane + (share + first)))
                for name, beyond in (("at", 0), ("even", -1), ("odd", -1))
            )
            rows = T.Select(odd_first, odd, even), T.Select(odd_first, even, odd)
            goes = [(kept("row", self._place(to, row, turner)), order) for row, order in zip(rows, orders, strict=True)]
            found.blocks.append((kept("word", base + at * 2), goes))
        return found

    def places_of(self, tile: Expr, warp: Expr, lane: Expr) -> Places:
        """The same of tile number `tile`: of each row of the turned tile its pixel, or zeros."""
        base, to, turner, share = self._bases(warp)
        found, source = Places("u16"), self.memory.source
        row = named("row", self._place(to, lane + share, turner))
        pixel = self.pixel(self.place(tile))
        for first in range(0, source.tile.rows, self._at_once):
            at, exists = pixel(share + first, lane)
            # halves of words are at even bytes, and at one further is none
            word = kept("word", base + T.Select(named("exists", exists), at, 1))
            goes = row + first * source.tile.swizzle
            if first + self._at_once > source.tile.rows:  # not all that share a chunk have as many
                goes = named("row", T.Select(share + first < source.tile.rows, goes, T.int32(-1)))
            found.blocks.append((word, [(goes, None)]))
        return found

    @property
    def _at_once(self) -> int:
        """Words, or rows, that the warps which share a chunk turn at once."""
        return self.memory.source.turners // TURNERS * WARP

    def _bases(self, warp: Expr) -> tuple[Expr, Expr, Expr, Index]:
        """Where the channels of a warp begin in what arrives first, and where the first turned tile does; the warp's
        number in its pair, and the first of its pair's words or rows."""
        base = T.Cast("int32", T.cuda.cvta_generic_to_shared(self.memory.boxes.ptr_to([0])))
        to = T.Cast("int32", T.cuda.cvta_generic_to_shared(self.memory.rows.ptr_to([0])))
        share: Index = 0
        if self.memory.source.turners > TURNERS:
            share = named("share", T.truncdiv(warp, TURNERS) * WARP)
            warp = named("of_pair", T.truncmod(warp, TURNERS))
        return named("first_pixels", base + warp * self.memory.source.group_bytes), to, warp, share

    def _place(self, to: Expr, row: Expr, turner: Expr) -> Expr:
        """Where a row's first channels of a warp go, negative if nowhere."""
        tile = self.memory.source.tile
        line = T.bitwise_and(T.shift_right(row * tile.swizzle, T.int32(7)), T.int32(tile.swizzle // UNIT - 1))
        return T.Select(row < 0, T.int32(-1), to + row * tile.swizzle + T.bitwise_xor(turner, line) * UNIT)

    def turn_chunk(self, boxes: SlotRing, rows: SlotRing, places: Places | Units, warp: Expr, lane: Expr) -> None:
        """Turn what arrives of a chunk in `boxes` into the slot of `rows`, one arrival after the other."""
        source = self.memory.source
        groups = source.together // GROUP // TURNERS  # of a warp
        for arrival in range(source.arrivals):
            boxes.wait_full()
            if isinstance(places, Units):
                self._turn_units(boxes, rows, places, warp)
            else:
                self._turn_groups(boxes, rows, places, range(arrival * groups, (arrival + 1) * groups))
            T.evaluate(T.cuda.warp_sync())
            with T.If(lane == 0), T.Then():
                boxes.empty.arrive(boxes.slot)
            boxes.advance()

    def _turn_units(self, boxes: SlotRing, rows: SlotRing, places: Units, warp: Expr) -> None:
        """Turn the slot of `boxes`: all channels of its units, of which both warps have as many in turn."""
        source = self.memory.source
        start, to = named("from_box", boxes.slot * boxes.nbytes), named("to_rows", rows.slot * rows.nbytes)
        count = source.tile.rows // GROUP
        for first in range(0, count, places.together * TURNERS):
            more = first * UNIT, first * GROUP * source.tile.swizzle
            call = (
                "hopper_turned_units",
                *(
                    T.Cast("uint32", place + slot + each)
                    for place, slot, each in zip((places.word, places.row), (start, to), more, strict=True)
                ),
            )
            some = warp < (count - first) // places.together
            with where(some if count - first < places.together * TURNERS else None):
                T.evaluate(T.cuda.func_call(*call, source_code=units_source(source)))

    def _turn_groups(self, boxes: SlotRing, rows: SlotRing, places: Places, groups: range) -> None:
        """Turn the slot of `boxes`: of each block of words those of this warp's `groups` of channels that it has."""
        source = self.memory.source
        tile = source.tile
        start, to = named("from_box", boxes.slot * boxes.nbytes), named("to_rows", rows.slot * rows.nbytes)
        rows_of_block = sum(order is not None for _, order in places.blocks[0][1])
        taken = OTHERS[places.bits] + len(places.blocks) * (1 + rows_of_block)
        ahead = max(1, min(MOST, (self.registers - taken) // GROUP))
        words = _local("channels", "uint32", ahead * GROUP)
        units = list(product(places.blocks, groups))

        def registers(number: int) -> list[Expr]:
            return [words[number % ahead * GROUP + i] for i in range(GROUP)]

        for number in range(len(units) + ahead - 1):
            if number < len(units):
                (word, _), group = units[number]
                from_word = word if places.bits == "b32" else T.bitwise_and(word, T.int32(-2))
                at = T.Cast("uint32", from_word + start + (group - groups[0]) * (TURNERS * source.group_bytes))
                call = "hopper_turned_read", *registers(number), at
                T.evaluate(T.cuda.func_call(*call, source_code=_read_source(source, places.bits)))
            if number >= ahead - 1:
                (word, goes), group = units[number - ahead + 1]
                slab, of_slab = divmod(group, tile.swizzle // UNIT // TURNERS)
                for row, order in goes:
                    if order is None:
                        order = T.Select(T.bitwise_and(word, 1) == 0, T.uint32(_LOWER), T.uint32(_ZEROS))
                    place = T.bitwise_xor(row, T.int32(of_slab * TURNERS * UNIT)), to + slab * tile.slab
                    call = "hopper_turned_put", *place, order, *registers(number - ahead + 1)
                    T.evaluate(T.cuda.func_call(*call, source_code=_PUT))


@dataclass
class Places:
    """Of a thread, of each block of words: where its word, or half of one, is; and of each pixel of it where that goes,
    and the order of halves by which it is taken: None for that of the lower ones, or zeros where the word is at an odd
    byte."""

    bits: str
    blocks: list[tuple[Expr, list[tuple[Expr, Expr | None]]]] = field(default_factory=list)


@dataclass
class Units:
    """Of a thread of a warp that turns so many units `together`: where its first one begins, in the first slot of
    boxes, and where that one's first row goes, in the first slot of rows."""

    word: Expr
    row: Expr
    together: int


def _looked_up(name: str, values: Sequence[int], beyond: int, number: Expr) -> Expr:
    source = _TABLE.format(name, len(values), ", ".join(map(str, values)), beyond)
    return T.cuda.func_call(f"hopper_turned_{name}", number, source_code=source, return_type="int32")


def turner_of(work: Work, turned: Turned, tensor_map: Variable, at: ClusterPlace, clusters: Index) -> BoxTurner:
    """That of the block at `at` of one of `clusters`."""

    def place(tile: Expr) -> Any:
        return work.place(tile, at.rank_m, at.rank_n)

    assert work.config.shares
    own, of_consumer = work.config.shares
    return BoxTurner(
        turned,
        tensor_map,
        place,
        work.pixels_of_runs,
        work.clusters,
        clusters,
        work.chunks // turned.source.stages,
        at.rank_k,
        work.config.split_k,
        own or of_consumer,
    )
