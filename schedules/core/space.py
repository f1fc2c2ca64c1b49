"""Search spaces whose configs are made only when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Generic, TypeVar, overload

from schedules.core.problem import Config

C = TypeVar("C", bound=Config)
Words = Mapping[str, Any]  # fields of a config; those at their default may be left out


class ProductSpace(Sequence[C], Generic[C]):
    """`make` of the fields of every combination of `axes`, in the order of ``itertools.product``: the last axis changes
    fastest."""

    def __init__(self, make: Callable[..., C], *axes: Sequence[Words]) -> None:
        self._make, self.axes = make, axes

    def __len__(self) -> int:
        return math.prod(map(len, self.axes))

    @overload
    def __getitem__(self, index: int) -> C: ...

    @overload
    def __getitem__(self, index: slice) -> list[C]: ...

    def __getitem__(self, index: int | slice) -> C | list[C]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return [self[each] for each in at]
        chosen: dict[str, Any] = {}
        for axis in reversed(self.axes):
            at, number = divmod(at, len(axis))
            chosen.update(axis[number])
        return self._make(**chosen)

    def with_least(self, name: str) -> ProductSpace[C]:
        """The part of the space whose configs have the least value of the field `name`, if an axis has it alone."""
        axes = [[min(axis, key=lambda words: words[name])] if set(axis[0]) == {name} else axis for axis in self.axes]
        return ProductSpace(self._make, *axes)

    def __iter__(self) -> Iterator[C]:
        for chosen in product(*self.axes):
            yield self._make(**{name: value for words in chosen for name, value in words.items()})


def axis(name: str, values: Sequence[Any]) -> tuple[Words, ...]:
    """The values that a field may have whatever the others."""
    return tuple({name: value} for value in values)
