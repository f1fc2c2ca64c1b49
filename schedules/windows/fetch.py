"""How a block brings a patch of the image, and its filters, into shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.script import tirx as T

from schedules.tirx.values import named
from schedules.windows.geometry import OCTET, STEP, WORD, Windows, strides

if TYPE_CHECKING:
    from schedules.tirx.types import Buffer, Expr, Tensors

IN_FLIGHT = 24  # elements that a thread loads before it stores them
# zeros where it is not there
_COPY = """
__device__ __forceinline__ void windows_copy_{0}(void* to, const void* from, bool there) {{
  unsigned int at = (unsigned int)__cvta_generic_to_shared(to);
  asm volatile("cp.async.{1}.shared.global [%0], [%1], {0}, %2;" :: "r"(at), "l"(from), "r"(there ? {0} : 0)
    : "memory");
}}
"""
_LOAD = """
__device__ __forceinline__ unsigned int windows_load_{0}(const void* from, bool there) {{
  return there ? *(const {1}*)from : 0u;
}}
"""
_LOAD_FOUR = """
__device__ __forceinline__ void windows_load_16(unsigned int& a, unsigned int& b, unsigned int& c, unsigned int& d,
    const void* from, bool there) {
  uint4 v = there ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
  a = v.x; b = v.y; c = v.z; d = v.w;
}
"""
_PUT = """
__device__ __forceinline__ void windows_put_{0}(void* to, unsigned int value) {{ *({1}*)to = ({1})value; }}
"""
_TYPES = {2: "unsigned short", 4: "unsigned int"}
_ZERO = """
__device__ __forceinline__ void windows_zero(void* to) { *(uint4*)to = make_uint4(0, 0, 0, 0); }
"""


def _load(nbytes: int, source: Expr, there: Expr) -> Expr:
    """A number of `nbytes`, widened, or 0."""
    text = _LOAD.format(nbytes, _TYPES[nbytes])
    return T.cuda.func_call(f"windows_load_{nbytes}", source, there, source_code=text, return_type="uint32")


def _put(nbytes: int, target: Expr, value: Expr) -> None:
    T.evaluate(
        T.cuda.func_call(f"windows_put_{nbytes}", target, value, source_code=_PUT.format(nbytes, _TYPES[nbytes]))
    )


def clear(memory: Buffer, nbytes: int, thread: Expr, threads: int) -> None:
    """Fill whole 16 bytes of `memory` with zeros, by all threads."""
    count = nbytes // 16
    with T.serial(-(-count // threads)) as turn:
        at = named("at", turn * threads + thread)
        with T.If(at < count), T.Then():
            T.evaluate(T.cuda.func_call("windows_zero", memory.ptr_to([at * 16]), source_code=_ZERO))


@dataclass(frozen=True)
class Place:
    """A tile: its image, and its first output pixel."""

    n: Expr
    y: Expr
    x: Expr


@dataclass
class PatchFetch:
    """The copies of a thread.  The patch is made of lines: rows, or rows of one channel where these lie apart; lines of
    pieces, which are vectors for cp.async, or elements.

    A power of two of threads share a line, piece by piece, which is the fewest pieces for each thread.
    """

    w: Windows
    tensors: Tensors
    memory: Buffer  # bytes: stages
    thread: Expr

    def __post_init__(self) -> None:
        w, p = self.w, self.w.problem
        self.rows, columns = w.patch
        self.copied = w.vector >= WORD
        self.apart = "li" not in w.data and w.data["ci"] > 1  # channels of a pixel in memory
        self.per_row = p.ci if self.apart else 1
        self.lines = self.rows * self.per_row
        self.piece = w.vector // w.item  # elements
        if self.apart:
            self.pieces = columns
        elif w.channel_axis == "li":
            self.pieces = columns * (w.channels // self.piece)
        elif self.copied:
            self.pieces = w.pitch * WORD // w.vector
        else:
            self.pieces = columns * p.ci
        threads = w.config.threads
        powers = [2**i for i in range(3, 11) if threads % 2**i == 0]
        self.across = min(powers, key=lambda n: (self.turns(n)[0] * self.turns(n)[1], -n))

    def turns(self, across: int) -> tuple[int, int]:
        """Lines, and pieces of each, of a thread, where `across` threads share a line."""
        return -(-self.lines // (self.w.config.threads // across)), -(-self.pieces // across)

    def source(self, place: Place, piece: Expr) -> tuple[Expr, Expr, Expr]:
        """(elements from the line's start in memory, whether they are there, bytes from the row's start in the patch)
        of a piece, but for the channel where these are apart."""
        w, p = self.w, self.w.problem
        start = place.x * p.stride[1] - p.pad[1]
        if self.apart:
            at = start + piece
            return at * w.data["w"], tirx.all(at >= 0, at < p.w), piece * (w.channels * w.item)
        if w.channel_axis == "li":
            parts = w.channels // self.piece
            pixel, part = T.truncdiv(piece, parts), T.truncmod(piece, parts)
            at = start + pixel
            element = at * w.data["w"] + part * self.piece
            return element, tirx.all(at >= 0, at < p.w), piece * w.vector
        if self.copied:
            first = (-p.pad[1] * p.ci - w.shift) // self.piece
            each = p.stride[1] * p.ci * OCTET // self.piece  # a tile starts at whole octets
            at = T.truncdiv(place.x, OCTET) * each + first + piece
            return at * self.piece, tirx.all(at >= 0, at < p.w * p.ci // self.piece), piece * w.vector
        at = start * p.ci + piece
        pixel, channel = T.truncdiv(piece, p.ci), T.truncmod(piece, p.ci)
        return at, tirx.all(at >= 0, at < p.w * p.ci), (pixel * w.channels + channel) * w.item

    def line(self, place: Place, number: Expr) -> tuple[Expr, Expr, Expr]:
        """(element where it starts in memory, whether it is there, bytes into the patch) of a line."""
        w, p = self.w, self.w.problem
        row: Expr = T.truncdiv(number, self.per_row) if self.per_row > 1 else number
        channel: Expr = T.truncmod(number, self.per_row) if self.per_row > 1 else 0
        y = place.y * p.stride[0] - p.pad[0] + row
        element = place.n * w.data["n"] + y * w.data["h"] + channel * w.data[w.channel_axis]
        return element, tirx.all(y >= 0, y < p.h), row * (w.pitch * WORD) + channel * w.item

    def emit(self, place: Place, stage: Expr) -> None:
        """Bring the patch of the tile at `place` into `stage`, as a group of copies."""
        w = self.w
        lanes, (turns, pieces) = w.config.threads // self.across, self.turns(self.across)
        first_line = named("first_line", T.truncdiv(self.thread, self.across))
        first_piece = named("first_piece", T.truncmod(self.thread, self.across))
        base = named("patch", stage * (w.patch_words * WORD))
        sources = []
        for i in range(pieces):
            piece = first_piece + i * self.across
            element, inside, offset = self.source(place, piece)
            held = piece < self.pieces if (i + 1) * self.across > self.pieces else None
            sources.append((named("element", element), named("inside", inside), named("offset", offset), held))
        together = turns if self.copied else max(1, min(turns, IN_FLIGHT // pieces))
        with T.serial(-(-turns // together)) as round_:
            values = None if self.copied else T.alloc_local((together * pieces,), "uint32")
            for stored in (False, True) if values is not None else (False,):
                for k in range(together):
                    number = named("line", first_line + (round_ * together + k) * lanes)
                    start, there, into = self.line(place, number)
                    start, there, into = named("start", start), named("there", there), named("into", base + into)
                    sure = -(-turns // together) * together * lanes == self.lines
                    for i, (element, inside, offset, held) in enumerate(sources):
                        conditions = ([] if sure else [number < self.lines]) + ([] if held is None else [held])
                        use = tirx.all(there, inside, *conditions)
                        source = self.tensors["flat data"].ptr_to([T.Select(use, start + element, 0)])
                        target = self.memory.ptr_to([into + offset])
                        with _where(conditions if self.copied or stored else []):
                            if self.copied:
                                text = _COPY.format(w.vector, "cg" if w.vector == 16 else "ca")
                                name = f"windows_copy_{w.vector}"
                                T.evaluate(T.cuda.func_call(name, target, source, use, source_code=text))
                            elif stored:
                                _put(w.item, target, values[k * pieces + i])
                            else:
                                T.buffer_store(values, _load(w.item, source, use), [k * pieces + i])
        if self.copied:
            T.evaluate(T.ptx.cp.async_.commit_group())


def _where(conditions: list[Expr]) -> object:
    import contextlib

    stack = contextlib.ExitStack()
    if conditions:
        stack.enter_context(T.If(tirx.all(*conditions)))
        stack.enter_context(T.Then())
    return stack


def fetch_filters(w: Windows, tensors: Tensors, memory: Buffer, thread: Expr, first: Expr, at_word: int) -> None:
    """Put the filters of output channels `first` on into `memory` from word `at_word` on, which holds zeros, in the order of fragments: for each
    step, and each pair of octets of channels, a lane's words side by side.

    They are read in their own order: by vectors where the channels are the slowest axis, else piece by piece.
    """
    p, c = w.problem, w.config
    words = w.channel_axis == "li"  # pieces are words of channels, or elements
    axes = [axis for axis in p.filter_axes if axis != "gi"]
    pitch = strides(p.filter_axes, p.extents)
    name = {"li": "c", "ci": "c"}
    extents = {"co": c.block_n, "kh": p.kh, "kw": p.kw, "ci": p.ci, "li": w.channels // w.unit}
    total = math.prod(extents[axis] for axis in axes)
    of_filter = p.kh * p.kw * p.ci
    vector = math.gcd(8, p.co * of_filter) if axes[0] == "co" and not words else 1
    vector = vector if vector == 8 else 1
    count = -(-total // vector)
    together = 4 if vector > 1 else IN_FLIGHT
    rounds = -(-count // c.threads)
    together = min(together, rounds)
    channels = w.problem.extents["co"]

    with T.serial(-(-rounds // together)) as round_:
        held = T.alloc_local((together * (4 if vector > 1 else 1),), "uint32")
        numbers = []
        for k in range(together):
            number = named("number", (round_ * together + k) * c.threads + thread)
            numbers.append(number)
            if vector > 1:
                at = number * vector
                start = named("from", first * of_filter + at)
                there = tirx.all(at < total, start < channels * of_filter)
                source = tensors["flat filter"].ptr_to([T.Select(there, start, 0)])
                T.evaluate(
                    T.cuda.func_call(
                        "windows_load_16", *(held[4 * k + i] for i in range(4)), source, there, source_code=_LOAD_FOUR
                    )
                )
            else:
                at = _digits(axes, extents, number)
                element = first * pitch["co"]
                for axis in axes:
                    element = element + at[axis] * (pitch[axis] * (w.unit if axis == "li" else 1))
                there = tirx.all(number < total, first + at["co"] < channels)
                source = tensors["flat filter"].ptr_to([T.Select(there, element, 0)])
                T.buffer_store(held, _load(WORD if words else w.item, source, there), [k])
        for k, number in enumerate(numbers):
            for i in range(vector):
                at = {name.get(axis, axis): value for axis, value in _digits(axes, extents, number * vector + i).items()}
                value = T.shift_right(held[4 * k + i // 2], T.uint32(16 * (i % 2))) if vector > 1 else held[k]
                element = w.lead + at["kw"] * w.channels + at["c"] * (w.unit if words else 1)
                word = weight_word(w, at["co"], at["kh"] * w.row_units + T.truncdiv(element, w.unit))
                target = memory.ptr_to([(word + at_word) * WORD + T.truncmod(element, w.unit) * w.item])
                with T.If(number * vector + i < total), T.Then():
                    _put(WORD if words else w.item, target, value)


def _digits(axes: list[str], extents: dict[str, int], number: Expr) -> dict[str, Expr]:
    """The place along each axis of element `number` in their order."""
    found: dict[str, Expr] = {}
    for axis in reversed(axes[1:]):
        found[axis] = named(axis, T.truncmod(number, extents[axis]))
        number = named("rest", T.truncdiv(number, extents[axis]))
    found[axes[0]] = number
    return found


def weight_word(w: Windows, channel: Expr, unit: Expr) -> Expr:
    """The word of a block's channel and unit of the reduction among its filters."""
    if w.channels_last:  # a lane has 2 x run neighbours
        of_run = T.truncmod(channel, OCTET * w.run)
        octet = T.truncdiv(channel, OCTET * w.run) * w.run + T.truncdiv(T.truncmod(of_run, 2 * w.run), 2)
        row = T.truncdiv(of_run, 2 * w.run) * 2 + T.truncmod(channel, 2)
    else:
        octet, row = T.truncdiv(channel, OCTET), T.truncmod(channel, OCTET)
    step, of_step = T.truncdiv(unit, STEP), T.truncmod(unit, STEP)
    half, lane = T.truncdiv(of_step, 4), row * 4 + T.truncmod(of_step, 4)
    octets, pair = w.config.block_n // OCTET, w.pair
    vector = (step * (octets // pair) + T.truncdiv(octet, pair)) * 32 + lane
    return vector * (2 * pair) + T.truncmod(octet, pair) * 2 + half
