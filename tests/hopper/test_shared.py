"""Tiles in shared memory: where TMA's and wgmma's swizzles put each row."""

from __future__ import annotations

from itertools import product

import pytest

from schedules.hopper.config import K_BYTES, STAGING
from schedules.hopper.shared import UNIT, SharedTile, Staging, folded, run_staging, staging_for
from tests.hopper.conftest import in_numbers


def swizzled(address: int, row: int) -> int:
    """Where TMA puts the 16 bytes of `address` in rows of so many bytes."""
    return address ^ (address // 128 % (row // 16)) * 16


@pytest.mark.parametrize(("row_bytes", "fold"), [(32, 2), (32, 4), (64, 2), (128, 1)])
def test_where_folded_rows_lie(row_bytes: int, fold: int) -> None:
    shared = {swizzled(at, row_bytes * fold): divmod(at, row_bytes) for at in range(0, 4096, 16)}  # as TMA writes
    for at in range(0, 4096, 16):  # as wgmma reads
        row, byte = divmod(at, row_bytes)
        assert shared[swizzled(at, row_bytes)] == (folded(row, fold), byte)
    assert all(folded(folded(row, fold), fold) == row for row in range(256))


@pytest.mark.parametrize(("width", "item"), [(64, 2), (32, 2), (16, 2), (32, 4), (16, 4), (32, 1)])
def test_results_wait_where_tma_looks_for_them(width: int, item: int) -> None:
    from tvm.script import tirx as T

    staging = Staging(64, width, item, width)
    chunks = range(staging.row_bytes // 16)
    for row, chunk in product(range(staging.rows), chunks):
        at = int(in_numbers(staging.chunk(T.int32(row), T.int32(chunk))))
        assert at == swizzled(row * staging.row_bytes + chunk * 16, staging.row_bytes)


@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(64, 80, 80), (64, 112, 112), (64, 144, 48), (64, 208, 16), (128, 80, 16), (64, 96, 32)],
)
def test_stores_of_a_sector_become_longer_where_they_fit(rows: int, columns: int, width: int) -> None:
    """Each chunk then lies where a row without a swizzle has it, and a warp's eight rows of 16 bytes in most banks."""
    from tvm.script import tirx as T

    staging = staging_for(rows, columns, 2, 64)
    assert staging.width == width and staging.nbytes <= STAGING
    if staging.swizzle < staging.row_bytes:
        chunks = range(staging.row_bytes // UNIT)
        for row, chunk in product(range(staging.rows), chunks):
            at = int(in_numbers(staging.chunk(T.int32(row), T.int32(chunk))))
            assert at == row * staging.row_bytes + chunk * UNIT
        assert len({row * staging.row_bytes // UNIT % 8 for row in range(8)}) == 4
    assert staging_for(rows, columns, 2, 64, (2, 1)).swizzle == staging_for(rows, columns, 2, 64, (2, 1)).row_bytes


@pytest.mark.parametrize(("fold", "fold_a"), [(1, 4), (4, 1), (2, 4)])
def test_folded_results_wait_in_places_of_their_own(fold: int, fold_a: int) -> None:
    from tvm.script import tirx as T

    staging = Staging(64, 32, 1, 32, fold, fold_a)
    places = {int(in_numbers(staging.chunk(T.int32(row), T.int32(c)))) for row in range(64) for c in range(2)}
    assert places == set(range(0, staging.store_bytes, 16))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "k", "item", "run"), [(128, 64, 2, 64), (64, 128, 2, 64), (64, 32, 4, 32)])
def test_steps_and_rows_are_apart(rows: int, k: int, item: int, run: int, transposed: bool) -> None:
    """wgmma's blocks of 64 rows by 32 bytes of the reduction begin in places of their own, inside of the tile."""
    tile = SharedTile(rows, k, item, run, transposed)
    steps, blocks = range(k * item // K_BYTES), range(0, rows, 64)
    places = [tile.k_offset(step) + tile.row_offset(row) for step, row in product(steps, blocks)]
    assert len(set(places)) == len(places) == tile.nbytes // (64 * K_BYTES) and max(places) < tile.nbytes
    assert all(place % 16 == 0 for place in places)


def test_runs_wait_as_they_lie_in_the_tensor_where_they_fit() -> None:
    assert run_staging(64, 32, 27, 2).packed and run_staging(64, 32, 27, 2).pitch == 27
    wide = run_staging(64, 128, 331, 2)
    assert not wide.packed and wide.pitch - wide.width == 8 and wide.columns % wide.width == 0
