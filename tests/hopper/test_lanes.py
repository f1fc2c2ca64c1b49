"""Lanes turn all words, and wait for each other less than in the words' order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.hopper.boxes import Along, Layout
from schedules.hopper.lanes import BANKS, EIGHT, ROWS, WARP, Lanes, QuadOrder, Word, arranged, quad_order


def layout(h: int, w: int, k: int, stride: int, pad: int, dilation: int = 1) -> Layout:
    return Layout(Along(h, k, stride, pad, dilation), Along(w, k, stride, pad, dilation))


def wanted(words: Sequence[Word]) -> list[Word]:
    return sorted(word for word in words if word != word.unwanted)


@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([8, 16, 24]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_every_word_has_a_lane(h: int, w: int, k: int, stride: int, pad: int, dilation: int) -> None:
    words = layout(h, w, k, stride, pad, dilation).words
    lanes = arranged(words)
    assert wanted(lanes.words) == wanted(words)
    assert len(lanes.words) == -(-len(words) // WARP) * WARP
    assert lanes.cycles <= Lanes([*words, *[words[-1].unwanted] * (-len(words) % WARP)], True).cycles


# the cycles in which nothing waits: eight of each warp's reads, and those of each eight lanes' stores
@pytest.mark.parametrize(
    "tile, most",
    [
        (layout(8, 16, 3, 2, 1), 1.18),
        (layout(16, 16, 3, 2, 1), 1.18),
        (layout(4, 32, 3, 2, 1), 1.15),
        (layout(8, 16, 5, 2, 2), 1.30),
        (layout(4, 32, 3, 1, 1), 1.0),
    ],
)
def test_few_lanes_wait(tile: Layout, most: float) -> None:
    lanes = tile.lanes
    stored = sum(
        any(row >= 0 for row in rows)
        for start in range(0, len(lanes.words), EIGHT)
        for rows in list(zip(*lanes.words[start : start + EIGHT], strict=True))[1:]
    )
    assert lanes.cycles <= most * (EIGHT * len(lanes.words) // WARP + stored)
    assert tile.reads <= lanes.cycles / EIGHT


def test_cycles_are_of_banks_and_of_rows() -> None:
    """Two words of a bank are read one after the other, two rows alike modulo 8 stored so; a word is read once."""

    def cycles(*words: Word, odd_first: bool = False) -> int:
        return Lanes([*words, *[words[-1].unwanted] * (EIGHT - len(words))], odd_first).cycles

    alone = Word(0, 0, -1)
    assert cycles(alone) == EIGHT + 1
    assert cycles(alone, Word(2 * BANKS, 1, -1)) == 2 * EIGHT + 1
    assert cycles(alone, alone._replace(even=1)) == EIGHT + 1
    assert cycles(alone, Word(2, EIGHT, -1)) == EIGHT + 2
    assert cycles(alone, Word(2, -1, EIGHT)) == EIGHT + 2
    four = [Word(2 * i, 2 * i, 2 * i + 1) for i in range(EIGHT)]  # rows side by side
    assert cycles(*four) == EIGHT + 4 and cycles(*four, odd_first=True) == EIGHT + 2


def test_words_that_fit_nowhere_are_turned_too() -> None:
    words = [Word(2 * BANKS * number, EIGHT * number, -1) for number in range(11)]
    assert wanted(arranged(words).words) == words


def read_at_once(order: QuadOrder, pitch: int, paired: bool, first: int, late: int) -> list[int]:
    """Elements that the lanes of the first warp read of a pair's channels, each lane one of them."""
    found = []
    for lane in range(WARP):
        row = lane // 4 * (2 if paired else 1)
        row += (ROWS // 2 - 8) * (order.spread and row >= 8)
        odd = late ^ (order.odd_first and lane % 4 >= 2)
        found.append((2 * (lane % 4) + odd) * pitch + row + first)
    return found


@given(st.integers(1, 200), st.booleans())
def test_quads_read_with_the_fewest_conflicts(half: int, paired: bool) -> None:
    """As counted lane by lane; and no order takes more than the plain one."""
    pitch, widths = (2 * half, (False, True)) if paired else (2 * half - 1, (False,))
    plain, chosen = QuadOrder(False, False), quad_order(pitch, paired, spread=widths)
    for order in (plain, chosen):
        counted = 0
        for first in range(0, 2 * BANKS, 1 + paired):
            for late in (0, 1):
                words = {at // 2 for at in read_at_once(order, pitch, paired, first, late)}
                counted += max(Counter(word % BANKS for word in words).values())
        assert counted == order.wavefronts(pitch, paired)
    assert chosen.wavefronts(pitch, paired) <= plain.wavefronts(pitch, paired)


@pytest.mark.parametrize(
    ("plane", "order", "times"),
    [
        (7 * 7, QuadOrder(odd_first=True, spread=False), 2),
        (17 * 17, QuadOrder(odd_first=True, spread=False), 2),
        (13 * 13, QuadOrder(odd_first=False, spread=False), 1),
        (14 * 14, QuadOrder(odd_first=False, spread=True), 2),
        (12 * 12, QuadOrder(odd_first=True, spread=False), 2),
    ],
)
def test_planes_that_wait_for_banks_are_read_in_another_order(plane: int, order: QuadOrder, times: int) -> None:
    paired = plane % 2 == 0
    assert quad_order(plane, paired, spread=(False, True) if paired else (False,)) == order
    assert QuadOrder(False, False).wavefronts(plane, paired) == times * order.wavefronts(plane, paired)
