"""Tiles of output pixels as boxes of (n, h, w), which TMA loads and stores whole, filling and clipping at borders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from schedules.core.problem import LONGEST, Conv2dProblem, Pair
from schedules.core.tvm import T, tirx
from schedules.hopper.shared import LONGEST_BOX
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

Pixel = tuple[Index, Index, Index]  # (n, y, x)


@dataclass(frozen=True)
class TilePlace:
    """A block's tile: its first output pixel (n, y, x), and its first output channel; where each of its pixels stands
    for several outputs, which."""

    pixel: Pixel
    channel: Expr
    output: int = 0


Box = tuple[int, int, int]


@lru_cache(maxsize=256)
def flattened(problem: Any, batch: bool, width: int = 1) -> Any:
    """`problem`, or the same with the pixels of an image in one row where none looks beyond itself (1x1, stride 1, no
    padding): then fewer tiles are ragged.  `batch` says that images lie one behind the other, as pixels do: then all
    of them are one row, if a coordinate reaches that far.  Tiles `width` pixels wide want rows of as many, if these
    divide an image."""
    p = problem
    if (p.kh, p.kw, p.stride, p.pad) != (1, 1, (1, 1), (0, 0)):
        return p
    if batch and (p.n_from or p.pixels <= LONGEST):
        return p.unchecked(n=1, h=1, w=p.n * (p.h * p.w))
    pixels = p.h * p.w
    if width > 1 and pixels % width == 0:
        return p.unchecked(h=pixels // width, w=width)
    return p.unchecked(h=1, w=pixels)


def whole(size: Index, tile: int) -> Index:
    """How many tiles `size` is rounded up to."""
    if isinstance(size, int):
        return -(-size // tile)
    return T.truncdiv(size + (tile - 1), tile)


@dataclass(frozen=True)
class PixelTiles:
    """Output pixels of `problem` in boxes (n, h, w) of as many pixels as a block has rows.

    Rows of a tile count w, h, n, or w, n, h if `lines_outside`: then the pixels of a line of the image are side by
    side for all images of the box.  Tiles count w, h, n, or n, w, h if `images_first`: then tiles of one place follow
    each other.
    """

    problem: Conv2dProblem
    box: Box
    lines_outside: bool = False
    images_first: bool = False

    @property
    def counts(self) -> tuple[Any, Any, Any]:
        """Tiles along (n, h, w)."""
        p = self.problem
        n, h, w = (whole(size, tile) for size, tile in zip((p.n, p.out_h, p.out_w), self.box, strict=True))
        return n, h, w

    @property
    def count(self) -> Any:
        n, h, w = self.counts
        return n * h * w

    def lengthened(self, lines: int) -> PixelTiles:
        """The same with so many more lines in a box."""
        n, h, w = self.box
        return replace(self, box=(n, h + lines, w))

    def part(self, parts: int) -> Box:
        """The box of one of `parts` equal parts of a tile: consecutive rows of it."""
        n, h, w = (size // (parts if axis == self._outermost else 1) for axis, size in enumerate(self.box))
        return n, h, w

    def has_parts(self, parts: int) -> bool:
        """Whether a tile is so many equal boxes."""
        return self.box[self._outermost] % parts == 0

    @property
    def _outermost(self) -> int:
        """The axis of the box that parts cut: images (0), lines (1), or the pixels of one line (2)."""
        n, h, _ = self.box
        if self.lines_outside:
            return int(h > 1)
        return 0 if n > 1 else 1 if h > 1 else 2

    def start(self, tile: Expr) -> Pixel:
        """First output pixel (n, y, x) of tile number `tile`."""
        images, rows, columns = self.counts
        n, h, w = self.box
        if images == rows == 1 and not isinstance(columns, int):  # spare the division
            return 0, 0, tile * w
        if self.images_first:
            place = T.truncdiv(tile, images)
            return T.truncmod(tile, images) * n, T.truncdiv(place, columns) * h, T.truncmod(place, columns) * w
        return (
            T.truncdiv(tile, rows * columns) * n,
            T.truncmod(T.truncdiv(tile, columns), rows) * h,
            T.truncmod(tile, columns) * w,
        )

    def of_part(self, start: Pixel, part: Index, parts: int) -> Pixel:
        """First pixel of part number `part`."""
        size, axis = self.part(parts), self._outermost
        n, y, x = (first + part * size[axis] if axis == at else first for at, first in enumerate(start))
        return n, y, x

    def pixel(self, start: Pixel, row: Expr) -> Pixel:
        """Pixel number `row` of a tile, or of a part of it, whose first is `start`."""
        n, h, w = self.box
        outer, inner = T.truncdiv(row, w), T.truncmod(row, w)
        if self.lines_outside:
            return start[0] + T.truncmod(outer, n), start[1] + T.truncdiv(outer, n), start[2] + inner
        return start[0] + T.truncdiv(outer, h), start[1] + T.truncmod(outer, h), start[2] + inner


def is_output(problem: Conv2dProblem, pixel: Pixel) -> Expr:
    """Whether the output has that pixel, of which no number is negative."""
    n, y, x = pixel
    return tirx.all(n < problem.n, y < problem.out_h, x < problem.out_w)


def squarest(box: Box) -> tuple[int, ...]:
    """Its pixels look at the fewest others; then fewest images."""
    n, h, w = box
    return abs(w - h), n


def highest(box: Box) -> tuple[int, ...]:
    """Its lines have the most in common with the next tap's; then fewest images."""
    n, h, _ = box
    return -h, n


