"""Tiles of output pixels along image rows that are contiguous (NCHW), for TMA and for shifts along a row in registers.

TMA takes only multiples of 16 bytes along the contiguous axis, so that a kernel tap cannot shift a load along a row.
The pixels are loaded unshifted instead, once for all taps of a kernel row, and each tap's sums are shifted afterwards,
by a group of eight pixels at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from schedules.core.problem import Conv2dProblem, Pair, numpy_dtype
from schedules.hopper.pixels import Pixel, PixelTiles
from schedules.hopper.shared import LONGEST_BOX, SharedTile, Staging, TensorMap
from schedules.tirx.types import Index

GROUP = 8  # pixels in 16 bytes, and in a group of columns of wgmma's sums
RUNS = (64, 32, 16)  # pixels side by side in shared memory: rows of 128, 64 or 32 bytes


def shifts(problem: Conv2dProblem) -> tuple[int, ...]:
    """Input pixels right of an output pixel that each tap of a kernel row looks, at stride 1."""
    return tuple(rx * problem.dilation[1] - problem.pad[1] for rx in range(problem.kw))


def output_map(problem: Conv2dProblem, staging: Staging, channels: int, flat: bool = False) -> TensorMap:
    """The output (n, co, out_h, out_w) as boxes of `channels` channels and the staging's width of pixels; an image is
    one row if `flat`."""
    p, item = problem, numpy_dtype(problem.dtype).itemsize
    image = p.out_h * p.out_w * item
    h, w = (1, p.out_h * p.out_w) if flat else (p.out_h, p.out_w)
    return TensorMap(
        "output",
        p.dtype,
        (w, p.co, h, p.n),
        (image, w * item, p.co * image),
        (staging.width, channels, 1, 1),
        (1, 1, 1, 1),
        staging.swizzle,
        promotion=0,
    )


@dataclass(frozen=True)
class RowTiles:
    """Tiles of image rows, or of a part of one, `width` pixels of which are loaded and those within `margins` (left,
    right) not stored; rows of narrower images are lengthened to `width` with zeros.  Of a stride along rows one pixel
    in each `step` is stored.

    Of `flat` ones, of stride 1, rows are `width` as they lie and an image is one: runs are of several rows."""

    tiles: PixelTiles  # of what is stored
    width: int
    margins: tuple[int, int]
    run: int
    flat: bool = False

    @property
    def step(self) -> int:
        """Pixels loaded for each that is stored."""
        return self.tiles.problem.stride[1]

    def with_halo(self) -> RowTiles:
        """The same with the rows below that the kernel's further rows look at: tiles of one image, at stride 1."""
        p = self.tiles.problem
        n, h, w = self.tiles.box
        return replace(self, tiles=PixelTiles(p, (n, h + (p.kh - 1) * p.dilation[0], w)))

    @property
    def pixels(self) -> int:
        """Pixels loaded."""
        n, h, _ = self.tiles.box
        return n * h * self.width

    def cut(self, parts: int) -> bool:
        """Whether a part of a tile is some of its rows, which one TMA box brings; else it is some of the channels, and
        a box brings those of one run."""
        n, h, _ = self.tiles.box
        return self.width == self.run and not self.flat and (n % parts == 0 or (n == 1 and h % parts == 0))

    def box(self, channels: int, parts: int) -> tuple[int, int, int, int]:
        """The TMA boxes (w, channels, h, n) that fill one of `parts` parts of a tile."""
        if not self.cut(parts):
            return self.run, channels // parts, 1, 1
        n, h, _ = self.tiles.part(parts)
        return self.run, channels, h, n

    def loads(
        self, tile: SharedTile, start: Pixel, part: Index, parts: int, down: Index
    ) -> Sequence[tuple[Index, ...]]:
        """(bytes into `tile`, x, channel, y, n) of each box of part number `part` of what the outputs from `start` on
        look at, `down` rows below theirs."""
        stride = self.tiles.problem.stride[0]
        x = start[2] * self.step - self.margins[0]
        if self.cut(parts):
            n, y, _ = self.tiles.of_part(start, part, parts)
            return [(part * (tile.nbytes // parts), x, 0, y * stride + down, n)]
        channel = part * (tile.k // parts)
        boxes = []
        for slab in range(tile.rows // self.run):
            offset = slab * tile.slab + channel * tile.swizzle
            if self.flat:
                n, first = divmod(slab * self.run, self.tiles.box[1] * self.width)
                boxes.append((offset, (start[1] + down) * self.width + first, channel, 0, start[0] + n))
                continue
            row, run = divmod(slab, self.width // self.run)
            n, y = divmod(row, self.tiles.box[1])
            boxes.append((offset, x + run * self.run, channel, (start[1] + y) * stride + down, start[0] + n))
        return boxes


def late(pixels: int) -> int:
    """By how many pixels rows of `pixels` begin after a multiple of 16 bytes, at most."""
    return GROUP - math.gcd(pixels, GROUP)


def whole_rows(problem: Conv2dProblem, pixels: int) -> Pair | None:
    """The (width, run) in shared memory of image rows of which a whole number makes `pixels`; with room where they
    begin late."""
    longest = max(problem.w + late(problem.w), problem.out_w)
    lengthened = ((-(-longest // run) * run, -run) for run in RUNS)
    width, run = min(((width, run) for width, run in lengthened if pixels % width == 0), default=(0, 0))
    return (width, -run) if width else None


@lru_cache(maxsize=4096)
def row_tiles(problem: Conv2dProblem, columns: int, consumers: int, images: bool = True) -> RowTiles | None:
    """Tiles of `columns` pixels for each of as many `consumers`, of several `images` or not; None if there are none.

    Whole rows where they fit, of the images and rows that waste least at the borders; else parts of a row, which
    overlap by what taps reach over.
    """
    p = problem
    whole = whole_rows(p, columns)
    if whole:
        width, run = whole
        return _whole_rows(p, width, run, columns // width * consumers, consumers, images)
    left = GROUP if min(shifts(p)) < 0 else 0
    right = 2 * GROUP - left if left or max(shifts(p)) > 0 or late(p.w) else 0  # what is stored: whole pairs of groups
    run = next((run for run in RUNS if columns % run == 0), 0)
    if max(p.w + late(p.w), p.out_w) <= columns or consumers > 1 or not run or columns <= left + right:
        return None
    return RowTiles(PixelTiles(p, (1, 1, (columns - left - right) // p.stride[1])), columns, (left, right), run)


@lru_cache(maxsize=4096)
def flat_tiles(problem: Conv2dProblem, columns: int, consumers: int, images: bool = True) -> RowTiles | None:
    """The same of whole rows that are whole groups, as are those of the output, side by side where they fit."""
    p = problem
    if columns % p.w or p.w % GROUP or p.out_w != p.w:
        return row_tiles(p, columns, consumers, images)
    return _whole_rows(p, p.w, 0, columns // p.w * consumers, consumers, images)


def _whole_rows(p: Conv2dProblem, width: int, run: int, rows: int, consumers: int, images: bool) -> RowTiles | None:
    """Of runs of `run`, or of flat ones if that is 0."""
    best: tuple[Any, RowTiles] | None = None
    for h in (h for h in range(1 if images else rows, rows + 1) if rows % h == 0):
        n = rows // h
        if h * p.stride[0] > LONGEST_BOX or (n % consumers and (n > 1 or h % consumers)):
            continue
        each = math.gcd(h * width if images else width, width * rows // consumers)
        side_by_side = run or next((run for run in RUNS if each % run == 0), 0)
        if not side_by_side:
            continue
        tiles = RowTiles(PixelTiles(p, (n, h, width // p.stride[1])), width, (0, 0), side_by_side, flat=not run)
        key = tiles.tiles.count, -side_by_side, n
        if best is None or key < best[0]:
            best = key, tiles
    return best[1] if best else None
