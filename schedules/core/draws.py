"""Random values of a problem's fields, for `check.sweep`."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

Draw = Callable[[Random], Any]


def up_to(most: int) -> Draw:
    """Whole numbers from 1 to `most`, evenly over their logarithm: small and odd ones are as likely as large ones."""
    return lambda r: round(math.exp(r.uniform(0, math.log(most + 0.49))))


def one_of(*values: Any) -> Draw:
    """One of `values`, each as likely as often it stands there."""
    return lambda r: r.choice(values)


def pair_of(draw: Draw) -> Draw:
    """Two of `draw`."""
    return lambda r: (draw(r), draw(r))


def multiple_of(factor: Draw, number: Draw) -> Draw:
    """A number of `number` times one of `factor`."""
    return lambda r: factor(r) * number(r)


def channels(most: int) -> Draw:
    """Up to `most`; three of four are multiples of 8, 32 or 64, which most schedules want."""

    def draw(r: Random) -> int:
        step = r.choice((1, 8, 32, 64))
        return int(step * up_to(most // step)(r))

    return draw
