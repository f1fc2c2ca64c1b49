"""Configs as columns of numbers: thousands at once, made one by one only where they are wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from schedules.core.operator import Array, ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.space import ProductSpace

FILLED = "num_stages"  # the field that is not searched: as much as there is room for is best


MOST = 800  # configs of a space without axes that are looked at, drawn once for all
SHORT = 64  # values of an axis that are compared one by one
REMEMBERED = 32  # spaces whose columns are kept


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
        at = np.asarray(rows, int)
        return Columns(len(at), {name: c[at] for name, c in self.fields.items()}, lambda row: self.make(int(at[row])))


def columns_of(configs: Sequence[Config]) -> Columns:
    """Columns of configs of one class."""
    return Columns(len(configs), _numbers([vars(config) for config in configs], configs[0]), configs.__getitem__)


def columns_of_space(spec: ScheduleSpec, problem: Problem, arch: Any) -> Columns:
    """Those of a schedule's space, legal or not, with the fewest stages where stages are to be filled up."""
    space = spec.numbered_space(problem, arch)
    if not len(space):
        return Columns(0, {}, space.__getitem__)
    if isinstance(space, ProductSpace):
        space = space.with_least(FILLED)
        return Columns(
            len(space),
            _remembered(f"{type(problem).__name__} {spec.name}", space.axes, lambda: _product(space)),
            space.__getitem__,
        )
    few = space if len(space) <= MOST else Random(0).sample(space, MOST)
    return columns_of(few)


# what was made of axes, which are kept so that nothing else takes their identity; the oldest are forgotten
_known: dict[tuple[str | int, ...], tuple[Any, dict[str, Array]]] = {}


def _remembered(name: str, axes: tuple[Any, ...], make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """What `make` gives of the space of `name`; once for the same axes, short ones and tuples, which many problems
    share."""
    if not all(isinstance(axis, tuple) or len(axis) <= SHORT for axis in axes):
        return make()
    key = (name, *(repr(axis) if len(axis) <= SHORT else id(axis) for axis in axes))
    if key not in _known:
        while len(_known) >= REMEMBERED:
            del _known[next(iter(_known))]
        _known[key] = axes, make()
    return _known[key][1]


def _product(space: ProductSpace[Config]) -> dict[str, Array]:
    first, found = space[0], {}
    parts = [_numbers(words, first) for words in space.axes]
    sizes = [len(next(iter(part.values()))) for part in parts]
    for axis, part in enumerate(parts):
        shape = [1] * len(sizes)
        shape[axis] = sizes[axis]
        for name, values in part.items():
            if axis == 0 or (values != values[0]).any():
                found[name] = np.broadcast_to(values.reshape(shape), sizes).reshape(-1)
    return found


def _numbers(words: Sequence[Mapping[str, Any]], like: Config) -> dict[str, Array]:
    """The fields of configs of the class of `like` that are numbers, truth or pairs; what none of `words` has is as in
    `like`, what only some leave out is at the class's default."""
    found: dict[str, Array] = {}
    given = set().union(*words)
    for field in dataclasses.fields(like):
        value, name = getattr(like, field.name), field.name
        if not field.init or not isinstance(value, int | float | tuple):
            continue
        default = field.default if name in given else value
        column = np.array([each.get(name, default) for each in words], np.float64)
        if column.ndim == 1:
            found[name] = column
        else:
            found |= {f"{name}.{place}": part for place, part in enumerate(column.T)}
    return found
