"""How the outputs of a convolution are cut into Winograd's tiles: the fields that its configs share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement

from schedules.core.arithmetic import WINOGRAD, Arithmetic
from schedules.core.problem import Conv2dProblem
from schedules.definitions.winograd import POINTS, Split

SIZES = (6, 4, 2, 1)  # outputs of a tile
MOST = 3  # tiles of a period
CHANNELS = 4  # input channels that declared errors need


class Cut:
    """A config with the fields `tile_h` and `tile_w`: the outputs of each tile of a period, joined by "+"."""

    tile_h: str
    tile_w: str

    def splits(self, problem: Conv2dProblem) -> tuple[Split, Split]:
        """How the rows and the columns are cut."""
        p = problem
        return (
            Split(sizes(self.tile_h), p.kh, p.out_h, p.dilation[0]),
            Split(sizes(self.tile_w), p.kw, p.out_w, p.dilation[1]),
        )

    def points(self, problem: Conv2dProblem) -> int:
        """Points of the largest tile along an axis: the more, the larger the error."""
        return max(max(split.sizes) + split.taps - 1 for split in self.splits(problem))

    def arithmetic_of(self, problem: Conv2dProblem) -> Arithmetic:
        """What the results of `problem` are held to."""
        return WINOGRAD[self.points(problem)]

    def check_cut(self, problem: Conv2dProblem) -> str | None:
        """Why the tiles are illegal for `problem`, on any arch."""
        p = problem
        if p.dtype != "float32":
            return f"dtype={p.dtype}: transforms are in float32; use another schedule"
        if p.stride != (1, 1):
            return f"stride={p.stride} is not 1: tiles of outputs share no inputs; use another schedule"
        if p.ci < CHANNELS:
            return f"ci={p.ci}: sums over fewer than {CHANNELS} channels may be below their neighbours' errors"
        if p.kh * p.kw == 1:
            return "kh=kw=1 is a product already; use another schedule"
        for axis, text, taps, pad, dilation in zip(
            "hw", (self.tile_h, self.tile_w), (p.kh, p.kw), p.pad, p.dilation, strict=True
        ):
            tiles = sizes(text)
            if not 1 <= len(tiles) <= MOST or not set(tiles) <= set(SIZES):
                return f"tile_{axis}={text} is not one to {MOST} of {', '.join(map(str, sorted(SIZES)))}, joined by +"
            if list(tiles) != sorted(tiles, reverse=True):
                return f"tile_{axis}={text}: larger tiles come first"
            for size in tiles:
                if size + taps - 1 not in POINTS:
                    return f"tile_{axis}={text}: {size} outputs of {taps} taps take {size + taps - 1} points, not " + (
                        " or ".join(map(str, POINTS))
                    )
            if 2 * pad > dilation * (taps - 1):
                return (
                    f"pad={pad} shows more border than a window's half: outputs that see next to nothing have the "
                    f"errors of their neighbours; use another schedule"
                )
        return None


def sizes(text: str) -> tuple[int, ...]:
    """The outputs of each tile of a period; none if `text` is malformed."""
    parts = text.split("+")
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


def cuts(taps: int, out: int) -> Iterator[str]:
    """Every way to cut an axis worth trying."""
    legal = [size for size in SIZES if size + taps - 1 in POINTS]
    for count in range(1, MOST + 1):
        for tiles in combinations_with_replacement(legal, count):
            if len(set(tiles)) == 1 < count:
                continue  # so many periods of one tile
            if sum(tiles[:-1]) < out or count == 1:
                yield "+".join(map(str, tiles))
