"""Bank conflicts of every shared-memory access of the tensor-core schedules, computed from the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from schedules.lowering.annotated import swizzle

VECTOR, LINE = 16, 128  # bytes of the widest access, and of all banks


def address(row: int, byte: int, width: int) -> int:
    """Address of byte `byte` of row `row`, where rows are `width` bytes."""
    vector, rest = divmod(byte, VECTOR)
    return row * width + int(swizzle(row, vector, width // VECTOR, LINE)) * VECTOR + rest


def conflicts(addresses: Iterable[int], size: int) -> int:
    """How many passes the accesses of `size` bytes at `addresses` take beyond the one or few that they need.

    The hardware serves 128 bytes a pass: a quarter warp of 16-byte accesses, a warp of 4-byte ones.
    """
    given = list(addresses)
    at_once = LINE // size
    extra = 0
    for start in range(0, len(given), at_once):
        banks: dict[int, set[int]] = {}
        for first in given[start : start + at_once]:
            for word in range(first // 4, (first + size) // 4):
                banks.setdefault(word % 32, set()).add(word)
        extra += max(len(words) for words in banks.values()) - 1
    return extra


WIDTHS = [16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 512]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_swizzle_only_moves_vectors_within_their_row(width: int) -> None:
    for row in range(64):
        found = {address(row, byte, width) for byte in range(0, width, VECTOR)}
        assert found == set(range(row * width, (row + 1) * width, VECTOR))


@pytest.mark.parametrize("width", WIDTHS)
def test_ldmatrix_has_no_conflicts(width: int) -> None:
    """Eight rows of one 16-byte column at a time, whether transposed or not."""
    for first_row in range(0, 32, 8):
        for byte in range(0, width, VECTOR):
            assert conflicts((address(first_row + row, byte, width) for row in range(8)), VECTOR) == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_the_fetch_has_no_conflicts(width: int) -> None:
    """A warp stores 32 consecutive vectors, and a pass holds whole lines or parts of few rows."""
    per_row = width // VECTOR
    vectors = [divmod(index, per_row) for index in range(32)]
    if 8 % per_row == 0 or per_row % 8 == 0:
        assert conflicts((address(row, vector * VECTOR, width) for row, vector in vectors), VECTOR) == 0


@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_the_way_out_has_no_conflicts(columns: int) -> None:
    """Lanes store pairs of 2-byte sums, four to a 16-byte vector of each of eight rows; then rows leave whole."""
    width = 2 * columns
    free: Callable[[Iterable[int], int], bool] = lambda addresses, size: conflicts(addresses, size) == 0  # noqa: E731
    for tile in range(columns // 8):
        assert free((address(lane // 4, tile * 16 + lane % 4 * 4, width) for lane in range(32)), 4)
    vectors = (divmod(index, width // VECTOR) for index in range(32))
    assert free((address(row, vector * VECTOR, width) for row, vector in vectors), VECTOR)
