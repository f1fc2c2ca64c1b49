"""MetaSchedule's cost model: XGBoost over the features of a program's stores.

A program's score is the sum of what its stores are predicted to contribute, fitted to its throughput relative to the
best of its problem.  TVM's own class asks Python for its error after each of up to 10000 rounds, which takes seconds a
batch; this one trains a fixed number of rounds.
Source: Chen et al., "Learning to Optimize Tensor Programs"; Shao et al., "Tensor Program Optimization with
Probabilistic Programs".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedules.errors import ToolchainError

Features = np.ndarray[Any, Any]
ROUNDS = 60
WARM_UP = 16  # programs before the model is trusted
PARAMETERS = {"max_depth": 8, "eta": 0.2, "gamma": 0.001, "min_child_weight": 0, "tree_method": "hist", "verbosity": 0}


def require_xgboost() -> None:
    """Raise ToolchainError unless xgboost is installed."""
    if importlib.util.find_spec("xgboost") is None:
        raise ToolchainError("xgboost is not installed; pip install 'te-schedules[tune]'")


@dataclass
class _Group:
    """The programs of one problem; a failed one costs infinitely much."""

    features: list[Features] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def throughputs(self) -> list[float]:
        best = min(self.costs)
        return [best / cost if np.isfinite(cost) else 0.0 for cost in self.costs]


class TraceModel:
    """Scores programs: 1 as fast as the fastest known, 0 as one that fails."""

    def __init__(self, seed: int, threads: int = 1) -> None:
        require_xgboost()
        self._parameters = {**PARAMETERS, "seed": seed, "nthread": threads}
        self._groups: dict[str, _Group] = {}
        self._booster: Any = None
        self._trained = 0

    @property
    def size(self) -> int:
        return sum(len(group.costs) for group in self._groups.values())

    def add(self, group: str, features: Features, us: float) -> None:
        """One more program of `group`, a problem; `us` is infinite for one that failed."""
        if len(features):
            found = self._groups.setdefault(group, _Group())
            found.features.append(features)
            found.costs.append(us)

    def scores(self, programs: Sequence[Features]) -> list[float] | None:
        """The score of each program; None while too little is known."""
        if self.size < WARM_UP or not programs:
            return None
        import xgboost

        if self._trained < self.size:
            self._train()
        rows, owners = _stacked(programs)
        predicted = self._booster.predict(xgboost.DMatrix(rows))
        return [float(score) for score in np.bincount(owners, predicted, minlength=len(programs))]

    def _train(self) -> None:
        import xgboost

        programs = [features for group in self._groups.values() for features in group.features]
        wanted = np.array([value for group in self._groups.values() for value in group.throughputs()], np.float32)
        rows, owners = _stacked(programs)
        # a fast program matters more than a slow one; one that fails still counts a little
        weights = np.maximum(wanted, 0.05)[owners]
        stores = np.bincount(owners)[owners]  # share a program's error among its stores

        def objective(predicted: Any, _: Any) -> tuple[Any, Any]:
            error = np.bincount(owners, predicted, minlength=len(programs)) - wanted
            return error[owners] * weights, weights * stores

        data = xgboost.DMatrix(rows, label=wanted[owners])
        self._booster = xgboost.train({**self._parameters, "base_score": 0.0}, data, ROUNDS, obj=objective)
        self._trained = self.size


def _stacked(programs: Sequence[Features]) -> tuple[Features, Features]:
    """All stores as rows, and which program each belongs to."""
    owners = np.repeat(np.arange(len(programs)), [len(features) for features in programs])
    return np.concatenate(list(programs)), owners
