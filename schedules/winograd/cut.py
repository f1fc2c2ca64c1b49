"""How the outputs of a convolution are cut into Winograd's tiles, and how exact that is: what its configs share.

Errors are those of `definitions.winograd_errors`.  What is used unasked has an error of float32's
(`arithmetic.FLOAT32`) at most: then a cut is as exact as any convolution in float32 has to be.  Other cuts are used
where they are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations_with_replacement, product

from schedules.core.arch import Arch
from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.problem import Conv2dProblem
from schedules.definitions.winograd import Split, gain, is_known
from schedules.definitions.winograd_errors import chain, error

SIZES = (6, 5, 4, 3, 2, 1)  # outputs of a tile
MOST = 3  # tiles of a period


class Cut:
    """A config with the fields `tile_h` and `tile_w`: the outputs of each tile of a period, joined by "+"."""

    tile_h: str
    tile_w: str

    def splits(self, problem: Conv2dProblem) -> tuple[Split, Split]:
        """How the rows and the columns are cut."""
        p = problem
        return (
            Split(sizes(self.tile_h), p.kh, p.out_h, p.dilation[0], p.stride[0]),
            Split(sizes(self.tile_w), p.kw, p.out_w, p.dilation[1], p.stride[1]),
        )

    def arithmetic_of(self, problem: Conv2dProblem) -> Arithmetic:
        """What the results of `problem` are held to."""
        rows, columns = self.splits(problem)
        found = error(problem, rows.gain * columns.gain, chain(problem.ci, self.part_of(problem)))
        return FLOAT32 if found <= FLOAT32.error else Arithmetic("winograd", found)

    def part_of(self, problem: Conv2dProblem) -> int:
        """How many channels are summed apart, and added to the others' sums after; 0 if all are one chain."""
        raise NotImplementedError

    @classmethod
    def unfit(cls, problem: Conv2dProblem, arch: Arch) -> str | None:
        p = problem
        if p.dtype != "float32":
            return f"dtype={p.dtype}: transforms are in float32; use another schedule"
        if any(stride > 1 and dilation > 1 for stride, dilation in zip(p.stride, p.dilation, strict=True)):
            return f"stride={p.stride} of a filter with dilation={p.dilation}; use another schedule"
        if p.kh * p.kw == 1:
            return "kh=kw=1 is a product already; use another schedule"
        return None

    def check_cut(self, problem: Conv2dProblem) -> str | None:
        """Why the tiles are illegal for `problem`, on any arch that it is not `unfit` for."""
        p = problem
        for axis, text, taps, pad, dilation, stride in zip(
            "hw", (self.tile_h, self.tile_w), (p.kh, p.kw), p.pad, p.dilation, p.stride, strict=True
        ):
            tiles = sizes(text)
            if not 1 <= len(tiles) <= MOST or not set(tiles) <= set(SIZES):
                return f"tile_{axis}={text} is not one to {MOST} of {', '.join(map(str, sorted(SIZES)))}, joined by +"
            if list(tiles) != sorted(tiles, reverse=True):
                return f"tile_{axis}={text}: larger tiles come first"
            for size in tiles:
                if not is_known(size, taps, stride):
                    return f"tile_{axis}={text}: no points are known for {size} outputs of {taps} taps"
            if 2 * pad > dilation * (taps - 1):
                return (
                    f"pad={pad} shows more border than a window's half: outputs that see next to nothing have the "
                    f"errors of their neighbours; use another schedule"
                )
        if self.arithmetic_of(p).error == math.inf:
            return f"ci={p.ci}: sums of so few products may be below their neighbours' errors; use another schedule"
        rows, columns = self.splits(p)
        largest = rows.points * columns.points * p.n * rows.periods * columns.periods * max(p.ci, p.co)
        if largest >= 2**31:
            return f"n={p.n}: a workspace of {largest} elements passes 2^31; use another schedule"
        return None


def sizes(text: str) -> tuple[int, ...]:
    """The outputs of each tile of a period; none if `text` is malformed."""
    parts = text.split("+")
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


def cuts(problem: Conv2dProblem, part: int) -> Iterator[tuple[str, str]]:
    """The ways to cut both axes worth trying whose errors, with channels in parts of `part`, are float32's: of the
    tiles up to a size along an axis those of the fewest points, equal ones and any."""
    p = problem
    sides = zip((p.kh, p.kw), (p.out_h, p.out_w), p.dilation, p.stride, strict=True)
    axes = [_of_axis(*side) for side in sides]
    for (first, tile_h), (second, tile_w) in product(*axes):
        if error(p, first * second, chain(p.ci, part)) <= FLOAT32.error:
            yield tile_h, tile_w


@lru_cache
def _of_axis(taps: int, out: int, dilation: int, stride: int) -> tuple[tuple[float, str], ...]:
    """(gain, tiles of a period) of an axis of `out` outputs."""
    legal = [size for size in SIZES if is_known(size, taps, stride) and (size == 1) == (taps == 1)]
    found = {}
    for most in legal:
        for counts in (range(1, 2), range(1, MOST + 1)):
            tiles = [t for count in counts for t in combinations_with_replacement(legal, count) if t[0] == most]
            best = min(tiles, key=lambda t: _points(Split(t, taps, out, dilation, stride)))
            found["+".join(map(str, best))] = gain(most, taps, stride)
    return tuple((each, text) for text, each in found.items())


def _points(split: Split) -> tuple[int, int]:
    """Products of the whole axis, and those of a period."""
    return split.points * split.periods, split.points
