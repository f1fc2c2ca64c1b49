"""The auto-scheduler's cost model: XGBoost over MetaSchedule's features of a program's stores.

MetaSchedule predicts each store's part of the throughput and adds these up.  Here a program is one row: the features of
its heaviest store, and the sums and maxima over all; what is predicted is the logarithm of the time relative to the
fastest program of the same problem.  On 240 programs of a convolution on a CPU, half of them held out, its ranks agree
with the measured ones by 0.60, against 0.33 to 0.51 for sums over stores; and it trains in a second, where TVM's class,
which asks Python for its error after each of up to 10000 rounds, takes several.
Source of the features: Zheng et al., "Ansor: Generating High-Performance Tensor Programs for Deep Learning".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedules.core.errors import ToolchainError

Features = np.ndarray[Any, Any]
ROUNDS = 100
WARM_UP = 16  # programs before the model is trusted
SLOWEST = -5.0  # log2 of the relative throughput below which slow is slow
FAILED = -6.0
PARAMETERS = {"max_depth": 3, "eta": 0.1, "colsample_bynode": 0.3, "tree_method": "hist", "nthread": 1, "verbosity": 0}


def require_xgboost() -> None:
    """Raise ToolchainError unless xgboost is installed."""
    if importlib.util.find_spec("xgboost") is None:
        raise ToolchainError("xgboost is not installed; pip install 'te-schedules[tune]'")


def row(features: Features) -> Features:
    """One vector for the (stores, features) of a program."""
    heaviest = features[int(features.sum(axis=1).argmax())]
    return np.concatenate([heaviest, features.sum(axis=0), features.max(axis=0)])


@dataclass
class _Group:
    """The programs of one problem; a failed one costs infinitely much."""

    rows: list[Features] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def targets(self) -> Features:
        """log2 of the throughput relative to the best."""
        costs = np.array(self.costs)
        best = costs.min() if np.isfinite(costs).any() else 1.0
        return np.where(np.isfinite(costs), np.log2(np.maximum(best / costs, 2.0**SLOWEST)), FAILED)


class TraceModel:
    """Predicts log2 of a program's throughput relative to the fastest known of its problem."""

    def __init__(self, seed: int) -> None:
        require_xgboost()
        self._parameters = {**PARAMETERS, "seed": seed}
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
            found.rows.append(row(features))
            found.costs.append(us)

    def scores(self, programs: Sequence[Features]) -> list[float] | None:
        """The score of each program, higher for faster; None while too little is known."""
        if self.size < WARM_UP or not programs:
            return None
        import xgboost

        if self.size > self._trained * 1.1:
            self._train()
        predicted = self._booster.predict(xgboost.DMatrix(np.stack([row(program) for program in programs])))
        return [float(score) for score in predicted]

    def _train(self) -> None:
        import xgboost

        rows = np.stack([row for group in self._groups.values() for row in group.rows])
        targets = np.concatenate([group.targets() for group in self._groups.values()])
        self._booster = xgboost.train(self._parameters, xgboost.DMatrix(rows, label=targets), ROUNDS)
        self._trained = self.size
