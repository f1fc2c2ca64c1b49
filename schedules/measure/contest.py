"""Which of several kernels is the fastest: they are timed in turn, in rounds, until that is known or time is up.

Each round is drawn in an order of its own.  Two kernels that are equal then come out one way as often as the other,
whatever the machine does meanwhile (slow phases, bursts, drift), so counting rounds is exact under any noise: the
interval of a ratio runs between two order statistics of the rounds' ratios (the sign test; Conover, "Practical
Nonparametric Statistics", section 3.4).  Looks at the data are few, and share one level, so that looking again does not
make a chance difference likely (a union bound over looks, as in Howard and Ramdas, "Sequential estimation of
quantiles", Bernoulli 28, 2022).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.05  # of contests among equals that end with a winner, at most
NEAR = 0.01  # a difference that is not worth more rounds, as a fraction
FIRST = 12  # rounds before the first look; there are twice as many before each other
LOOKS = 8  # at most


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one kernel is as another, and what that lies between: 0 and infinite if nothing is known
    yet."""

    value: float
    low: float
    high: float

    @property
    def ahead(self) -> bool:
        return self.low > 1


@dataclass(frozen=True)
class Contest:
    """What the rounds showed so far.  For each kernel `calls`, the microseconds of all its calls, and `scores`, one
    number for each round until it was dropped.  `error` is the chance that an interval lies above the truth, or
    below."""

    calls: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    holder: int
    error: float

    @property
    def rounds(self) -> int:
        return len(self.scores[self.holder])

    def ratio(self, one: int, other: int) -> Ratio:
        """How many times as fast `one` is as `other`, over the rounds that both took part in."""
        rounds = min(len(self.scores[one]), len(self.scores[other]))
        ratios = np.sort(np.array(self.scores[other][:rounds]) / np.array(self.scores[one][:rounds]))
        left = left_out(rounds, self.error)
        low, high = (ratios[left], ratios[-1 - left]) if left is not None else (0.0, math.inf)
        middle = (ratios[(rounds - 1) // 2] + ratios[rounds // 2]) / 2
        return Ratio(float(middle), float(low), float(high))

    @property
    def winner(self) -> int:
        """The fastest of those that are ahead of the holder for sure; without one the holder."""
        found = {index: self.ratio(index, self.holder) for index in range(len(self.scores)) if index != self.holder}
        ahead = [index for index, ratio in found.items() if ratio.ahead]
        return max(ahead, key=lambda index: found[index].value, default=self.holder)


def hold(
    turn: Callable[[int], Sequence[float]],
    count: int,
    *,
    holder: int,
    kept: Collection[int] = (),
    percentile: float = 50,
    seconds: float,
    longest: float,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Contest:
    """Time `count` kernels in turn: `turn` gives the microseconds of a few calls of one, whose `percentile` is its
    score.

    The `holder` is what the others must be ahead of.  It and those `kept` are in every round; others are dropped once
    they are behind the leader for sure.  Ends when no other can be faster than the winner by more than NEAR, after
    `seconds` if that is enough for a first look, or after `longest`.
    """
    draw = random.Random(seed)
    error = LEVEL / LOOKS / max(1, count - 1)
    calls: list[list[float]] = [[] for _ in range(count)]
    scores: list[list[float]] = [[] for _ in range(count)]
    running, start, looks = list(range(count)), clock(), 0
    while True:
        for index in draw.sample(running, len(running)):
            times = turn(index)
            calls[index] += times
            scores[index].append(percentile_of(times, percentile))
        spent = clock() - start
        if len(scores[holder]) < FIRST * 2**looks and spent < (seconds if looks else longest):
            continue
        looks += 1
        found = Contest(tuple(map(tuple, calls)), tuple(map(tuple, scores)), holder, error)
        leader = max(running, key=lambda index: found.ratio(index, holder).value)
        running = [i for i in running if i in (holder, *kept) or found.ratio(i, leader).high >= 1]
        winner = found.winner
        others = [index for index in running if index != winner and (index == holder or index not in kept)]
        known = all(found.ratio(index, winner).high <= 1 + NEAR for index in others)
        if known or looks == LOOKS or spent >= min(seconds, longest):
            return found


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """As NumPy's, for a few values in a fraction of its time."""
    ordered, place = sorted(values), percentile / 100 * (len(values) - 1)
    below = int(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])


@lru_cache(maxsize=1024)
def left_out(count: int, error: float) -> int | None:
    """How many of `count` ordered values are left out at each end of an interval that lies above their true median
    with a chance of `error` at most, and below it likewise; None if they are too few for one."""
    most = int(error * 2.0**60) << count >> 60
    below, ways = 0, 1
    for left in range(count // 2 + 1):
        below += ways  # of 2^count outcomes, those with at most `left` values below the median
        if below > most:
            return left - 1 if left else None
        ways = ways * (count - left) // (left + 1)
    return count // 2
