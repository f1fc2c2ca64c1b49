"""Tiles of output pixels as boxes of (n, h, w), which TMA loads and stores whole, filling and clipping at borders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from schedules.hopper.shared import LONGEST_BOX
from schedules.problem import Conv2dProblem, Pair

Box = tuple[int, int, int]


def flattened(problem: Any, batch: bool) -> Any:
    """`problem`, or the same with the pixels of an image in one row where none looks beyond itself (1x1, stride 1, no
    padding): then fewer tiles are ragged.  `batch` says that images lie one behind the other, as pixels do: then all
    of them are one row."""
    p = problem
    if (p.kh, p.kw, p.stride, p.pad) == (1, 1, (1, 1), (0, 0)):
        return replace(p, n=1, h=1, w=p.n * p.h * p.w) if batch else replace(p, h=1, w=p.h * p.w)
    return p


@dataclass(frozen=True)
class PixelTiles:
    """Output pixels of `problem` in boxes (n, h, w) of as many pixels as a block has rows."""

    problem: Conv2dProblem
    box: Box

    @property
    def counts(self) -> Box:
        """Tiles along (n, h, w)."""
        p = self.problem
        n, h, w = (-(-size // tile) for size, tile in zip((p.n, p.out_h, p.out_w), self.box, strict=True))
        return n, h, w

    @property
    def count(self) -> int:
        n, h, w = self.counts
        return n * h * w

    def part(self, parts: int) -> Box:
        """The box of one of `parts` equal parts of a tile: consecutive rows of it."""
        n, h, w = self.box
        return (n // parts, h, w) if n % parts == 0 else (n, h // parts, w)

    def start(self, tile: Any) -> tuple[Any, Any, Any]:
        """First output pixel (n, y, x) of tile number `tile`."""
        from tvm.script import tirx as T

        _, rows, columns = self.counts
        n, h, w = self.box
        return (
            T.truncdiv(tile, rows * columns) * n,
            T.truncmod(T.truncdiv(tile, columns), rows) * h,
            T.truncmod(tile, columns) * w,
        )

    def of_part(self, start: tuple[Any, Any, Any], part: Any, parts: int) -> tuple[Any, Any, Any]:
        """First pixel of part number `part`."""
        n, y, x = start
        size = self.part(parts)
        if size[0] < self.box[0]:
            return n + part * size[0], y, x
        return n, y + part * size[1], x


@lru_cache(maxsize=4096)
def pixel_tiles(problem: Conv2dProblem, rows: int, parts: tuple[int, ...]) -> PixelTiles | None:
    """The boxes of `rows` pixels that waste least at the borders; each is cut in each number of `parts`.

    Of equals the squarest, whose pixels look at the fewest others, then the one with the fewest images.  None if TMA
    reaches over none: with a stride a box spans more pixels than it loads.
    """
    best: tuple[Any, PixelTiles] | None = None
    for w in _divisors(rows):
        for h in _divisors(rows // w):
            n = rows // w // h
            reach = max(w * problem.stride[1], h * problem.stride[0], n)
            if reach > LONGEST_BOX or any(n % part and (n > 1 or h % part) for part in parts):
                continue
            tiles = PixelTiles(problem, (n, h, w))
            key = tiles.count, abs(w - h), n
            if best is None or key < best[0]:
                best = key, tiles
    return best[1] if best else None


def place_pixels(
    tiles: PixelTiles, columns: int, cluster: Pair, tile: Any, rank_pixel: Any, rank_channel: Any
) -> tuple[tuple[Any, Any, Any], Any]:
    """The first output pixel (n, y, x) and the tile along the channels of one block of the cluster at `tile`; a cluster
    is as many blocks (along the pixels, along the channels), and has `columns` places along the channels."""
    from tvm.script import tirx as T

    from schedules.hopper.program import named

    column = T.truncmod(tile, columns) * cluster[1] + rank_channel
    pixel = tiles.start(named("pixels", T.truncdiv(tile, columns) * cluster[0] + rank_pixel))
    n, y, x = (named(name, value) for name, value in zip("nyx", pixel, strict=True))
    return (n, y, x), column


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