def most_images(box: Box) -> tuple[int, ...]:
    """Its pixels have the most of the padding in common."""
    return (-box[0],)


@lru_cache(maxsize=4096)
def pixel_tiles(
    problem: Conv2dProblem,
    rows: int,
    parts: tuple[int, ...],
    width: int | None = None,
    line: int = 1,
    prefer: Callable[[Box], tuple[int, ...]] = squarest,
    lines_outside: bool = False,
    alone: bool = False,
) -> PixelTiles | None:
    """The boxes of `rows` pixels that waste least at the borders, `width` wide if given; each is cut in each number of
    `parts`, has a multiple of `line` pixels in a line of all its images, and is of one image if `alone`.

    Of equals those that waste least with the fewest images of a range, then that for which `prefer` is least.  None if
    TMA reaches over none: with a stride a box spans more pixels than it loads.
    """
    found: dict[tuple[int, int], list[PixelTiles]] = {}
    for w in [width] if width else _divisors(rows):
        for h in _divisors(rows // w):
            n = rows // w // h
            reach = max(w * problem.stride[1], h * problem.stride[0], n)
            tiles = PixelTiles(problem, (n, h, w), lines_outside)
            if n * w % line or (alone and n > 1) or reach > LONGEST_BOX or not all(map(tiles.has_parts, parts)):
                continue
            fewest = replace(tiles, problem=problem.unchecked(n=problem.n_from)).count if problem.n_from else 0
            found.setdefault((tiles.count, fewest), []).append(tiles)
    equals = found[min(found)] if found else []
    return min(equals, key=lambda tiles: prefer(tiles.box)) if len(equals) > 1 else next(iter(equals), None)


def taps_inside(
    name: str, at: Expr, extent: int, size: int, k: int, pad: int, stride: int, dilation: int
) -> tuple[Index, Index]:
    """First and last (exclusive) tap along an axis that lies in the image, of `size`, for any of the `extent` outputs
    from `at`; where none does, one in the padding, which gives the zeros."""

    if pad == 0:
        return 0, k

    def tap_at(pixel: Expr) -> Expr:
        """The first tap at `pixel` of the image or after it, counted from the first tap of the first output."""
        return tirx.min(k, tirx.truncdiv(tirx.max(0, pixel + dilation - 1), dilation))

    before = pad - at * stride  # pixels of padding before the image, seen from the first tap
    first = named(f"first_{name}", tirx.min(tap_at(before - (extent - 1) * stride), k - 1))
    return first, named(f"last_{name}", tirx.max(tap_at(before + size), first + 1))


def mean_taps_inside(count: int, extent: int, size: int, k: int, pad: int, stride: int, dilation: int) -> float:
    """How many taps `taps_inside` leaves, on average over `count` places `extent` outputs apart."""
    total = 0
    for place in range(count):
        before = pad - place * extent * stride
        first = min(k - 1, max(0, before - (extent - 1) * stride + dilation - 1) // dilation)
        last = min(k, max(0, before + size + dilation - 1) // dilation)
        total += max(last - first, 1)
    return total / count


def place_pixels(
    tiles: PixelTiles, columns: int, cluster: Pair, tile: Expr, rank_pixel: Index, rank_channel: Index
) -> tuple[Pixel, Expr]:
    """The first output pixel (n, y, x) and the tile along the channels of one block of the cluster at `tile`; a cluster
    is as many blocks (along the pixels, along the channels), and has `columns` places along the channels."""
    column = T.truncmod(tile, columns) * cluster[1] + rank_channel
    pixel = tiles.start(named("pixels", T.truncdiv(tile, columns) * cluster[0] + rank_pixel))
    n, y, x = (named(name, value) for name, value in zip("nyx", pixel, strict=True))
    return (n, y, x), column


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
