"""A space whose configs are made only when they are asked for is the same space."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.check.sweep import CONFIGS, random_config
from schedules.core.arch import Arch
from schedules.core.presets import resolve
from schedules.core.problem import Config
from schedules.core.registry import operators
from schedules.core.space import ProductSpace, axis


@dataclass(frozen=True)
class Numbers(Config):
    a: int
    b: int = 0

    def check(self, problem: Any, arch: Any) -> str | None:
        return None if self.b % 2 else "b is even"


@given(st.lists(st.lists(st.integers(), max_size=4), max_size=4))
def test_the_order_is_that_of_the_product(values: list[list[int]]) -> None:
    axes = [axis(str(number), each) for number, each in enumerate(values)]
    space: ProductSpace[Any] = ProductSpace(lambda **words: tuple(words[str(n)] for n in range(len(axes))), *axes)
    wanted = list(product(*values))
    assert len(space) == len(wanted)
    assert list(space) == wanted == [space[number] for number in range(len(space))]
    assert space[1:] == wanted[1:] and space[::-2] == wanted[::-2]
    assert [space[number] for number in range(-len(space), 0)] == wanted
    for outside in (len(wanted), -len(wanted) - 1):
        with pytest.raises(IndexError):
            space[outside]


def test_only_what_is_drawn_is_made(host: Arch) -> None:
    made = []

    def make(a: int, b: int) -> Numbers:
        made.append((a, b))
        return Numbers(a, b)

    conv = resolve("tutorial", {})[1]
    spec = operators()[0].schedule("cpu")
    space = replace(
        spec, space=lambda problem, arch: ProductSpace(make, axis("a", range(1000)), axis("b", range(1000)))
    )
    found = random_config(space, conv, host, random.Random(0))
    assert isinstance(found, Numbers) and found.b % 2
    assert made[-1] == (found.a, found.b) and len(made) <= CONFIGS


def test_an_iterator_can_be_drawn_from_too(host: Arch) -> None:
    spec = replace(operators()[0].schedule("cpu"), space=lambda problem, arch: (Numbers(0, b) for b in range(3)))
    conv = resolve("tutorial", {})[1]
    assert spec.numbered_space(conv, host) == [Numbers(0, 0), Numbers(0, 1), Numbers(0, 2)]
    assert {random_config(spec, conv, host, random.Random(seed)) for seed in range(5)} == {Numbers(0, 1)}
    nothing = replace(spec, space=lambda problem, arch: [Numbers(0, 0)])
    assert random_config(nothing, conv, host, random.Random(0)) is None


def test_the_part_with_the_least_of_a_field() -> None:
    space = ProductSpace(Numbers, [dict(a=3), dict(a=2)], axis("b", (5, 1, 4)))
    assert list(space.with_least("b")) == [Numbers(3, 1), Numbers(2, 1)]
    together = ProductSpace(Numbers, [dict(a=3, b=7), dict(a=2, b=1)])  # of an axis of several fields all are kept
    assert list(together.with_least("b")) == list(together)
