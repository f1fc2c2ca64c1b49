"""The banks of LDS."""

from __future__ import annotations

import pytest

from schedules.core.lds import cycles, phases


@pytest.mark.parametrize("banks", [32, 64])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("read", [False, True])
def test_every_lane_is_in_one_phase_and_rows_have_no_conflicts(banks: int, width: int, read: bool) -> None:
    found = phases(width, 64, banks, read)
    assert sorted(lane for lanes in found for lane in lanes) == list(range(64))
    assert cycles([width * lane for lane in range(64)], width, banks, read) == (len(found), len(found))


def test_lanes_that_want_different_words_of_a_bank_wait() -> None:
    assert cycles([128 * lane for lane in range(64)], 4, 32, True) == (64, 2)
    assert cycles([128 * lane for lane in range(64)], 4, 64, True) == (32, 1)  # every second in the upper banks
    assert cycles([0] * 64, 4, 32, True) == (2, 2)  # one word is handed to all
    assert cycles([None] * 63 + [4], 4, 32, False) == (1, 1)
    assert cycles([None] * 64, 4, 32, False) == (0, 0)


def test_reads_of_16_bytes_have_phases_of_their_own() -> None:
    """Rows of 32 bytes, sixteen lanes at each half: conflicts of neighbours alone."""
    rows = [lane % 16 * 32 + lane // 16 % 2 * 16 for lane in range(64)]
    assert cycles(rows, 16, 32, True) == (8, 8)
    assert cycles(rows, 16, 32, False) == (16, 8)
    assert cycles(rows[:32], 16, 32, True) == (8, 4)
