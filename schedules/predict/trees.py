"""Gradient-boosted trees as a table of their nodes, evaluated by NumPy: xgboost grows them, nothing needs it later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from schedules.core.operator import Array

SHIPPED = Path(__file__).parent / "trees.npz"
NODES = 48 * 1024  # that are visited at a time, so that what is between stays in a cache
COARSE = Path(__file__).parent / "coarse.npz"  # fewer and shallower, of what is told of thousands of configs at once


@dataclass(frozen=True)
class Trees:
    """Every tree's nodes in one table; a node's children follow each other, a leaf's are itself.

    `names` are the columns of the table that the trees are evaluated for; `header` says in words what they were
    trained on.
    """

    names: tuple[str, ...]
    header: Mapping[str, Any]
    roots: Array
    feature: Array  # of a node
    threshold: Array  # a row goes left below it; of a leaf, its value
    left: Array  # the left child; the right one follows
    missing_left: Array  # whether a row without the feature goes left
    depth: int
    base: float

    @cached_property
    def _levels(self) -> tuple[Sequence[tuple[Array, Array]], Array]:
        """Of each level of full trees, in which node i has the children 2 i and 2 i + 1 of the next, the columns that
        nodes ask for, of a table that has all columns twice, with what is missing lowest and then with it highest, and
        their thresholds, which nothing reaches at a leaf and below; and the values below the last."""
        leaf = self.left == np.arange(len(self.left))
        column = np.where(self.missing_left, self.feature, self.feature + len(self.names))
        threshold = np.where(leaf, np.float32(np.nan), self.threshold)
        levels, at = [], self.roots.astype(np.int64)
        for _ in range(self.depth):
            levels.append((column[at], threshold[at]))
            at = np.stack([self.left[at], self.left[at] + ~leaf[at]], axis=1).ravel()
        return levels, self.threshold[at]

    def predict(self, table: Array) -> Array:
        """A number for each row of `table` (row, column)."""
        levels, leaves = self._levels
        missing, sums = np.isnan(table), np.empty(len(table))
        both = np.concatenate([np.where(missing, np.float32(end), table) for end in (-np.inf, np.inf)], axis=1)
        some = max(1, NODES // len(self.roots))
        for start in range(0, len(table), some):
            part = both[start : start + some]
            rows, values = np.arange(len(part))[:, None] * part.shape[1], part.ravel()
            at = np.broadcast_to(np.arange(len(self.roots)), (len(part), len(self.roots)))
            for column, threshold in levels:
                at = 2 * at + (values.take(rows + column.take(at)) >= threshold.take(at))
            sums[start : start + some] = leaves.take(at).sum(axis=1, dtype=np.float64)
        return sums + self.base


@lru_cache
def load(file: Path = SHIPPED) -> Trees | None:
    """The trees of `file`, by default those that the package ships; None if there is no such file."""
    if not file.is_file():
        return None
    with np.load(file) as parts:
        header = json.loads(parts["words"].tobytes())
        left = parts["left"].astype(np.int64)
        return Trees(
            tuple(header.pop("names")),
            depth=header.pop("depth"),
            base=header.pop("base"),
            header=header,
            roots=parts["roots"],
            feature=parts["feature"].astype(np.int64),
            threshold=parts["threshold"],
            left=left + np.arange(len(left)),
            missing_left=parts["missing_left"],
        )
