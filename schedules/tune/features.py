"""Configs and problems as numbers, for the cost model.

A column is a field: numbers as they are, pairs as two columns, words as one column for each value.  What a config does
not have is NaN, which gradient-boosted trees take as "missing", so that the configs of several schedules and the
problems of one operator share one table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from schedules.core.fields import Fields
from schedules.core.operator import Array
from schedules.core.problem import Problem
from schedules.tune.strategy import Candidate


def features(problem: Problem, candidate: Candidate) -> dict[str, float]:
    """Named numbers of one candidate for one problem."""
    return {**problem_features(problem), f"schedule={candidate.schedule}": 1.0, **_config_features(candidate)}


@lru_cache
def problem_features(problem: Problem) -> Mapping[str, float]:
    """The problem's fields, and what it takes in all: operations and bytes, as logarithms."""
    totals = {"problem.flops": math.log2(problem.flops), "problem.bytes": math.log2(problem.min_bytes)}
    return {**numbers(problem, "problem."), **totals}


def _config_features(candidate: Candidate) -> dict[str, float]:
    """The config's fields, and its derived sizes (threads, block, shared memory, ...): its properties that are
    numbers."""
    config, found = candidate.config, {}
    for name in dir(type(config)):
        if isinstance(getattr(type(config), name), property):
            with contextlib.suppress(ZeroDivisionError):  # an illegal config, of a journal, need not have every size
                found.update(_number(f"config.{name}", getattr(config, name)))
    return {**numbers(config, "config."), **found}


def numbers(fields: Fields, prefix: str = "") -> dict[str, float]:
    """The fields as numbers, each column named after its field: ``tile.0``, ``padding=inline``."""
    found: dict[str, float] = {}
    for field in dataclasses.fields(fields):
        found.update(_number(prefix + field.name, getattr(fields, field.name)))
    return found


def field_of(column: str) -> str:
    """The field that a column of `numbers` comes from."""
    return column.split("=")[0].split(".")[0]


def _number(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, bool | int | float):
        return {name: float(value)}
    if isinstance(value, str):
        return {f"{name}={value}": 1.0}
    if isinstance(value, tuple) and all(isinstance(part, int | float) for part in value):
        product = {f"{name}.product": float(math.prod(value))} if len(value) > 1 else {}
        return {**{f"{name}.{index}": float(part) for index, part in enumerate(value)}, **product}
    return {}


def matrix(rows: Sequence[Mapping[str, float]], columns: Sequence[str]) -> Array:
    """Rows as a table (row, column) of float32, NaN where a row has no such feature.

    Words that a row does not have count as 0, not as missing.
    """
    table = np.full((len(rows), len(columns)), np.nan, np.float32)
    place = {name: index for index, name in enumerate(columns)}
    table[:, [index for name, index in place.items() if "=" in name]] = 0.0
    for row, values in enumerate(rows):
        for name, value in values.items():
            if name in place:
                table[row, place[name]] = value
    return table
