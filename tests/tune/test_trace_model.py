from __future__ import annotations

import math

import numpy as np
import pytest

from schedules.tune.trace_model import FAILED, WARM_UP, TraceModel, _Group

pytest.importorskip("xgboost")


def programs(count: int, seed: int = 0) -> list[np.ndarray]:
    """Programs of one to four stores."""
    rng = np.random.default_rng(seed)
    return [rng.random((1 + index % 4, 164), dtype=np.float32) for index in range(count)]


def us(program: np.ndarray) -> float:
    return float(100 * 2 ** (4 * program[:, 7].max()))


def test_it_says_nothing_before_it_is_warm() -> None:
    model = TraceModel(0)
    for program in programs(WARM_UP - 1):
        model.add("conv", program, us(program))
    assert model.scores(programs(3)) is None
    model.add("conv", programs(1)[0], 1.0)
    assert model.scores(programs(3)) is not None
    assert model.scores([]) is None


def test_it_ranks_what_it_has_not_seen() -> None:
    model = TraceModel(0)
    for program in programs(200):
        model.add("conv", program, us(program))
    unseen = programs(100, seed=1)
    scores = model.scores(unseen)
    assert scores is not None
    assert np.corrcoef(scores, [-math.log(us(program)) for program in unseen])[0, 1] > 0.8


def test_failures_rank_last_and_problems_are_scaled_by_their_best() -> None:
    group = _Group([], [10.0, 20.0, math.inf, 1e9])
    assert group.targets().tolist() == [0.0, -1.0, FAILED, -5.0]
    assert _Group([], [math.inf]).targets().tolist() == [FAILED]


def test_a_program_without_stores_is_left_out() -> None:
    model = TraceModel(0)
    model.add("conv", np.zeros((0, 164), np.float32), 1.0)
    assert model.size == 0
