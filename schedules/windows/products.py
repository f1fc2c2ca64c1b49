"""A warp's product: windows of its pixels, read from the patch, times its filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.tirx.types import Buffer, Expr
from schedules.tirx.values import named
from schedules.windows.geometry import ALL, OCTET, STEP, WORD, Windows

_FORMS = {
    "float16": ("float", "f", "m16n8k16.row.col.f32.f16.f16.f32"),
    "bfloat16": ("float", "f", "m16n8k16.row.col.f32.bf16.bf16.f32"),
    "int8": ("int", "r", "m16n8k32.row.col.s32.s8.s8.s32"),
}
_MULTIPLY = """
__device__ __forceinline__ void windows_mma({0}& d0, {0}& d1, {0}& d2, {0}& d3,
    unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3, unsigned int b0, unsigned int b1) {{
  asm("mma.sync.aligned.{2} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
    : "+{1}"(d0), "+{1}"(d1), "+{1}"(d2), "+{1}"(d3)
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
"""
_LOAD = {
    2: """
__device__ __forceinline__ void windows_filters_2(unsigned int& a, unsigned int& b, const void* from) {
  uint2 v = *(const uint2*)from; a = v.x; b = v.y;
}
""",
    4: """
__device__ __forceinline__ void windows_filters_4(unsigned int& a, unsigned int& b, unsigned int& c, unsigned int& d,
    const void* from) {
  uint4 v = *(const uint4*)from; a = v.x; b = v.y; c = v.z; d = v.w;
}
""",
}


@dataclass(frozen=True)
class WarpPlace:
    """A warp's part of the tile: its number along the pixels and along the channels."""

    m: Expr
    n: Expr


def pixel_of(w: Windows, warp: WarpPlace) -> tuple[Expr, Expr]:
    """(row, column) in the tile of the first pixel of a warp's first octet."""
    of_row, octets = w.config.tile_w // OCTET, w.pixel_octets
    if octets % of_row == 0:
        return warp.m * (octets // of_row), T.int32(0)
    parts = of_row // octets
    return T.truncdiv(warp.m, parts), T.truncmod(warp.m, parts) * (octets * OCTET)


def octet_at(w: Windows, octet: int) -> tuple[int, int]:
    """Rows and columns from there to the first pixel of another of its octets."""
    row, first = divmod(octet, min(w.config.tile_w // OCTET, w.pixel_octets))
    return row, first * OCTET if w.channels_last else _first(w, first)


def _first(w: Windows, octet: int) -> int:
    """Where octets that share a run of pixels begin."""
    return octet // w.run * (OCTET * w.run) + octet % w.run * 2


def lane_pixel(w: Windows, lane: Expr) -> Expr:
    """Columns from an octet's first pixel to the one whose window a lane reads."""
    row = T.truncdiv(lane, 4)
    if w.channels_last:
        return row
    return T.truncdiv(row, 2) * (2 * w.run) + T.truncmod(row, 2)


class Products:
    """The sums of a thread, 8 x 8 for two octets: the lane's two of row lane / 4 of the first side, of the second
    side's columns lane % 4 * 2 and the next."""

    def __init__(self, w: Windows, words: Buffer, memory: Buffer, filters_at: int, warp: WarpPlace, lane: Expr) -> None:
        self.w, self.words, self.memory, self.warp, self.lane = w, words, memory, warp, lane
        self.kind, self.constraint, self.form = _FORMS[w.problem.dtype]
        dtype = "int32" if self.kind == "int" else "float32"
        self.sums = self._array("sums", 2 * w.pixel_octets * w.weight_octets, dtype)
        self.windows = self._array("windows", 2 * w.pixel_octets * w.beside)
        self.weights = self._array("weights", 2 * w.weight_octets)
        self.zero = T.int32(0) if dtype == "int32" else T.float32(0)

        quad = named("quad", T.truncmod(lane, 4))
        row, column = pixel_of(w, warp)
        start = row * (w.problem.stride[0] * w.pitch) + (column + lane_pixel(w, lane)) * w.pixel_words
        self.start = named("window", start + (w.shift - w.lead) // w.unit + quad)
        # to the next row, for lanes whose unit is of the next kernel row
        further = w.problem.dilation[0] * w.pitch - w.row_units
        thresholds = {self.unit(number)[0] or 0 for number in range(2 * w.period)} - {0}
        self.further = {
            at: named(f"further_{at}", T.Select(quad >= at, T.int32(further), T.int32(0))) for at in sorted(thresholds)
        }
        self.quad = quad
        own = (warp.n * (w.weight_octets // w.pair) * 32 + lane) * (2 * w.pair)
        self.own = named("own", filters_at + own)

    @staticmethod
    def _array(name: str, count: int, dtype: str = "uint32") -> Buffer:
        array = T.alloc_local((count,), dtype)
        IRBuilder.name(name, array)
        return array

    def _mask(self, lanes: tuple[int, ...]) -> Expr:
        """The mask of a lane's word, of those of four neighbouring lanes."""
        mask = T.uint32(lanes[3])
        for lane in (2, 1, 0):
            mask = T.Select(self.quad == lane, T.uint32(lanes[lane]), mask)
        return mask

    def unit(self, number: int) -> tuple[int | None, int]:
        """Of four units of a period, number `number`: (the first lane of them whose unit is of the next kernel row, or
        0 if none is, or None if all are beyond the last), and the word of the first, from where the window starts."""
        w, unit = self.w, number * 4
        row = unit // w.row_units
        if not any(w.kept(number, False)):
            return None, 0
        last = w.periods == 1 and row == w.problem.kh - 1  # what is beyond is multiplied by zeros
        at = (row + 1) * w.row_units - unit
        word = row * w.problem.dilation[0] * w.pitch + unit - row * w.row_units
        return (0 if at >= 4 or last else at), word

    def offset(self, octet: int) -> int:
        """Words from the window of a lane's first pixel to that in another octet."""
        w = self.w
        row, column = octet_at(w, octet)
        return row * w.problem.stride[0] * w.pitch + column * w.pixel_words

    def emit(self, patch: Expr) -> None:
        """The sums of the tile whose patch starts at a word of the stages."""
        w = self.w
        with T.unroll(2 * w.pixel_octets * w.weight_octets) as i:
            T.buffer_store(self.sums, self.zero, [i])
        start = named("start", patch + self.start)
        if w.periods == 1:
            self._period(start, self.own)
            return
        with T.serial(w.periods) as turn:
            rows = w.period_rows * w.problem.dilation[0] * w.pitch
            own = self.own + turn * (w.period * STEP * w.config.block_n)
            self._period(named("rows", start + turn * rows), named("own", own), turn == w.periods - 1)

    def _masks(self, last: Expr | None, image: int) -> list[Expr | None]:
        """What is kept of a lane's word of each four units for an image; None where it is all of it."""
        w = self.w
        found: dict[Any, Expr] = {}
        masks: list[Expr | None] = []
        for number in range(2 * w.period):
            lanes = w.kept(number, False, image), w.kept(number, True, image)
            if lanes not in found and lanes != (ALL, ALL):
                mask = self._mask(lanes[0])
                if last is not None and lanes[0] != lanes[1]:
                    mask = T.Select(last, self._mask(lanes[1]), mask)
                found[lanes] = named("mask", mask)
            masks.append(found.get(lanes))
        return masks

    def _period(self, start: Expr, own: Expr, last: Expr | None = None) -> None:
        w, masks = self.w, [self._masks(last, image) for image in range(self.w.beside)]
        starts = {0: start, **{at: named("next", start + further) for at, further in self.further.items()}}
        for step in range(w.period):
            for half in range(2):
                number = 2 * step + half
                at, word = self.unit(number)
                for octet in range(w.pixel_octets):
                    value = T.uint32(0)
                    if at is not None:
                        value = self.words[starts[at] + (word + self.offset(octet))]
                    if w.beside > 1:
                        value = named("word", value)
                    for image, of_image in enumerate(masks):
                        mask = None if at is None else of_image[number]
                        of_window = value if mask is None else T.bitwise_and(value, mask)
                        T.buffer_store(self.windows, of_window, [2 * (image * w.pixel_octets + octet) + half])
            words = 2 * w.pair
            for vector in range(w.weight_octets // w.pair):
                word = own + (step * STEP * w.config.block_n + vector * 32 * words)
                targets = [self.weights[vector * words + i] for i in range(words)]
                T.evaluate(
                    T.cuda.func_call(
                        f"windows_filters_{words}",
                        *targets,
                        self.memory.ptr_to([word * WORD]),
                        source_code=_LOAD[words],
                    )
                )
            self._multiply()

    def _multiply(self) -> None:
        w = self.w
        a, b, octets = self.windows, self.weights, (w.pixel_octets, w.weight_octets)
        if not w.channels_last:
            a, b, octets = b, a, octets[::-1]
        text = _MULTIPLY.format(self.kind, self.constraint, self.form)
        for i in range(octets[0] // 2):
            for j in range(octets[1]):
                sums = [self.sums[(i * octets[1] + j) * 4 + k] for k in range(4)]
                image = j % w.beside * 2 * w.pixel_octets  # octets of channels take turns at the images
                # filters come as a fragment has them
                order = (0, 2, 1, 3) if w.channels_last else (0, 1, 2, 3)
                rows = [a[image + 4 * i + k] for k in order]
                columns = [b[2 * j + k] for k in range(2)]
                T.evaluate(T.cuda.func_call("windows_mma", *sums, *rows, *columns, source_code=text))

    def sum_of(self, pixels: int, channels: int, number: int) -> Expr:
        """One of the lane's two sums of two octets."""
        w = self.w
        first, second, count = pixels, channels, w.weight_octets
        if not w.channels_last:
            first, second, count = channels, pixels, w.pixel_octets
        return self.sums[(first // 2 * count + second) * 4 + first % 2 * 2 + number]
