"""How exact Winograd's tiles are, whatever multiplies.

Transforms of data and filter are sums of few terms; at each point then stands a sum over the channels, off by
about sqrt(CHAIN * ci + TRANSFORMS) units in the last place of float32 (2^-24), in proportion to its standard deviation
(in parts of some channels, which are added up after: the channels of a part and the parts in place of ci);
the way back adds these up, by which they grow by `definitions.winograd.gain`.  The constants are those of a model in
NumPy, rounded after each multiply-add, of tiles 2 to 6 and 16 to 512 channels; it agrees within a tenth.  A result is
held to the sum of its own absolute products, which for normal data varies as sums of so many products do, and beyond
the image's border is one of fewer.  An error is in proportion to how far the sums at a few points strayed on their
way, so that large ones are not as rare as of a normal number: of results one in 10^3 is off by 4 deviations, one in
10^4 by 5.3, one in 10^5 by 6.5.  Taken on at this pace, `error` is what results of normal data stay below but for one
in 10^9 of an image's inside and one in 10^6 of its corners.

An output has the errors of its whole tile, in proportion to the largest data and filters there: where its own products
are smaller by far, its error is a few units of what a neighbour's products add up to, not of its own.
"""

from __future__ import annotations

import math
from functools import lru_cache

from schedules.core.problem import Conv2dProblem

UNIT = 2.0**-24
CHAIN, TRANSFORMS = 0.085, 1.5  # of the square of the error of a point's sum, in units: for each channel, and beside
# of the absolute product of two normal numbers: its mean, and the square of its deviation by that of its mean
MEAN, SPREAD = 2 / math.pi, math.pi**2 / 4 - 1
# standard deviations that normal numbers stay within, and how many times as many errors do: all of an image, and the
# few of its corners
INSIDE, CORNER = (6.0, 2.0), (5.0, 1.6)


@lru_cache
def error(problem: Conv2dProblem, gain: float, length: float) -> float:
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
