"""Tiles of images and output pixels as boxes (n, h, w), for products whose one side is the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from schedules.core.tvm import T
from schedules.hopper.pixels import Box
from schedules.hopper.shared import LONGEST_BOX
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, inside_window
from schedules.tirx.types import Index

if TYPE_CHECKING:
    Pixel = tuple[Index, Index, Index]  # (n, y, x)

STEP = 16  # images in the shortest run that wgmma reads side by side
LONGEST_RUN = 64  # and in the longest
UNIT = 8  # elements of 16 bytes, which are stored at once at most
# TMA takes as long for a short line as for a long one: about what a tile of lines of as many images costs beside others
SHORT_LINES = {16: 1.2, 32: 1.03, 64: 1.0}


@dataclass(frozen=True)
class ImageTiles:
    """Output elements of one channel of `problem` in boxes (n, h, w).

    Places of a tile count `run` images side by side, then w, h, and runs of images.  The blocks of a cluster that have
    boxes of their own lie side by side as `spread` says; each has as many boxes as `lines`, one below the other.
    """

    problem: HwcnProblem
    box: Box
    run: int
    spread: Box = (1, 1, 1)
    lines: int = 1

    @property
    def places(self) -> int:
        """Of a tile that stand for an image and a pixel; those behind stand for nothing."""
        return math.prod(self.box)

    @property
    def runs(self) -> int:
        return self.box[0] // self.run

    @property
    def extents(self) -> Box:
        """Of all boxes of a block."""
        n, h, w = self.box
        return n, h * self.lines, w

    @property
    def reach(self) -> Box:
        """The box of a cluster."""
        n, h, w = (extent * count for extent, count in zip(self.extents, self.spread, strict=True))
        return n, h, w

    @property
    def counts(self) -> Box:
        """Boxes of clusters along (n, h, w)."""
        p = self.problem
        n, h, w = (-(-size // reach) for size, reach in zip((p.n, p.out_h, p.out_w), self.reach, strict=True))
        return n, h, w

    @property
    def inside(self) -> tuple[int, int, int, int] | None:
        """(first row, rows, first column, columns) of the clusters whose boxes see no padding; None if all or none
        do."""
        window, found = inside_window(self.problem), tuple[int, ...]()
        if window is None:
            return None
        for first, extent, reach in ((*window[:2], self.reach[1]), (*window[2:], self.reach[2])):
            begin = -(-first // reach)
            found += (begin, max(0, (first + extent) // reach - begin))
        return (found[0], found[1], found[2], found[3]) if found[1] * found[3] else None

    def part(self, parts: int) -> Box:
        """The box of one of `parts` equal parts: consecutive places."""
        n, h, w = self.box
        if self.runs > 1:
            return n // parts, h, w
        if h > 1:
            return n, h // parts, w
        return (n, h, w // parts) if w > 1 else (n // parts, h, w)

    def has_parts(self, parts: int, line: int) -> bool:
        """Whether a tile is so many equal boxes, of several each a multiple of `line` places; with 0 they end with
        runs."""
        n, h, w = self.box
        cut = self.runs if self.runs > 1 else h if h > 1 else w if w > 1 else n if line else 1
        return parts == 1 or (cut % parts == 0 and self.places // parts % (line or 1) == 0)

    def at(self, place: Index) -> Pixel:
        """Image, row and column of place number `place`, counted from the box's first."""

        def divided(number: Index, by: int) -> tuple[Index, Index]:
            if isinstance(number, int):
                return divmod(number, by)
            return T.truncdiv(number, by), T.truncmod(number, by)

        _, h, w = self.box
        outer, image = divided(place, self.run)
        outer, x = divided(outer, w)
        run, y = divided(outer, h)
        return run * self.run + image, y, x


@lru_cache(maxsize=4096)
def image_tiles(
    problem: HwcnProblem,
    places: int,
    blocks: int,
    parts: int,
    turned: bool,
    line: int = 0,
    columns: int = 0,
    narrow: bool = False,
    lines: int = 1,
) -> ImageTiles | None:
    """The boxes of `places` that waste least at the ends, each cut in `parts` that TMA brings, for clusters of `blocks`
    side by side; None if there are none.

    A box has all the places, in runs of images of 32, 64 or 128 bytes, or of any number of images, and may leave some
    places out, if `turned`.  With `columns`, of all images so many columns, which may reach beyond the places of one
    pixel.  Of equals the one with fewest pixels, whose padding is left out most often.  With `narrow` pixels side by
    side are never of one cluster.  Where a block has several `lines`, a box is of one.
    """
    best: tuple[tuple[float, int, int], ImageTiles] | None = None
    sizes = problem.n, problem.out_h, problem.out_w
    if turned:
        found = _whole(problem, places)
    else:
        found = _columns(problem, places, columns) if columns else _runs(problem, places)
    for box, run in found:
        if max(box[0] if turned else run, box[1] * problem.stride[0], box[2] * problem.stride[1]) > LONGEST_BOX:
            continue
        if lines > 1 and box[1] > 1:
            continue
        for spread in {(blocks, 1, 1): 0, (1, 1, blocks): 0, (1, blocks, 1): 0}:
            if narrow and box[2] * spread[2] > 1:
                continue
            cost = 1 + 1 / run if turned else SHORT_LINES[run]  # results of few images are stored in short pieces
            tiles = ImageTiles(problem, box, run, spread, lines)
            for size, reach in zip(sizes, tiles.reach, strict=True):
                cost *= -(-size // reach)
            key = cost, box[1] * box[2], abs(box[1] - box[2])
            if (best is None or key < best[0]) and tiles.has_parts(parts, line):
                best = key, tiles
    return best[1] if best else None


def _runs(problem: HwcnProblem, places: int, columns: int = 0) -> Iterator[tuple[Box, int]]:
    """Boxes of all `places`, and the images of a run; no more images than the batch, or than `columns`, has."""
    for n in range(STEP, min(places, -(-max(problem.n, columns) // STEP) * STEP) + 1, STEP):
        if places % n == 0:
            pixels = places // n
            for w in range(1, pixels + 1):
                if pixels % w == 0:
                    yield (n, pixels // w, w), math.gcd(n, LONGEST_RUN)


def _columns(problem: HwcnProblem, places: int, columns: int) -> Iterator[tuple[Box, int]]:
    """Boxes of all images, of `columns` at least, and the columns of a run."""
    if places >= columns:
        yield (-(-places // LONGEST_RUN) * LONGEST_RUN, 1, 1), LONGEST_RUN
    for box, run in _runs(problem, places, -(-columns // LONGEST_RUN) * LONGEST_RUN):
        if box[0] >= columns and box[1] * box[2] > 1:
            yield box, run


def _whole(problem: HwcnProblem, places: int) -> Iterator[tuple[Box, int]]:
    """Boxes of up to `places`, of which all images are a run."""
    p, unit = problem, math.gcd(problem.n, UNIT)
    most = -(-p.n // STEP)
    for n in sorted({-(-p.n // parts // unit) * unit for parts in range(1, most + 1)}):
        pixels = places // n
        for w in range(1, min(p.out_w, pixels) + 1):
            if w == -(-p.out_w // -(-p.out_w // w)):  # else fewer columns make as many tiles
                yield (n, min(p.out_h, pixels // w), w), n
