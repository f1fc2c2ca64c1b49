from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.core.arch import VectorUnit
from schedules.steps import register_tile
from schedules.steps.register_tile import cached, fetched, fits, shares, step_cycles, tasks, tile_cycles, vectors_for

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
    assert fits(AVX512, 28, 2, ahead=4) and not fits(AVX512, 29, 2, ahead=4) and not fits(AVX512, 28, 4, ahead=4)


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


def test_wide_pipes_take_half_as_long_for_the_same_steps() -> None:
    assert tile_cycles(WIDE, 1000, 0) == tile_cycles(AVX512, 1000, 0) / 2 == tile_cycles(AVX2, 1000, 0) / 2
    assert tile_cycles(WIDE, 0, 100) == tile_cycles(AVX512, 0, 100)
    assert tile_cycles(WIDE, 1000, 0, across=True) > tile_cycles(WIDE, 1000, 0)
    assert tile_cycles(AVX512, 1000, 0, across=True) == tile_cycles(AVX512, 1000, 0)


def test_filters_come_from_afar_where_no_near_cache_keeps_them() -> None:
    assert fetched(cached() // 4) == 0 < fetched(cached() // 4 + 1)


@given(
    counts=st.tuples(*[st.integers(1, 60)] * 3), batch=st.integers(1, 20), cores=st.integers(1, 8),
    rows=st.integers(1, 5000), together=st.booleans(),
)  # fmt: skip
def test_tasks_keep_every_core_busy_and_what_they_copy_in_cache(
    counts: tuple[int, int, int], batch: int, cores: int, rows: int, together: bool
) -> None:
    found = tasks(counts, batch, cores, 1e5, lambda y, x: rows * y * x, weights=100, together=together)
    shared = (found.tiles_n, found.tiles_y, found.tiles_x, found.chunk)
    assert all(1 <= share <= count for count, share in zip((batch, *counts), shared, strict=True))
    number = math.prod(-(-count // share) for count, share in zip((batch, *counts), shared, strict=True))
    # single tiles spread best, and cost 5500 cycles more each at most
    assert -(-number // cores) * math.prod(shared) <= 1.06 * -(-batch * math.prod(counts) // cores)
    assert found.tiles_n == 1 or (together and shared[1:3] == counts[:2])
    one = found.tiles_n * found.tiles_y * found.tiles_x == 1
    assert one or 4 * rows * math.prod(shared[:3]) <= cached()


def test_images_share_filters_that_come_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few pixels: of many pixels an image's own are enough."""
    monkeypatch.setattr(register_tile, "second_level_cache", lambda: 2**21)
    filters = 9 * 256 * 32

    def images(rows: int, together: bool = True) -> int:
        counts, cycles = (rows, 1, 16), 9 * 256 * 10
        return tasks(counts, 64, 2, cycles, lambda y, x: 256 * 9 * y, filters, together=together).tiles_n

    assert images(7) > 1 == images(7, together=False) == images(112)


def test_few_cycles_are_not_worth_a_kernel_for_one_number_of_images() -> None:
    """Tasks of several images would be started less often."""
    counts, cycles = (6, 1, 1), 100.0
    assert tasks(counts, 8, 2, cycles, lambda y, x: 30 * y, weights=27 * 8).tiles_n == 1
    many = tasks(counts, 8000, 2, cycles, lambda y, x: 30 * y, weights=27 * 8)
    assert many.tiles_n > 1


def test_rows_that_begin_and_lines_that_come_in_part_take_longer() -> None:
    def cycles(kept: int, **more: Any) -> float:
        return tasks((1, 1, 16), 1, 1, 1e5, lambda y, x: kept, weights=1000, **more).cycles

    near, far = 10, cached()
    assert cycles(near, begun=lambda y, x: 100) > cycles(near) == cycles(near, apart=3.0)
    assert cycles(far, apart=3.0) > cycles(far)


def test_a_task_alone_packs_its_own_filters() -> None:
    """If packing is cheaper then than what more tasks gain."""
    for alone_cycles, whole in ((0.0, True), (1e9, False)):
        found = tasks(
            (9, 4, 8), 2, 2, 1e4, lambda y, x: 100 * y * x, 1000,
            packed=lambda alone, alone_cycles=alone_cycles: alone_cycles if alone else 1e8,
        )  # fmt: skip
        assert ((found.tiles_n, found.tiles_y, found.tiles_x) == (2, 9, 4)) == whole


def test_data_that_no_cache_keeps_makes_tasks_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for second in (2**20, 2**21, 2**23):
        monkeypatch.setattr(register_tile, "second_level_cache", lambda second=second: second)
        found = tasks((64, 1, 16), 1, 1, 1e5, lambda y, x: 10000 * y, weights=20000)
        sizes.append(found.tiles_y)
        assert 4 * 10000 * found.tiles_y <= 0.75 * second
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
