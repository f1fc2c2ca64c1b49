"""Contests on a machine that is made up, so that the truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from schedules.measure.contest import FIRST, LEVEL, LOOKS, NEAR, Contest, hold, left_out, percentile_of

PERIOD = 1000  # turns after which a machine's noise repeats


class Machine:
    """Kernels of `us`, timed amid slow phases that last for some turns, drift, and delays with heavy tails; each turn
    takes a second of its clock.  With `quiet` there is no noise at all."""

    def __init__(self, us: Sequence[float], seed: int, quiet: bool = False) -> None:
        self.us, self.quiet, self.turns = us, quiet, 0
        self.drawn: list[int] = []
        draw, shape = np.random.default_rng(seed), (PERIOD, 3)
        phase = np.repeat(draw.choice((1.0, 1.3, 1.9), PERIOD // 20), 20)
        delayed = 1 + 5 * (draw.random(shape) < 0.2) * draw.pareto(1.0, shape)
        drift = np.linspace(0, 0.1, PERIOD)
        noise = np.exp(drift + 0.1 * draw.standard_normal(shape).T).T
        self._factors = (phase[:, None] * noise * delayed).tolist()

    def turn(self, index: int) -> list[float]:
        self.turns += 1
        self.drawn.append(index)
        factors = [1.0] * 3 if self.quiet else self._factors[self.turns % PERIOD]
        return [self.us[index] * factor for factor in factors]


def contest(us: Sequence[float], seed: int = 0, quiet: bool = False, turns: float = 400, **options: object) -> Contest:
    machine = Machine(us, seed, quiet)
    words: dict[str, object] = dict(holder=0, percentile=10, seconds=turns, longest=1e9, seed=seed)
    return hold(machine.turn, len(us), clock=lambda: machine.turns, **(words | options))  # type: ignore[arg-type]


def test_equals_are_seldom_told_apart() -> None:
    """At most LEVEL of the contests; the sign test and the bound over looks leave it well below."""
    wrong = sum(contest([60.0] * 5, seed, turns=200).winner != 0 for seed in range(40))
    assert wrong <= 40 * LEVEL


@pytest.mark.slow
def test_a_thousand_contests() -> None:
    """Between equals, and with one that is a tenth faster than its holder: how often it wins and what is claimed."""
    wrong = sum(contest([60.0] * 3, seed, turns=150).winner != 0 for seed in range(1000))
    assert wrong <= 1000 * LEVEL
    found = [contest([60.0, 61.0, 55.0, 63.0], seed) for seed in range(100)]
    assert np.mean([each.winner == 2 for each in found]) > 0.95
    held = [ratio.low <= 60 / 55 <= ratio.high for ratio in (each.ratio(2, 0) for each in found)]
    assert np.mean(held) >= 1 - LEVEL


def test_the_fastest_is_found_and_its_lead_is_not_overstated() -> None:
    found = [contest([60.0, 61.0, 52.0, 63.0, 90.0], seed, turns=250) for seed in range(12)]
    assert sum(each.winner == 2 for each in found) >= 11
    for each in found:
        ratio = each.ratio(2, 0)
        assert ratio.low < ratio.value < ratio.high and 1.05 < ratio.value < 1.3
    assert sum(r.low <= 60 / 52 <= r.high for r in (each.ratio(2, 0) for each in found)) >= 11


def test_what_is_behind_for_sure_is_dropped_and_what_is_kept_is_not() -> None:
    found = contest([60.0, 120.0, 120.0, 59.0], kept=(2,), turns=600)
    rounds = [len(scores) for scores in found.scores]
    assert rounds[1] == FIRST < found.rounds and rounds[0] == rounds[2] == rounds[3] == found.rounds


def test_a_quiet_machine_needs_one_look() -> None:
    assert contest([60.0, 59.0, 61.0], quiet=True).rounds == FIRST
    assert contest([60.0, 59.0, 61.0], quiet=True).winner == 1
    assert contest([60.0, 60.0], quiet=True).winner == 0  # no difference, and no more than NEAR is possible
    assert contest([60.0, 60.0], quiet=True).rounds == FIRST
    assert contest([60.0], quiet=True).winner == 0
    assert contest([60.0, 60.0 / (1 + NEAR / 2)], quiet=True).winner == 1


def test_it_ends() -> None:
    """By the clock, at the last look, and if there was no time for even one."""
    assert 100 <= sum(len(scores) for scores in contest([60.0] * 4, turns=100).scores) <= 104
    draw = random.Random(0)
    everlasting = hold(lambda index: [draw.uniform(60, 120)], 2, holder=0, seconds=1e9, longest=1e9)
    assert everlasting.rounds == FIRST * 2 ** (LOOKS - 1) and everlasting.winner == 0
    hasty = contest([60.0, 30.0], longest=6.0)
    assert hasty.rounds == 3 and hasty.winner == 0 and hasty.ratio(1, 0).low == 0
    assert hasty.ratio(1, 0).high == float("inf")


def test_rounds_have_an_order_of_their_own() -> None:
    machine = Machine([60.0] * 4, 0)
    hold(machine.turn, 4, holder=0, seconds=0, longest=1e9, seed=3, clock=lambda: machine.turns)
    orders = [tuple(machine.drawn[i : i + 4]) for i in range(0, 4 * FIRST, 4)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders) and len(set(orders)) > FIRST // 2


@pytest.mark.parametrize(("count", "error"), [(12, 0.01), (12, 0.0006), (100, 0.025), (1536, 0.0006)])
def test_the_interval_is_that_of_the_sign_test(count: int, error: float) -> None:
    def at_most(below: int) -> float:
        return sum(math.comb(count, number) for number in range(below + 1)) / 2**count

    left = left_out(count, error)
    assert left is not None and at_most(left) <= error < at_most(left + 1)


def test_too_few_rounds_have_no_interval() -> None:
    assert left_out(5, 0.01) is None


@pytest.mark.parametrize("percentile", [0, 10, 50, 100])
def test_percentiles(percentile: int) -> None:
    compared: Callable[[Sequence[float], float], object] = np.percentile
    for values in ([3.0], [2.0, 1.0], [5.0, 1.0, 2.0, 9.0]):
        assert percentile_of(values, percentile) == pytest.approx(compared(values, percentile))
