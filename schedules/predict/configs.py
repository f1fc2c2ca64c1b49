"""Configs as columns of numbers: thousands at once, made one by one only where they are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules.core.operator import Array, ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.space import ProductSpace

FILLED = "num_stages"  # the field that is not searched: as much as there is room for is best


@dataclass(frozen=True)
class Columns:
    """Fields of `count` configs by name; pairs as two columns, ``tile.0`` and ``tile.1``.  `make` gives one of them."""

    count: int
    fields: Mapping[str, Array]
    make: Callable[[int], Config]

    def get(self, name: str, default: float = np.nan) -> Array:
        """The column `name`, or `default` in every row."""
        found = self.fields.get(name)
        return np.full(self.count, default) if found is None else found

    def take(self, rows: Sequence[int] | Array) -> Columns:
        at = np.asarray(rows)
        return Columns(len(at), {name: c[at] for name, c in self.fields.items()}, lambda row: self.make(int(at[row])))


def columns_of(configs: Sequence[Config]) -> Columns:
    """Columns of configs of one class."""
    return Columns(len(configs), _numbers(configs), configs.__getitem__)


def columns_of_space(spec: ScheduleSpec, problem: Problem, arch: Any) -> Columns:
    """Those of a schedule's space, legal or not, with the fewest stages where stages are to be filled up."""
    space = spec.numbered_space(problem, arch)
    if not len(space):
        return Columns(0, {}, space.__getitem__)
    if not isinstance(space, ProductSpace):
        return columns_of(space)
    space = space.with_least(FILLED)
    sizes, found = [], {}
    parts = [_numbers(made) for made in space.made_by_axis()]
    sizes = [len(next(iter(part.values()))) for part in parts]
    for axis, part in enumerate(parts):
        shape = [1] * len(sizes)
        shape[axis] = sizes[axis]
        for name, values in part.items():
            if axis == 0 or (values != values[0]).any():
                found[name] = np.broadcast_to(values.reshape(shape), sizes).reshape(-1)
    return Columns(len(space), found, space.__getitem__)


def _numbers(configs: Sequence[Config]) -> dict[str, Array]:
    """The fields of `configs` that are numbers, truth or pairs of them."""
    found: dict[str, Array] = {}
    for field in dataclasses.fields(configs[0]):
        if not field.init:
            continue
        values = np.array([getattr(config, field.name) for config in configs])
        if values.dtype.kind not in "biuf":
            continue
        if values.ndim == 1:
            found[field.name] = values.astype(np.float64)
        else:
            found |= {f"{field.name}.{place}": values[:, place].astype(np.float64) for place in range(values.shape[1])}
    return found
