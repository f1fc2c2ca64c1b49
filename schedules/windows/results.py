"""From a warp's sums to the output: neighbours that a lane has are finished, packed, and stored as vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import tirx
from tvm.script import tirx as T

from schedules.core.problem import numpy_dtype
from schedules.definitions.epilogue import unrounded
from schedules.tirx.types import Expr, Tensors
from schedules.tirx.values import named, where
from schedules.tirx.words import pack_8, pack_16, read, widened
from schedules.windows.fetch import Place
from schedules.windows.geometry import OCTET, Windows, strides
from schedules.windows.products import Products, WarpPlace, octet_at, pixel_of

_STORES = {
    16: "*(uint4*)to = make_uint4(a, b, c, d);",
    8: "*(uint2*)to = make_uint2(a, b);",
    4: "*(unsigned int*)to = a;",
    2: "*(unsigned short*)to = (unsigned short)a;",
    1: "*(unsigned char*)to = (unsigned char)a;",
}
_STORE = """
__device__ __forceinline__ void windows_store_{0}(void* to, {1}) {{ {2} }}
"""


class Results:
    """The way out for the tiles of a block whose output channels begin at `first`."""

    def __init__(
        self, w: Windows, tensors: Tensors, products: Products, warp: WarpPlace, lane: Expr, first: Expr
    ) -> None:
        self.w, self.tensors, self.products = w, tensors, products
        self.out = strides(w.problem.output_axes, w.problem.extents)
        self.item = numpy_dtype(w.problem.epilogue.out_dtype).itemsize
        self.count = 2 * w.run  # neighbours of a lane
        self.row, self.quad = named("row", T.truncdiv(lane, 4)), named("left", T.truncmod(lane, 4) * self.count)
        self.first = named("channel", first + warp.n * (w.weight_octets * OCTET))
        self.top, self.column = (named(name, at) for name, at in zip(("top", "column"), pixel_of(w, warp), strict=True))

    def emit(self, place: Place) -> None:
        """Finish and store the tile at `place`."""
        if self.w.channels_last:
            self._pixels(place)
        else:
            self._channels(place)

    def _pixels(self, place: Place) -> None:
        """A lane's pixel of each octet, and there of neighbouring channels."""
        w = self.w
        groups = range(0, w.weight_octets, w.run)
        channels = [named("channel", self.first + group * OCTET + self.quad) for group in groups]
        terms = [[self._channel_terms(channel + i) for i in range(self.count)] for channel in channels]
        starts = [named("start", self._start(place, self.row) + self._of_channel(channel)) for channel in channels]
        for octet in range(w.pixel_octets):
            row, column = octet_at(w, octet)
            inside = self._inside(place, row, column + self.row)
            for group, channel, start, given in zip(groups, channels, starts, terms, strict=True):
                sums = []
                for i in range(self.count):
                    own, image = divmod(i, w.beside)
                    sums.append(self.products.sum_of(octet, group + own // 2 * w.beside + image, own % 2))
                there = w.out_channels - channel if w.out_channels % w.config.block_n else None
                self._store(start + (row * self.out["y"] + column * self.out["x"]), sums, given, inside, there)

    def _of_channel(self, channel: Expr) -> Expr:
        """Elements from a pixel's start to one of its channels."""
        if "go" not in self.out:
            return channel
        size = self.w.problem.extents["lo"]
        return T.truncdiv(channel, size) * self.out["go"] + T.truncmod(channel, size)

    def _channels(self, place: Place) -> None:
        """A lane's channel of each octet, and there of neighbouring pixels."""
        w, p = self.w, self.w.problem
        start = named("start", self._start(place, self.quad) + (self.first + self.row) * self.out["co"])
        for octet in range(w.weight_octets):
            channel = named("channel", self.first + octet * OCTET + self.row)
            given = [self._channel_terms(channel)] * self.count
            for group in range(0, w.pixel_octets, w.run):
                row, column = octet_at(w, group)
                inside = self._inside(place, row, channel=channel)
                sums = [self.products.sum_of(group + i // 2, octet, i % 2) for i in range(self.count)]
                there = p.out_w - (place.x + self.column + self.quad + column) if p.out_w % w.config.tile_w else None
                more = octet * OCTET * self.out["co"] + row * self.out["y"] + column
                self._store(start + more, sums, given, inside, there)

    def _start(self, place: Place, column: Expr) -> Expr:
        """The element, of the first channel, of the pixel so many columns after the warp's first."""
        image = place.n * (self.out["n"] if self.w.beside == 1 else 0)
        return image + (place.y + self.top) * self.out["y"] + (place.x + self.column + column) * self.out["x"]

    def _inside(self, place: Place, row: int, column: Expr | None = None, channel: Expr | None = None) -> Expr | None:
        """Whether a pixel so far from the warp's first is of the image, and there is a channel; None where all are."""
        w, p = self.w, self.w.problem
        found = [place.y + self.top + row < p.out_h] if p.out_h % w.config.tile_h else []
        if column is not None and p.out_w % w.config.tile_w:
            found.append(place.x + self.column + column < p.out_w)
        if channel is not None and w.out_channels % w.config.block_n:
            found.append(channel < w.out_channels)
        return named("inside", tirx.all(*found)) if found else None

    def _channel_terms(self, channel: Expr) -> dict[str, Expr]:
        terms = self.w.problem.epilogue.of_axis("channel")
        at = T.truncdiv(tirx.min(channel, self.w.out_channels - 1), self.w.beside)
        return {term.name: named(term.name, widened(self.tensors[term.name][at])) for term in terms}

    def _store(
        self,
        at: Expr,
        sums: Sequence[Expr],
        given: Sequence[dict[str, Expr]],
        inside: Expr | None,
        there: Expr | None,
    ) -> None:
        """Store neighbours from element `at` on, if `inside`, and of these the first `there`; None is always, and all
        of them."""
        w, e, dtype = self.w, self.w.problem.epilogue, self.w.problem.epilogue.out_dtype

        def exists(i: int) -> Expr | None:
            conditions = [each for each in (inside, None if there is None else i < there) if each is not None]
            return tirx.all(*conditions) if conditions else None

        # how far elements of the output are aligned, and how many there may be
        along = w.out_channels if w.channels_last else w.problem.out_w
        whole = math.gcd(self.count, along)
        vector = math.gcd(whole, 16 // self.item)
        values = []
        for i, (total, of_channel) in enumerate(zip(sums, given, strict=True)):
            operands = []
            for operand in e.operands:
                if operand.axis == "channel":
                    operands.append(of_channel[operand.name])
                elif operand.axis == "tensor":
                    operands.append(self.tensors[operand.name][0])
                else:
                    own = exists(i)
                    own = T.bool(True) if own is None else own
                    element = named("element", T.Select(own, at + i, 0))
                    operands.append(named(operand.name, read(self.tensors[f"flat {operand.name}"], element, own)))
            values.append(unrounded(e, total, operands))
        for i in range(0, self.count, vector):
            words = self._packed(dtype, values[i : i + vector])
            nbytes = vector * self.item
            names = "abcd"[: len(words)]
            text = _STORE.format(nbytes, ", ".join(f"unsigned int {name}" for name in names), _STORES[nbytes])
            target = self.tensors["flat output"].ptr_to([at + i])
            with where(exists(i)):
                T.evaluate(T.cuda.func_call(f"windows_store_{nbytes}", target, *words, source_code=text))

    def _packed(self, dtype: str, values: Sequence[Expr]) -> list[Expr]:
        """The words of as many neighbours, the last one filled up."""
        if self.item == 4:
            return [T.reinterpret("uint32", value) for value in values]
        each = 4 // self.item
        words = []
        for i in range(0, len(values), each):
            part = [*values[i : i + each]]
            part += [T.float32(0)] * (each - len(part))
            words.append(
                pack_8(part, self.w.problem.epilogue.saturates_below) if self.item == 1 else pack_16(dtype, *part)
            )
        return words
