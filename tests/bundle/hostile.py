"""Hostile values at every place of a JSON object."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

MISSING = object()
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES = [MISSING, None, True, -1, 1 << 70, float("nan"), "", "../x", "a\0b", "\ud800\x1b[2J", [], {}, [None], DEEP]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in `value`; of a long list the first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*at, key)
        yield from places(item, (*at, key))


def changed(value: Any, at: tuple[Any, ...], other: Any) -> Any:
    """`value` with `other` at a place; without the place, for MISSING."""
    value = copy.deepcopy(value)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    if other is MISSING:
        del inner[at[-1]]
    else:
        inner[at[-1]] = other
    return value


def mutants(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """`value` with each hostile value at each place, and the place."""
    for at in places(value):
        for other in VALUES:
            yield at, changed(value, at, other)
