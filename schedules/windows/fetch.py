"""How a block brings a patch of the image, and its filters, into shared memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from schedules.tirx.types import Buffer, Expr, Tensors
from schedules.tirx.values import kept, named
from schedules.windows.geometry import OCTET, STEP, WORD, Windows, strides

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
_LOAD_WORDS = """
__device__ __forceinline__ void windows_load_words_{0}({1}, const void* from, bool there) {{
  {2} v = there ? *(const {2}*)from : make_{2}({3});
  {4}
}}
"""
_PUT_WORDS = """
__device__ __forceinline__ void windows_put_words_{0}(void* to, {1}) {{ *({2}*)to = make_{2}({3}); }}
"""
_PUT = """
__device__ __forceinline__ void windows_put_{0}(void* to, unsigned int value) {{ *({1}*)to = ({1})value; }}
"""
_SET = """
__device__ __forceinline__ void windows_set(unsigned int& to, unsigned int value) { to = value; }
"""
_TYPES = {2: "unsigned short", 4: "unsigned int"}


def _load(nbytes: int, source: Expr, there: Expr) -> Expr:
    """A number of `nbytes`, widened, or 0."""
    text = _LOAD.format(nbytes, _TYPES[nbytes])
    return T.cuda.func_call(f"windows_load_{nbytes}", source, there, source_code=text, return_type="uint32")


def _put(nbytes: int, target: Expr, value: Expr) -> None:
    T.evaluate(
        T.cuda.func_call(f"windows_put_{nbytes}", target, value, source_code=_PUT.format(nbytes, _TYPES[nbytes]))
    )


def _load_words(words: Sequence[Expr], source: Expr, there: Expr) -> None:
    """Load 1, 2 or 4 words, or zeros."""
    if len(words) == 1:
        T.evaluate(T.cuda.func_call("windows_set", words[0], _load(WORD, source, there), source_code=_SET))
        return
    names, kind = "abcd"[: len(words)], f"uint{len(words)}"
    text = _LOAD_WORDS.format(
        len(words),
        ", ".join(f"unsigned int& {name}" for name in names),
        kind,
        ", ".join("0" * len(words)),
        " ".join(f"{name} = v.{part};" for name, part in zip(names, "xyzw", strict=False)),
    )
    T.evaluate(T.cuda.func_call(f"windows_load_words_{len(words)}", *words, source, there, source_code=text))


def put_words(target: Expr, words: Sequence[Expr]) -> None:
    """Store 1, 2 or 4 words."""
    if len(words) == 1:
        _put(WORD, target, words[0])
        return
    names = "abcd"[: len(words)]
    parameters = ", ".join(f"unsigned int {name}" for name in names)
    text = _PUT_WORDS.format(len(words), parameters, f"uint{len(words)}", ", ".join(names))
    T.evaluate(T.cuda.func_call(f"windows_put_words_{len(words)}", target, *words, source_code=text))


def clear(memory: Buffer, words: range, thread: Expr, threads: int) -> None:
    """Fill `words` of `memory`, whole 16 bytes, with zeros, by all threads."""
    count = len(words) // 4
    with T.serial(-(-count // threads)) as turn:
        at = named("at", turn * threads + thread)
        with T.If(at < count), T.Then():
            put_words(memory.ptr_to([words.start * WORD + at * 16]), [T.uint32(0)] * 4)


@dataclass(frozen=True)
class Place:
    """A tile: its image, and its first output pixel."""

    n: Expr
    y: Expr
    x: Expr


class PatchFetch:
    """The copies of a thread.  The patch is made of lines: rows, or rows of one channel where these lie apart; lines of
    pieces: vectors for cp.async, a few pixels that pass through registers, or single elements.

    A power of two of threads share a line, piece by piece, which is the fewest pieces for each thread.
    """

    def __init__(self, w: Windows, tensors: Tensors, memory: Buffer, thread: Expr) -> None:
        self.w, self.tensors, self.memory, self.thread = w, tensors, memory, thread
        self.rows, columns = w.patch
        self.copied = w.vector > 0
        self.per_row = 1
        if self.copied:
            self.pieces = w.pitch * WORD // w.vector
            if w.apart:
                self.pieces = columns * w.channels // (w.vector // w.item)
        elif w.pixels > 1:
            self.pieces = w.pitch * w.unit // (w.pixels * w.channels)
        else:
            self.per_row = 1 if w.contiguous else w.elements
            self.pieces = columns * w.elements // self.per_row
        self.lines = self.rows * self.per_row
        powers = [2**i for i in range(3, 11) if w.config.threads % 2**i == 0]
        self.across = min(powers, key=lambda n: (math.prod(self.turns(n)), -n))

    def turns(self, across: int) -> tuple[int, int]:
        """Lines, and pieces of each, of a thread, where `across` threads share a line."""
        return -(-self.lines // (self.w.config.threads // across)), -(-self.pieces // across)

    def source(self, place: Place, piece: Expr) -> tuple[Expr, Expr, Expr]:
        """(elements from the line's start in memory, whether they are there, bytes from the line's start in the patch)
        of a piece."""
        w, p = self.w, self.w.problem
        start = place.x * p.stride[1] - p.pad[1]
        if self.copied and w.apart:
            of_piece = w.vector // w.item
            parts = w.channels // of_piece
            x = start + T.truncdiv(piece, parts)
            at = x * w.data["w"] + T.truncmod(piece, parts) * of_piece
            return at, tirx.all(x >= 0, x < p.w), piece * w.vector
        # the tile's first pixel is one of whole octets, which are whole pieces
        octet = T.truncdiv(place.x, OCTET) * (p.stride[1] * OCTET)
        if self.copied:
            of_piece = w.vector // w.item
            at = T.truncdiv(octet * w.elements, of_piece) + (-p.pad[1] * w.elements - w.shift) // of_piece + piece
            return at * of_piece, tirx.all(at >= 0, at < p.w * w.elements // of_piece), piece * w.vector
        if w.pixels > 1:
            at = T.truncdiv(octet, w.pixels) + (-p.pad[1] - w.shift // w.channels) // w.pixels + piece
            inside = tirx.all(at >= 0, at < p.w // w.pixels)
            return at * (w.pixels * w.data["w"]), inside, piece * (w.pixels * w.channels * w.item)
        if self.per_row > 1:
            x = start + piece
            return x, tirx.all(x >= 0, x < p.w), piece * (w.channels * w.item)
        at = start * w.elements + piece
        pixel, channel = T.truncdiv(piece, w.elements), T.truncmod(piece, w.elements)
        return at, tirx.all(at >= 0, at < p.w * w.elements), (pixel * w.channels + channel) * w.item

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
        first_line = kept("first_line", T.truncdiv(self.thread, self.across))
        first_piece = kept("first_piece", T.truncmod(self.thread, self.across))
        base = named("patch", stage * (w.patch_words * WORD))
        sources = []
        for i in range(pieces):
            piece = first_piece + i * self.across
            element, inside, offset = self.source(place, piece)
            held = piece < self.pieces if (i + 1) * self.across > self.pieces else None
            sources.append((named("element", element), named("inside", inside), named("offset", offset), held))
        words = 0 if self.copied else self.piece_words
        together = 1 if self.copied else max(1, min(turns, IN_FLIGHT // (words * pieces)))
        sure = -(-turns // together) * together * lanes == self.lines
        with T.serial(-(-turns // together)) as round_:
            values = T.alloc_local((max(1, together * pieces * words),), "uint32")
            for stored in (False,) if self.copied else (False, True):
                for k in range(together):
                    number = named("line", first_line + (round_ * together + k) * lanes)
                    start, there, into = self.line(place, number)
                    start, there, into = named("start", start), named("there", there), named("into", base + into)
                    for i, (element, inside, offset, held) in enumerate(sources):
                        conditions = ([] if sure else [number < self.lines]) + ([] if held is None else [held])
                        use = named("use", tirx.all(there, inside, *conditions))
                        target, own = into + offset, (k * pieces + i) * words
                        with _where(conditions if stored or self.copied else []):
                            if stored:
                                self._store(target, [values[own + j] for j in range(words)])
                            elif self.copied:
                                self._copy(target, start + element, use)
                            else:
                                self._load([values[own + j] for j in range(words)], start + element, use, values, own)
        if self.copied:
            T.evaluate(T.ptx.cp.async_.commit_group())

    def _at(self, element: Expr, use: Expr) -> Expr:
        """The address of an element of the data, or of the first one where it is of no `use`."""
        return self.tensors["flat data"].ptr_to([T.Select(use, element, 0)])

    def _copy(self, target: Expr, element: Expr, use: Expr) -> None:
        nbytes = self.w.vector
        text = _COPY.format(nbytes, "cg" if nbytes == 16 else "ca")
        to, source = self.memory.ptr_to([target]), self._at(element, use)
        T.evaluate(T.cuda.func_call(f"windows_copy_{nbytes}", to, source, use, source_code=text))

    @property
    def piece_words(self) -> int:
        """Registers that hold a piece."""
        w = self.w
        return w.pixels * w.elements // w.unit if w.pixels > 1 else 1

    def _load(self, words: list[Expr], element: Expr, use: Expr, values: Buffer, own: int) -> None:
        w = self.w
        if w.pixels == 1:
            T.buffer_store(values, _load(w.item, self._at(element, use), use), [own])
            return
        # runs of elements that follow each other: all of the piece's, or those of each channel
        run = w.pixels * w.elements if w.contiguous else w.pixels
        each = math.gcd(16 // w.item, run) // w.unit
        for first in range(0, len(words), each):
            line, of_line = divmod(first * w.unit, run)
            at = element + line * w.data["ci"] + of_line
            _load_words(words[first : first + each], self._at(at, use), use)

    def _store(self, target: Expr, words: list[Expr]) -> None:
        w = self.w
        if w.pixels == 1:
            _put(w.item, self.memory.ptr_to([target]), words[0])
            return

        def element(number: int) -> Expr:
            """An element of the piece as it lies in shared memory, in the low half of a word."""
            pixel, channel = divmod(number, w.channels)
            if channel >= w.elements:
                return T.uint32(0)
            at = pixel * w.elements + channel if w.contiguous else channel * w.pixels + pixel
            return T.bitwise_and(T.shift_right(words[at // 2], T.uint32(16 * (at % 2))), T.uint32(0xFFFF))

        found = [
            T.bitwise_or(element(at), T.shift_left(element(at + 1), T.uint32(16)))
            for at in range(0, w.pixels * w.channels, 2)
        ]
        each = math.gcd(4, len(found))
        for first in range(0, len(found), each):
            put_words(self.memory.ptr_to([target + first * WORD]), found[first : first + each])


def _where(conditions: list[Expr]) -> contextlib.ExitStack:
    """A body that runs where all `conditions` hold."""
    stack = contextlib.ExitStack()
    if conditions:
        stack.enter_context(T.If(tirx.all(*conditions)))
        stack.enter_context(T.Then())
    return stack


def fetch_filters(w: Windows, tensors: Tensors, memory: Buffer, warp: Expr, lane: Expr, first: Expr, at: int) -> None:
    """Put the filters of output channels `first` on into `memory` from word `at` on, in the order of fragments: for
    each step and pair of octets of channels a lane's words side by side; zeros where there are no filters.

    A warp has some of the channels, its lanes neighbouring units, whose places in a filter are found once for all.
    """
    p, c = w.problem, w.config
    if p.filter_axes[-1] == "co":
        _fetch_across(w, tensors, memory, warp, lane, first, at)
        return
    channel_axis = w.channel_axis
    pitch = strides(p.filter_axes, p.extents)
    warps, units, channels = c.threads // 32, w.steps * STEP, p.extents["co"]
    whole = channel_axis == "li"  # units are words of channels in memory, as they are where channels are even
    along = p.filter_axes[-1] == "ci" and w.channels == w.elements
    whole = whole or (along and w.lead % w.unit == 0 and p.kw * p.ci % w.unit == 0)
    of_warp = -(-c.block_n // warps)
    together = min(of_warp, IN_FLIGHT // (1 if whole else w.unit))
    with T.serial(-(-units // 32)) as chunk:
        unit = kept("unit", chunk * 32 + lane)
        row, element = named("row", T.truncdiv(unit, w.row_units)), T.truncmod(unit, w.row_units) * w.unit - w.lead
        found = []
        for i in range(1 if whole else w.unit):
            column, channel = T.truncdiv(element + i, w.channels), T.truncmod(element + i, w.channels)
            inside = [row < p.kh, element + i >= 0, element + i < p.kw * w.channels, channel < w.elements]
            place = row * pitch["kh"] + column * pitch["kw"] + channel * pitch[channel_axis]
            found.append((named("place", place), named("inside", tirx.all(*inside))))
        with T.serial(-(-of_warp // together)) as turn:
            values = T.alloc_local((together * len(found),), "uint32")
            numbers = [named("number", (turn * together + k) * warps + warp) for k in range(together)]
            for k, number in enumerate(numbers):
                start = named("start", (first + number) * pitch["co"])
                for i, (place, inside) in enumerate(found):
                    use = tirx.all(inside, first + number < channels)
                    source = tensors["flat filter"].ptr_to([T.Select(use, start + place, 0)])
                    nbytes = WORD if whole else w.item
                    T.buffer_store(values, _load(nbytes, source, use), [k * len(found) + i])
            for k, number in enumerate(numbers):
                value = values[k * len(found)]
                for i in range(1, len(found)):
                    shift = T.uint32(8 * w.item * i)
                    value = T.bitwise_or(value, T.shift_left(values[k * len(found) + i], shift))
                target = memory.ptr_to([(at + weight_word(w, number, unit)) * WORD])
                with T.If(tirx.all(number < c.block_n, unit < units)), T.Then():
                    _put(WORD, target, value)


def _fetch_across(w: Windows, tensors: Tensors, memory: Buffer, warp: Expr, lane: Expr, first: Expr, at: int) -> None:
    """The same where output channels are neighbours in memory: eight lanes have eight of them, others the next units,
    so that what a warp loads lies in few sectors, and what it stores in many banks.  Each is loaded once for all images
    that lie side by side."""
    p, c = w.problem, w.config
    pitch, elements = strides(p.filter_axes, p.extents), w.unit // w.beside
    warps, groups, lanes = c.threads // 32, c.block_n // w.beside // OCTET, 32 // OCTET
    count = w.steps * STEP // lanes * groups
    of_warp = -(-count // warps)
    together = min(of_warp, IN_FLIGHT // elements)
    with T.serial(-(-of_warp // together)) as turn:
        values = T.alloc_local((together * elements,), "uint32")
        places = []
        for k in range(together):
            number = named("number", (turn * together + k) * warps + warp)
            unit = named("unit", T.truncdiv(number, groups) * lanes + T.truncdiv(lane, OCTET))
            own = named("own", T.truncmod(number, groups) * OCTET + T.truncmod(lane, OCTET))
            channel = T.truncdiv(first, w.beside) + own
            row = named("row", T.truncdiv(unit, w.row_units))
            for i in range(elements):
                element = T.truncmod(unit, w.row_units) * w.unit - w.lead + i * w.beside
                column, of_pixel = T.truncdiv(element, w.channels), T.truncmod(element, w.channels)
                inside = (row < p.kh, element >= 0, element < p.kw * w.channels, of_pixel < w.elements)
                use = tirx.all(number < count, channel < p.co, *inside)
                place = row * pitch["kh"] + column * pitch["kw"] + T.truncdiv(of_pixel, w.beside) * pitch["ci"]
                source = tensors["flat filter"].ptr_to([T.Select(use, place + channel, 0)])
                T.buffer_store(values, _load(w.item, source, use), [k * elements + i])
            places.append((number, unit, own))
        for k, (number, unit, own) in enumerate(places):
            value = T.uint32(0)
            for i in range(w.unit):
                value = T.bitwise_or(
                    value, T.shift_left(values[k * elements + i // w.beside], T.uint32(8 * w.item * i))
                )
            for image in range(w.beside):
                target = memory.ptr_to([(at + weight_word(w, own * w.beside + image, unit)) * WORD])
                with T.If(number < count), T.Then():
                    _put(WORD, target, value)


def weight_word(w: Windows, channel: Expr, unit: Expr) -> Expr:
    """The word of a block's channel and unit of the reduction among its filters."""
    if w.channels_last:  # a lane has 2 x run neighbours
        of_run = T.truncmod(channel, OCTET * w.run)
        neighbour = T.truncmod(of_run, 2 * w.run)
        image, own = T.truncmod(neighbour, w.beside), T.truncdiv(neighbour, w.beside)
        octet = T.truncdiv(channel, OCTET * w.run) * w.run + image + T.truncdiv(own, 2) * w.beside
        row = T.truncdiv(of_run, 2 * w.run) * 2 + T.truncmod(own, 2)
    else:
        octet, row = T.truncdiv(channel, OCTET), T.truncmod(channel, OCTET)
    step, of_step = T.truncdiv(unit, STEP), T.truncmod(unit, STEP)
    half, lane = T.truncdiv(of_step, 4), row * 4 + T.truncmod(of_step, 4)
    octets, pair = w.config.block_n // OCTET, w.pair
    vector = (step * (octets // pair) + T.truncdiv(octet, pair)) * 32 + lane
    return vector * (2 * pair) + T.truncmod(octet, pair) * 2 + half
