"""Search spaces whose configs are made only when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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

    def __iter__(self) -> Iterator[C]:
        return starmap(self._make, product(*self._axes))
