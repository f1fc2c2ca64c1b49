"""What a schedule is worth beside the others, and trees that put configs in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules.core.arch import parse_arch
from schedules.core.registry import operator
from schedules.predict import trees
from scripts.fit_choice import (
    GRADES,
    ROUNDS,
    SEEDS,
    SORTED_ROUNDS,
    Rows,
    Worth,
    known,
    learned,
    mean,
    restate,
    train,
    worths,
)
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


def test_grades_are_by_the_layers_fastest() -> None:
    rows = Rows([layer(64, mma=8.0, simt=5.0, wgmma=4.0), layer(128, mma=6.0, wgmma=60.0)])
    assert rows.grades().tolist() == [0, round(GRADES * 0.6), GRADES, GRADES, 0]


def test_trees_of_order_choose_better_than_those_of_times() -> None:
    folder = Path(__file__).parents[2] / "tuning_logs" / "nvidia-h100-80gb-hbm3"
    rows = Rows([each for each in learned(known(folder)[1]) if len(each.trials) > 3][:60])
    model, times = train(rows, {}, 64), 64
    each = times + SORTED_ROUNDS * times // ROUNDS
    assert len(model.roots) == SEEDS * each
    of_times = np.concatenate([model.roots[seed * each : seed * each + times] for seed in range(SEEDS)])
    own, table = np.log(rows.total), rows.table(model.names)
    chosen = [mean(rows.regrets(own + each.predict(table))) for each in (model, replace(model, roots=of_times))]
    assert chosen[0] < chosen[1] - 0.01
    # still times, about: a correction of none in the mean
    missed = model.predict(table) - rows.target
    assert abs(float(np.mean(missed))) < 0.05 and float(np.std(missed)) < 0.5 * float(np.std(rows.target))


def test_trees_are_restated_as_they_are(tmp_path: Path) -> None:
    shipped = trees.load()
    assert shipped is not None
    layers = [layer(64 + 64 * i, mma=8.0, wgmma=4.0 + i) for i in range(8)]
    restate(shipped, layers, tmp_path / "trees.npz")
    again = trees.load(tmp_path / "trees.npz")
    assert again is not None and again.header["replayed"] != shipped.header["replayed"]
    assert {**again.header, "replayed": 0} == {**shipped.header, "replayed": 0}
    assert np.array_equal(again.threshold, shipped.threshold) and np.array_equal(again.left, shipped.left)
