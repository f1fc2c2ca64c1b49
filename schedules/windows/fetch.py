"""How a block brings a patch of the image, and its filters, into shared memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from schedules.tirx.types import Buffer, Expr, Index, Tensors
from schedules.tirx.values import kept, named
from schedules.windows.geometry import OCTET, STEP, WORD, Windows, strides

IN_FLIGHT = 40  # words that a thread loads before it stores them
REGISTERS, REGISTERS_SM = 255, 65536  # that a thread and a multiprocessor have, of GPUs with mma.sync
FILTERS_IN_FLIGHT = 96  # and of filters, elements or words, before there are sums
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
        self.values = T.alloc_local((max(1, self.round_words),), "uint32")

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
        self.begin(place, stage)
        if not self.copied:
            self.end(place, stage)

    def begin(self, place: Place, stage: Expr) -> None:
        """Begin to: what is copied comes by itself, what is `held` is loaded."""
        if not (self.copied or self.held):
            return
        pieces = self._pieces(place, stage)
        with T.serial(self.rounds) as number:
            pieces.emit(number, stored=False)
        if self.copied:
            T.evaluate(T.ptx.cp.async_.commit_group())

    def end(self, place: Place, stage: Expr) -> None:
        """Put what passes through registers where it belongs."""
        pieces = self._pieces(place, stage)
        with T.serial(self.rounds) as number:
            if not self.held:
                pieces.emit(number, stored=False)
            pieces.emit(number, stored=True)

    @property
    def held(self) -> bool:
        """Whether a patch waits in registers between `begin` and `end`, for which there is room."""
        if self.copied or self.rounds > 1:
            return False
        of_thread = min(REGISTERS, REGISTERS_SM // (self.w.config.threads * self.w.config.blocks_sm))
        return self.w.registers + self.round_words <= of_thread

    @property
    def round_words(self) -> int:
        """Words of a thread's pieces of a round that pass through registers."""
        return 0 if self.copied else self.together * self.turns(self.across)[1] * self.piece_words

    @property
    def together(self) -> int:
        """Lines of a round."""
        turns, pieces = self.turns(self.across)
        return 1 if self.copied else max(1, min(turns, IN_FLIGHT // (self.piece_words * pieces)))

    @property
    def rounds(self) -> int:
        return -(-self.turns(self.across)[0] // self.together)

    def _pieces(self, place: Place, stage: Expr) -> Pieces:
        across, count = self.across, self.turns(self.across)[1]
        line = kept("first_line", T.truncdiv(self.thread, across))
        first = kept("first_piece", T.truncmod(self.thread, across))
        base = named("patch", stage * (self.w.patch_words * WORD))
        sources = []
        for i in range(count):
            piece = first + i * across
            element, inside, offset = self.source(place, piece)
            own = [piece < self.pieces] if (i + 1) * across > self.pieces else []
            sources.append((named("element", element), named("inside", inside), named("offset", offset), own))
        return Pieces(self, place, base, line, sources)

    def _at(self, element: Expr, use: Expr) -> Expr:
        """The address of an element of the data, or of the first one where it is of no `use`."""
        return self.tensors["flat data"].ptr_to([T.Select(use, element, 0)])

    def copy(self, target: Expr, element: Expr, use: Expr) -> None:
        nbytes = self.w.vector
        text = _COPY.format(nbytes, "cg" if nbytes == 16 else "ca")
        to, source = self.memory.ptr_to([target]), self._at(element, use)
        T.evaluate(T.cuda.func_call(f"windows_copy_{nbytes}", to, source, use, source_code=text))

    @property
    def piece_words(self) -> int:
        """Registers that hold a piece."""
        w = self.w
        return w.pixels * w.elements // w.unit if w.pixels > 1 else 1

    def load(self, words: list[Expr], element: Expr, use: Expr, own: int) -> None:
        w = self.w
        if w.pixels == 1:
            T.buffer_store(self.values, _load(w.item, self._at(element, use), use), [own])
            return
        # runs of elements that follow each other: all of the piece's, or those of each channel
        run = w.pixels * w.elements if w.contiguous else w.pixels
        each = math.gcd(16 // w.item, run) // w.unit
        for first in range(0, len(words), each):
            line, of_line = divmod(first * w.unit, run)
            at = element + line * w.data["ci"] + of_line
            _load_words(words[first : first + each], self._at(at, use), use)

    def store(self, target: Expr, words: list[Expr]) -> None:
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


@dataclass
class Pieces:
    """A thread's pieces of a tile's patch, of each of its lines as many as `sources`: elements from the line's start,
    whether they are there, bytes into the line, and conditions on which the piece is the thread's."""

    fetch: PatchFetch
    place: Place
    base: Expr
    first_line: Expr
    sources: Sequence[tuple[Expr, Expr, Expr, list[Expr]]]

    def emit(self, round_: Index, stored: bool) -> None:
        """Copy or load those of the lines of round number `round_`, or have them `stored`."""
        fetch, together, words = self.fetch, self.fetch.together, 0 if self.fetch.copied else self.fetch.piece_words
        lanes = fetch.w.config.threads // fetch.across
        sure = fetch.rounds * together * lanes == fetch.lines
        for k in range(together):
            number = named("line", self.first_line + (round_ * together + k) * lanes)
            start, there, into = fetch.line(self.place, number)
            start, there, into = named("start", start), named("there", there), named("into", self.base + into)
            for i, (element, inside, offset, own) in enumerate(self.sources):
                conditions = [*own, *([] if sure else [number < fetch.lines])]
                use = named("use", tirx.all(there, inside, *conditions))
                first = (k * len(self.sources) + i) * words
                values = [fetch.values[first + j] for j in range(words)]
                with _where(conditions if stored or fetch.copied else []):
                    if stored:
                        fetch.store(into + offset, values)
                    elif fetch.copied:
                        fetch.copy(into + offset, start + element, use)
                    else:
                        fetch.load(values, start + element, use, first)


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

    A warp has neighbouring channels, its lanes neighbouring units.  A channel is a constant away from the warp's first,
    in memory and among the words, so that places are found once for all channels.
    """
    p, c = w.problem, w.config
    if p.filter_axes[-1] == "co":
        _fetch_across(w, tensors, memory, warp, lane, first, at)
        return
    channel_axis = w.channel_axis
    pitch = strides(p.filter_axes, p.extents)
    warps, units = c.threads // 32, w.steps * STEP
    whole = channel_axis == "li"  # units are words of channels in memory, as they are where channels are even
    along = p.filter_axes[-1] == "ci" and w.channels == w.elements
    whole = whole or (along and w.lead % w.unit == 0 and p.kw * p.ci % w.unit == 0)
    parts = 1 if whole else w.unit  # loads of a word
    # powers of two, whose places among the words add up
    of_warp = 1 << (-(-c.block_n // warps) - 1).bit_length()
    together = min(of_warp, 1 << (FILTERS_IN_FLIGHT // parts).bit_length() - 1)
    chunks = min(-(-units // 32), max(1, FILTERS_IN_FLIGHT // (together * parts)))
    own, dealt_out = named("own", warp * of_warp), c.block_n == of_warp * warps

    def fetch(chunk: Expr, channel: Expr) -> None:
        """`chunks` of 32 units from number `chunk` on, of `together` channels of the block from number `channel` on."""
        values = T.alloc_local((chunks * together * parts,), "uint32")
        begin = named("begin", (first + channel) * pitch["co"])
        left, of_block = named("left", p.extents["co"] - first - channel), named("of_block", c.block_n - channel)
        numbers = [named("unit", (chunk + i) * 32 + lane) for i in range(chunks)]
        for i, unit in enumerate(numbers):
            row, element = named("row", T.truncdiv(unit, w.row_units)), T.truncmod(unit, w.row_units) * w.unit - w.lead
            for part in range(parts):
                column, of_pixel = T.truncdiv(element + part, w.channels), T.truncmod(element + part, w.channels)
                inside = [row < p.kh, element + part >= 0, element + part < p.kw * w.channels, of_pixel < w.elements]
                inside = named("inside", tirx.all(*inside))
                place = row * pitch["kh"] + column * pitch["kw"] + of_pixel * pitch[channel_axis]
                place = named("place", T.Select(inside, begin + place, 0))
                for k in range(together):
                    there = inside if dealt_out and p.extents["co"] % c.block_n == 0 else tirx.all(inside, k < left)
                    source = tensors["flat filter"].ptr_to([place + k * pitch["co"]])
                    value = _load(WORD if whole else w.item, source, there)
                    T.buffer_store(values, value, [(i * together + k) * parts + part])
        begin = named("to", at + channel_word(w, channel))
        for i, unit in enumerate(numbers):
            to = named("to", begin + unit_word(w, unit))
            for k in range(together):
                held = [values[(i * together + k) * parts + part] for part in range(parts)]
                value = held[0]
                for part in range(1, parts):
                    value = T.bitwise_or(value, T.shift_left(held[part], T.uint32(8 * w.item * part)))
                conditions = [] if units % (32 * chunks) == 0 else [unit < units]
                with _where(conditions + ([] if dealt_out else [k < of_block])):
                    _put(WORD, memory.ptr_to([(to + channel_word(w, k)) * WORD]), value)

    with T.serial(-(-units // (32 * chunks))) as turn, T.serial(of_warp // together) as turn_of_channels:
        fetch(turn * chunks, own + turn_of_channels * together)


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
                word = at + channel_word(w, own * w.beside + image) + unit_word(w, unit)
                target = memory.ptr_to([word * WORD])
                with T.If(number < count), T.Then():
                    _put(WORD, target, value)


def channel_word(w: Windows, channel: Index) -> Index:
    """Words of a block's filters before those of a channel: powers of two of its bits, so that of channels without a
    bit in common they add up."""

    def split(number: Index, by: int) -> tuple[Index, Index]:
        return divmod(number, by) if isinstance(number, int) else (T.truncdiv(number, by), T.truncmod(number, by))

    if w.channels_last:  # a lane has 2 x run neighbours
        of_runs, of_run = split(channel, OCTET * w.run)
        row, neighbour = split(of_run, 2 * w.run)
        own, image = split(neighbour, w.beside)
        octet = of_runs * w.run + image + split(own, 2)[0] * w.beside
        row = row * 2 + split(own, 2)[1]
    else:
        octet, row = split(channel, OCTET)
    vector, of_vector = split(octet, w.pair)
    return (vector * 32 + row * 4) * (2 * w.pair) + of_vector * (2 if w.channels_last else 1)


def unit_word(w: Windows, unit: Expr) -> Expr:
    """And words of a channel before a unit of the reduction.  Two octets of rows of ``mma.sync`` have the first halves
    of their steps side by side, then the others; of columns an octet has both."""
    step, of_step = T.truncdiv(unit, STEP), T.truncmod(unit, STEP)
    half, vector = T.truncdiv(of_step, 4), step * (w.config.block_n // OCTET // w.pair) * 32 + T.truncmod(of_step, 4)
    return vector * (2 * w.pair) + half * (1 if w.channels_last else w.pair)
