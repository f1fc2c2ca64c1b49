from __future__ import annotations

import sys

import numpy as np
import pytest

from schedules.core.errors import ToolchainError
from schedules.tune.model import CostModel


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 5), dtype=np.float32)


def speed(table: np.ndarray) -> np.ndarray:
    return table[:, 0] * (1 - np.abs(table[:, 1] - 0.5))


def test_it_ranks_what_it_has_not_seen() -> None:
    seen, new = rows(200, 0), rows(100, 1)
    model = CostModel(0)
    assert not model.trained
    scores = speed(seen) / speed(seen).max()
    model.train(seen, list(scores), [0] * 200)
    assert model.trained
    assert np.corrcoef(model.rank(new), speed(new))[0, 1] > 0.9


def test_only_rows_of_a_group_are_compared() -> None:
    """A slow problem's best and a fast problem's best score alike; what they have in common is learned."""
    first, second = rows(100, 0), rows(100, 1)
    first[:, 4], second[:, 4] = 0, 1  # the problem
    scores = [*(speed(first) / speed(first).max()), *(speed(second) / speed(second).max())]
    model = CostModel(0)
    model.train(np.concatenate([first, second]), scores, [0] * 100 + [1] * 100)
    new = rows(100, 2)
    new[:, 4] = 1
    assert np.corrcoef(model.rank(new), speed(new))[0, 1] > 0.85


def test_failures_rank_last_and_the_seed_decides() -> None:
    table = rows(100, 0)
    scores = np.where(table[:, 2] > 0.5, 0.0, 1.0)  # half of them fail
    found = []
    for _ in range(2):
        model = CostModel(7)
        model.train(table, list(scores), [0] * 100)
        found.append(model.rank(table))
    assert (found[0] == found[1]).all()
    assert found[0][scores == 0].max() < found[0][scores == 1].min()


def test_without_xgboost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(ToolchainError, match="pip install 'te-schedules.tune.', or --search random"):
        CostModel(0)
