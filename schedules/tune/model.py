"""The cost model: gradient-boosted trees that rank candidates by how fast they were on the device.

It ranks rather than predicts times (the loss compares pairs of one problem), so that what was learned on one problem of
an operator serves the next, as in "Learning to Optimize Tensor Programs" (Chen et al., 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from schedules.core.errors import MachineError, ToolchainError
from schedules.core.operator import Array

INSTALL = "pip install 'te-schedules[tune]'"
ROUNDS = 60
PARAMETERS = {
    "objective": "rank:pairwise",
    # pairs from everywhere: those of the fastest alone (the default) teach it too little of what is slow or fails
    "lambdarank_pair_method": "mean",
    "lambdarank_num_pair_per_sample": 4,
    "max_depth": 6,
    "eta": 0.2,
    "min_child_weight": 0.1,
    "tree_method": "hist",
    "nthread": 1,  # the same result wherever it runs
    "verbosity": 0,
}


class CostModel:
    """Ranks rows of a table of features.  Raises ToolchainError if xgboost is not installed."""

    def __init__(self, seed: int) -> None:
        try:
            import xgboost
        except ModuleNotFoundError:
            raise ToolchainError(f"xgboost, the cost model, is not installed; {INSTALL}, or --search random") from None
        except Exception as error:  # what is installed and does not load finds no memory, or no file
            raise MachineError(f"xgboost, the cost model, cannot be loaded: {error}; or --search random") from error
        self._xgboost = xgboost
        self._seed = seed
        self._booster: Any = None

    @property
    def trained(self) -> bool:
        return self._booster is not None

    def train(self, table: Array, scores: Sequence[float], groups: Sequence[int]) -> None:
        """Learn that row i of `table` (row, column) has `scores[i]` (0 to 1, more is better); only rows of the same
        group are compared."""
        order = np.argsort(np.asarray(groups), kind="stable")
        # in steps, so that times within the noise of each other are no pair
        relevance = np.round(np.asarray(scores)[order] * 31)
        data = self._xgboost.DMatrix(table[order], relevance, qid=np.asarray(groups)[order])
        self._booster = self._xgboost.train({**PARAMETERS, "seed": self._seed}, data, ROUNDS)

    def rank(self, table: Array) -> Array:
        """A number for each row; more is better."""
        found: Array = self._booster.predict(self._xgboost.DMatrix(table))
        return found
