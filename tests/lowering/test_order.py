"""The order of blocks: each place once, the pixels of the window first."""

from __future__ import annotations

import pytest
import tvm
from tvm import tirx

from schedules.lowering.order import inside_first


@pytest.mark.parametrize(
    ("height", "geometry"),
    [
        (5, (2, 6, 1, 3, 1, 4)),  # a border all around
        (4, (1, 5, 0, 4, 1, 2)),  # beside it only
        (5, (3, 4, 2, 2, 0, 4)),  # above and below only
        (3, (1, 3, 1, 1, 0, 2)),
    ],
)
def test_every_place_comes_once_and_the_window_first(height: int, geometry: tuple[int, ...]) -> None:
    blocks, width, top, rows, left, columns = geometry
    analyzer = tvm.sym.Analyzer()
    count = height * width * blocks
    places = [int(analyzer.simplify(inside_first(tirx.const(i, "int32"), geometry))) for i in range(count)]
    assert sorted(places) == list(range(count))

    def inside(place: int) -> bool:
        y, x = divmod(place // blocks, width)
        return top <= y < top + rows and left <= x < left + columns

    window = rows * columns * blocks
    assert all(inside(place) for place in places[:window]) and not any(inside(place) for place in places[window:])
    lead = (count - window) // 2
    led = [int(analyzer.simplify(inside_first(tirx.const(i, "int32"), geometry, lead))) for i in range(count)]
    assert led == places[window : window + lead] + places[:window] + places[window + lead :]
    # the blocks of a pixel stay together, so that they share what they read
    assert all(places[i] + 1 == places[i + 1] for i in range(count - 1) if (i + 1) % blocks)
