"""Classes of channels whose pixels begin alike."""

from __future__ import annotations

import pytest

from schedules.hopper.runs import Classes


@pytest.mark.parametrize("plane, count", [(784, 1), (196, 2), (350 * 3, 4), (49, 8), (289, 8), (1, 8)])
def test_channels_of_a_class_are_whole_vectors_apart(plane: int, count: int) -> None:
    classes = Classes(plane)
    assert classes.count == count
    for channel in range(64):
        number, before = channel % count, channel // count * count * plane
        assert before % 8 == 0  # elements of 16 bytes
        assert before + classes.begin(number) + classes.late(number) == channel * plane
        assert classes.begin(number) % 8 == 0 and 0 <= classes.late(number) <= classes.latest < 8
