"""Which fields of a config the times of a search hang on.

For one schedule and one problem, boosted trees learn the logarithm of the time from the config's fields; the trials are
split into folds, and each is told by trees that have not seen it.  A field's importance is how much of the fit is lost
when its values are shuffled among the trials of a held-out fold (permutation importance: Breiman, "Random Forests",
2001).  The trials are those a search chose, not a fair sample of the space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules.core.errors import ToolchainError
from schedules.core.operator import Array
from schedules.measure.records import Record
from schedules.tune.features import field_of, matrix, numbers
from schedules.tune.model import INSTALL

FEWEST = 40  # trials of a schedule that a model is made of
FOLDS = 5
SHUFFLES = 4  # of each field in each fold
LEAST_FIT = 0.2  # of the R^2 out of fold: a model that tells less says nothing of its fields
ROUNDS = 60
PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 4,
    "eta": 0.15,
    "min_child_weight": 2,
    "tree_method": "hist",
    "nthread": 1,  # the same result wherever it runs
    "verbosity": 0,
    "seed": 0,
}


@dataclass(frozen=True)
class Importance:
    """What the `trials` of one schedule say: `r2` is the fit out of fold, of the logarithm of the time, and `fields`
    the loss of it by field, the largest first; none where `r2` is under LEAST_FIT."""

    schedule: str
    trials: int
    r2: float
    fields: tuple[tuple[str, float], ...]


def importances(records: Iterable[Record]) -> list[Importance]:
    """One for each schedule with at least FEWEST correct trials whose fields vary, most trials first.

    Raises ToolchainError if xgboost is not installed.
    """
    groups: dict[str, dict[tuple[str, str], Record]] = {}
    for record in records:
        if record.stage == "trial" and record.correct:
            groups.setdefault(record.schedule, {})[record.key] = record
    enough = {name: list(group.values()) for name, group in groups.items() if len(group) >= FEWEST}
    made = [_importance(name, group) for name, group in enough.items()]
    return sorted((item for item in made if item), key=lambda item: -item.trials)


def _importance(schedule: str, trials: Sequence[Record]) -> Importance | None:
    rows = [numbers(trial.config) for trial in trials]
    columns = sorted({name for row in rows for name in row})
    table = matrix(rows, columns)
    varied = [index for index in range(len(columns)) if len(np.unique(table[:, index])) > 1]
    groups: dict[str, list[int]] = {}  # field to its columns among the varied ones
    for place, index in enumerate(varied):
        groups.setdefault(field_of(columns[index]), []).append(place)
    target = np.log2([trial.us for trial in trials])
    if not groups or not np.ptp(target):
        return None
    r2, losses = permutation(table[:, varied], target, groups)
    kept = sorted(losses.items(), key=lambda item: -item[1]) if r2 >= LEAST_FIT else []
    return Importance(schedule, len(trials), r2, tuple(kept))


def permutation(table: Array, target: Array, groups: dict[str, list[int]]) -> tuple[float, dict[str, float]]:
    """The R^2 of `target` out of fold, and how much of it is lost when the columns of each group are shuffled together.

    `table` is (row, column), `groups` name to columns.  Raises ToolchainError if xgboost is not installed.
    """
    random = np.random.default_rng(0)
    fold_of = random.permutation(len(target)) % FOLDS
    error = 0.0
    lost = dict.fromkeys(groups, 0.0)
    for fold in range(FOLDS):
        held = fold_of == fold
        model = _trained(table[~held], target[~held])
        here, wanted = table[held], target[held]
        missed = float(np.sum((model(here) - wanted) ** 2))
        error += missed
        for name, columns in groups.items():
            shuffled = np.repeat(here[None], SHUFFLES, axis=0)
            for copy in shuffled:
                copy[:, columns] = copy[random.permutation(len(copy))][:, columns]
            told = model(shuffled.reshape(-1, here.shape[1])).reshape(SHUFFLES, -1)
            lost[name] += float(np.mean(np.sum((told - wanted) ** 2, axis=1))) - missed
    scatter = float(np.sum((target - target.mean()) ** 2))
    return 1 - error / scatter, {name: loss / scatter for name, loss in lost.items()}


def _trained(table: Array, target: Array) -> Any:
    try:
        import xgboost
    except ImportError:
        raise ToolchainError(f"xgboost, which tells what the times hang on, is not installed; {INSTALL}") from None
    booster = xgboost.train(PARAMETERS, xgboost.DMatrix(table, target), ROUNDS)
    return lambda rows: booster.inplace_predict(np.ascontiguousarray(rows))
