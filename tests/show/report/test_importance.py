from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from schedules.core.arch import Arch
from schedules.core.errors import ToolchainError
from schedules.core.registry import operator
from schedules.measure.records import Record
from schedules.show.report.importance import FEWEST, importances, permutation
from tests.fake import record_of
from tests.show.report.conftest import CONV, SEARCH

pytestmark = pytest.mark.usefixtures("model")


@pytest.fixture(scope="module")
def trials(host: Arch) -> list[Record]:
    """As many configs as a model needs, all of the same time."""
    spec = operator("conv2d_hwcn").schedule("cpu")
    configs = list(itertools.islice(spec.legal_space(CONV, host), 0, None, 5))[: 2 * FEWEST]
    assert len({str(config) for config in configs}) == 2 * FEWEST
    return [record_of(CONV, 10.0, config.to_json(), search=SEARCH) for config in configs]


def timed(trials: list[Record], times: np.ndarray) -> list[Record]:
    from dataclasses import replace

    return [
        replace(trial, median_us=float(us), p10_us=float(us), p90_us=float(us))
        for trial, us in zip(trials, times, strict=True)
    ]


def test_the_field_that_times_hang_on_is_found(trials: list[Record]) -> None:
    field = varied(trials)
    values = [getattr(trial.config, field) for trial in trials]
    ranks = {value: rank for rank, value in enumerate(sorted(set(values), key=str))}
    noise = np.random.default_rng(1).normal(1.0, 0.02, len(trials))
    (found,) = importances(timed(trials, noise * np.array([10.0 * 2 ** ranks[value] for value in values])))
    assert found.schedule == "cpu" and found.trials == len(trials)
    assert found.r2 > 0.8 and found.fields[0][0] == field
    assert found.fields[0][1] > 3 * max([loss for _, loss in found.fields[1:]], default=0.0)


def varied(trials: list[Record]) -> str:
    """The field with the most values."""
    counts = {name: len({str(trial.config.to_json()[name]) for trial in trials}) for name in trials[0].config.to_json()}
    return max(counts, key=lambda name: counts[name])


def test_noise_says_nothing(trials: list[Record]) -> None:
    (found,) = importances(timed(trials, np.random.default_rng(2).uniform(10.0, 20.0, len(trials))))
    assert found.r2 < 0.2 and found.fields == ()


def test_too_little_says_nothing(trials: list[Record]) -> None:
    few = timed(trials[: FEWEST - 1], np.arange(1.0, FEWEST))
    assert importances(few) == [] and importances([*few, *few]) == []  # the same config again is no more
    assert importances(trials) == []  # all of one time
    assert importances([record_of(CONV, None, search=SEARCH)] * FEWEST) == []
    from dataclasses import replace

    assert importances([replace(trial, stage="final") for trial in trials]) == []


def test_columns_of_a_field_are_shuffled_together() -> None:
    random = np.random.default_rng(3)
    one = random.integers(0, 4, 200)
    table = np.stack([one, one, random.integers(0, 4, 200)], axis=1).astype(np.float32)
    r2, losses = permutation(table, one.astype(float), {"twice": [0, 1], "noise": [2]})
    assert r2 > 0.95 and losses["twice"] > 1.0 and abs(losses["noise"]) < 0.05


def test_without_xgboost(trials: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(ToolchainError, match="pip install"):
        importances(timed(trials, np.arange(1.0, len(trials) + 1)))
