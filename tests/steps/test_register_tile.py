from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.core.arch import VectorUnit
from schedules.steps.register_tile import CACHED, fits, shares, step_cycles, tasks, vectors_for

AVX512, AVX2, WIDE = VectorUnit(16, 32, 8), VectorUnit(8, 16, 8), VectorUnit(16, 32, 16)


@pytest.mark.parametrize(
    ("unit", "extent", "vectors"), [(AVX512, 56, (8, 16)), (AVX512, 7, (4, 8, 16)), (AVX2, 56, (4, 8)), (AVX2, 1, None)]
)
def test_vectors_reach_from_half_a_register_to_a_whole_one(
    unit: VectorUnit, extent: int, vectors: tuple[int, ...] | None
) -> None:
    assert vectors_for(unit, extent) == (vectors or (1, 2, 4, 8))


def test_a_tile_leaves_registers_for_its_operands() -> None:
    assert fits(AVX512, 24, 4) and not fits(AVX512, 28, 4)
    assert fits(AVX2, 12, 2) and not fits(AVX2, 12, 4)


def test_a_tile_with_few_sums_waits_and_a_flat_one_loads() -> None:
    def of_a_sum(vectors: int, broadcasts: int) -> float:
        return step_cycles(AVX512, 16, vectors, broadcasts) / (vectors * broadcasts)

    assert of_a_sum(4, 6) < of_a_sum(1, 3)
    assert of_a_sum(4, 6) < of_a_sum(24, 1)


def test_half_a_pipe_takes_as_long_as_a_whole_one() -> None:
    assert step_cycles(WIDE, 8, 4, 6) == step_cycles(WIDE, 16, 4, 6)
    assert step_cycles(AVX512, 8, 4, 6) < step_cycles(AVX512, 16, 4, 6)


@given(count=st.integers(1, 300))
def test_shares_begin_with_one_and_end_with_all(count: int) -> None:
    found = shares(count)
    assert found[0] == 1 and found[-1] == count and found == sorted(set(found))


@given(
    counts=st.tuples(*[st.integers(1, 60)] * 3), times=st.integers(1, 20), cores=st.integers(1, 8),
    rows=st.integers(1, 5000),
)  # fmt: skip
def test_tasks_keep_every_core_busy_and_what_they_copy_in_cache(
    counts: tuple[int, int, int], times: int, cores: int, rows: int
) -> None:
    found = tasks(counts, times, cores, 1e5, lambda y, x: rows * y * x, weights=100)
    shared = (found.tiles_y, found.tiles_x, found.chunk)
    assert all(1 <= share <= count for count, share in zip(counts, shared, strict=True))
    number = times * math.prod(-(-count // share) for count, share in zip(counts, shared, strict=True))
    # single tiles spread best, and cost 5500 cycles more each at most
    assert -(-number // cores) * math.prod(shared) <= 1.06 * -(-times * math.prod(counts) // cores)
    assert 4 * rows * found.tiles_y * found.tiles_x <= CACHED
