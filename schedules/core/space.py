"""Search spaces whose configs are made only when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        """The part of the space whose configs have the least value of the field `name`, if one axis sets it."""
        axes = list(self._axes)
        for number, axis in enumerate(axes):
            if isinstance(axis[0], Mapping):
                values = [words.get(name) for words in axis]
            else:
                values = [getattr(config, name, None) for config in self._made_along(number)]
            if None not in values and len(set(values)) > 1:
                least = min(values)
                axes[number] = [value for value, found in zip(axis, values, strict=True) if found == least]
        return ProductSpace(self._make, *axes)

    def axes_as_words(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        """For each axis the fields of a config of each of its values, with the first values of all others; of an axis
        of mappings these themselves, which may leave out what is at its default."""
        for number, axis in enumerate(self._axes):
            if isinstance(axis[0], Mapping):
                yield axis
            else:
                yield [vars(config) for config in self._made_along(number)]

    def _made_along(self, number: int) -> list[C]:
        first = [axis[0] for axis in self._axes]
        return [self._make(*first[:number], value, *first[number + 1 :]) for value in self._axes[number]]

    def __iter__(self) -> Iterator[C]:
        return starmap(self._make, product(*self._axes))
