"""Search spaces whose configs are made only when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import product, starmap
from typing import Any, Generic, TypeVar, overload

from schedules.core.problem import Config

C = TypeVar("C", bound=Config)


class ProductSpace(Sequence[C], Generic[C]):
    """`make` of every combination of `axes`, in the order of ``itertools.product``: the last axis changes fastest."""

    def __init__(self, make: Callable[..., C], *axes: Sequence[Any]) -> None:
        self._make, self._axes = make, axes

    def __len__(self) -> int:
        return math.prod(map(len, self._axes))

    @overload
    def __getitem__(self, index: int) -> C: ...

    @overload
    def __getitem__(self, index: slice) -> list[C]: ...

    def __getitem__(self, index: int | slice) -> C | list[C]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return [self[each] for each in at]
        chosen = []
        for axis in reversed(self._axes):
            at, number = divmod(at, len(axis))
            chosen.append(axis[number])
        return self._make(*reversed(chosen))

    def with_least(self, name: str) -> ProductSpace[C]:
        """The part of the space that has the least value of the field `name`, where an axis sets that alone or by
        mappings of words."""
        least: list[Sequence[Any]] = []
        names = list(signature(self._make).parameters)
        for parameter, axis in zip(names, self._axes, strict=True):
            if name.endswith(parameter):
                least.append((min(axis),))
            elif isinstance(axis[0], Mapping) and name in axis[0]:
                value = min(words[name] for words in axis)
                least.append([words for words in axis if words[name] == value])
            else:
                least.append(axis)
        return ProductSpace(self._make, *least)

    def made_by_axis(self) -> Iterator[list[C]]:
        """For each axis a config of each of its values, with the first values of all others."""
        first = [axis[0] for axis in self._axes]
        for number, axis in enumerate(self._axes):
            yield [self._make(*first[:number], value, *first[number + 1 :]) for value in axis]

    def __iter__(self) -> Iterator[C]:
        return starmap(self._make, product(*self._axes))
