"""How the outputs of a convolution are cut into Winograd's tiles, and how exact that is: what its configs share.

Errors.  Transforms of data and filter are sums of few terms; at each point then stands a sum over the channels, off by
about sqrt(CHAIN * ci + TRANSFORMS) units in the last place of float32 (2^-24), in proportion to its standard deviation
(in parts of some channels, which are added up after: the channels of a part and the parts in place of ci);
the way back adds these up, by which they grow by `definitions.winograd.gain`.  The constants are those of a model in
NumPy, rounded after each multiply-add, of tiles 2 to 6 and 16 to 512 channels; it agrees within a tenth.  A result is
held to the sum of its own absolute products, which for normal data varies as sums of so many products do, and beyond
the image's border is one of fewer.  An error is in proportion to how far the sums at a few points strayed on their
way, so that large ones are not as rare as of a normal number: of results one in 10^3 is off by 4 deviations, one in
10^4 by 5.3, one in 10^5 by 6.5.  Taken on at this pace, `error` is what results of normal data stay below but for one
in 10^9 of an image's inside and one in 10^6 of its corners.

What is used unasked has an error of float32's (`arithmetic.FLOAT32`) at most: then a cut is as exact as any convolution
in float32 has to be.  Other cuts are used where they are named.

An output has the errors of its whole tile, in proportion to the largest data and filters there: where its own products
are smaller by far, its error is a few units of what a neighbour's products add up to, not of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations_with_replacement, product

from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.problem import Conv2dProblem
from schedules.definitions.winograd import POINTS, Split, gain

SIZES = (6, 5, 4, 3, 2, 1)  # outputs of a tile
MOST = 3  # tiles of a period
UNIT = 2.0**-24
CHAIN, TRANSFORMS = 0.085, 1.5  # of the square of the error of a point's sum, in units: for each channel, and beside
# of the absolute product of two normal numbers: its mean, and the square of its deviation by that of its mean
MEAN, SPREAD = 2 / math.pi, math.pi**2 / 4 - 1
# standard deviations that normal numbers stay within, and how many times as many errors do: all of an image, and the
# few of its corners
INSIDE, CORNER = (6.0, 2.0), (5.0, 1.6)


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

    def arithmetic_of(self, problem: Conv2dProblem) -> Arithmetic:
        """What the results of `problem` are held to."""
        rows, columns = self.splits(problem)
        found = error(problem, rows.gain * columns.gain, chain(problem.ci, self.part_of(problem)))
        return FLOAT32 if found <= FLOAT32.error else Arithmetic("winograd", found)

    def part_of(self, problem: Conv2dProblem) -> int:
        """How many channels are summed apart, and added to the others' sums after; 0 if all are one chain."""
        raise NotImplementedError

    def check_cut(self, problem: Conv2dProblem) -> str | None:
        """Why the tiles are illegal for `problem`, on any arch."""
        p = problem
        if p.dtype != "float32":
            return f"dtype={p.dtype}: transforms are in float32; use another schedule"
        if p.stride != (1, 1):
            return f"stride={p.stride} is not 1: tiles of outputs share no inputs; use another schedule"
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
        if self.arithmetic_of(p).error == math.inf:
            return f"ci={p.ci}: sums of so few products may be below their neighbours' errors; use another schedule"
        rows, columns = self.splits(p)
        largest = rows.points * columns.points * p.n * rows.periods * columns.periods * max(p.ci, p.co)
        if largest >= 2**31:
            return f"n={p.n}: a workspace of {largest} elements passes 2^31; use another schedule"
        return None


@lru_cache
def error(problem: Conv2dProblem, gain: float, length: int) -> float:
    """What results of tiles with a `gain` may be off whose sums over the channels are as exact as one of `length`, in
    units of the sum of their absolute products; infinity where nothing is sure."""
    p = problem
    axes = zip((p.h, p.w), (p.kh, p.kw), p.pad, p.dilation, strict=True)
    seen = math.prod(_seen(*axis) / axis[1] for axis in axes)
    off, found = UNIT * math.sqrt(gain * (CHAIN * length + TRANSFORMS)), 0.0
    for share, (deviations, strayed) in ((1.0, INSIDE), (seen, CORNER)):
        products = share * p.kh * p.kw * p.ci
        if products <= SPREAD * deviations**2:
            return math.inf
        left = deviations**-2 - SPREAD / products
        found = max(found, strayed * off * math.sqrt(p.kh * p.kw * p.ci) / (MEAN * products * math.sqrt(left)))
    return found


def chain(ci: int, part: int) -> int:
    """How many additions, one after the other, an error of the sum over `ci` channels in parts of `part` is of."""
    return part + -(-ci // part) if part else ci


def _seen(extent: int, taps: int, pad: int, dilation: int) -> int:
    """The fewest taps along an axis of which an output sees a pixel: the first output's, or the last's, mirrored."""
    return sum(0 <= tap * dilation - pad < extent for tap in range(taps))


def sizes(text: str) -> tuple[int, ...]:
    """The outputs of each tile of a period; none if `text` is malformed."""
    parts = text.split("+")
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


def cuts(problem: Conv2dProblem, part: int) -> Iterator[tuple[str, str]]:
    """The ways to cut both axes worth trying whose errors, with channels in parts of `part`, are float32's: of the
    tiles up to a size along an axis those of the fewest points, equal ones and any."""
    p = problem
    axes = [_of_axis(k, out, d) for k, out, d in zip((p.kh, p.kw), (p.out_h, p.out_w), p.dilation, strict=True)]
    for (first, tile_h), (second, tile_w) in product(*axes):
        if error(p, first * second, chain(p.ci, part)) <= FLOAT32.error:
            yield tile_h, tile_w


@lru_cache
def _of_axis(taps: int, out: int, dilation: int) -> tuple[tuple[float, str], ...]:
    """(gain, tiles of a period) of an axis of `out` outputs."""
    legal = [size for size in SIZES if size + taps - 1 in POINTS and (size == 1) == (taps == 1)]
    found = {}
    for most in legal:
        for counts in (range(1, 2), range(1, MOST + 1)):
            tiles = [t for count in counts for t in combinations_with_replacement(legal, count) if t[0] == most]
            best = min(tiles, key=lambda t: _points(Split(t, taps, out, dilation)))
            found["+".join(map(str, best))] = gain(most, taps)
    return tuple((each, text) for text, each in found.items())


def _points(split: Split) -> tuple[int, int]:
    """Products of the whole axis, and those of a period."""
    return split.points * split.periods, split.points
