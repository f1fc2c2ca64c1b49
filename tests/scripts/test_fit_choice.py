"""What a schedule is worth beside the others."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import parse_arch
from schedules.core.registry import operator
from scripts.fit_choice import Worth, worths
from scripts.trials import Layer


def layer(ci: int, **us: float) -> Layer:
    """A 1x1 layer with these times of schedules, whatever their configs."""
    op = operator("conv2d_nhwc")
    problem: Any = op.problem(n=8, h=14, w=14, ci=ci, co=64, kh=1, kw=1, dtype="float16")
    trials = tuple((name, op.schedule(name).config(), time) for name, time in us.items())
    return Layer(op, problem, "made up", None, trials, parse_arch("cuda:sm_90a"))


def test_a_schedule_is_worth_what_others_take_longer() -> None:
    layers = [layer(64, mma=8.0, wgmma=4.0), layer(128, mma=6.0, wgmma=6.0), layer(256, mma=5.0)]
    mma, wgmma = worths(layers)
    assert mma == Worth("conv2d_nhwc float16", "mma", 0, 2, 1.0, 1.0)
    assert (wgmma.schedule, wgmma.best, wgmma.layers, wgmma.worst) == ("wgmma", 1, 2, 2.0)
    assert wgmma.mean == pytest.approx(2**0.5)


def test_the_fastest_trial_of_a_schedule_counts() -> None:
    twice = layer(64, mma=8.0, wgmma=4.0)
    (mma, _) = worths([Layer(**vars(twice) | {"trials": (*twice.trials, (*twice.trials[0][:2], 2.0))})])
    assert (mma.best, mma.worst) == (1, 2.0)
