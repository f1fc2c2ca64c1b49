"""The line of pixels: every tap of every output finds its pixel there, or a zero."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules.core.errors import ProblemError
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.positions import Positions, simplest
from tests.conftest import problem_of

small, step = st.integers(1, 7), st.integers(1, 3)


@settings(max_examples=150)
@given(
    n=st.integers(1, 3), h=small, w=small, k=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(step, step), pad=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=st.tuples(step, step),
    lines_outside=st.booleans(),
)  # fmt: skip
def test_every_tap_finds_its_pixel(
    n: int, h: int, w: int, k: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int],
    dilation: tuple[int, int], lines_outside: bool,
) -> None:  # fmt: skip
    try:
        problem = NchwProblem(n, h, w, 8, 8, *k, stride, pad, dilation, "float16")
    except ProblemError:
        assume(False)
    line = Positions(problem, lines_outside)
    held: dict[tuple[int, Any], tuple[int, int, int]] = {}
    for pixel in product(range(n), range(h), range(w)):
        image, at = pixel[0], pixel[1:]
        axes = list(zip(at, (line.y, line.x), stride, strict=True))
        if all(each % s in axis.moves for each, axis, s in axes):
            by, bx = (each % s if axis.planes > 1 else 0 for each, axis, s in axes)
            y, x = (each // s for each, _, s in axes)
            place = by * line.x.planes + bx, line.at(image, y, x)
            assert place not in held and place[0] < line.planes and 0 <= place[1] < line.data
            held[place] = pixel
    for image, y, x in product(range(n), range(problem.out_h), range(problem.out_w)):
        for ry, rx in product(range(k[0]), range(k[1])):
            plane, moved = line.of_tap(ry, rx)
            seen = y * stride[0] + ry * dilation[0] - pad[0], x * stride[1] + rx * dilation[1] - pad[1]
            inside = 0 <= seen[0] < h and 0 <= seen[1] < w
            assert held.get((plane, line.at(image, y, x) + moved)) == ((image, *seen) if inside else None)
    assert line.outputs >= problem.pixels and line.dense == (line.outputs == problem.pixels)


def test_zeros_are_shared() -> None:
    problem = problem_of("conv2d_nchw", n=4, h=14, w=14, ci=8, co=8, kh=3, kw=3, pad=1, dtype="float16")
    assert isinstance(problem, NchwProblem)
    assert Positions(problem, False).outputs == 4 * 15 * 15 and Positions(problem, True).outputs == 4 * 14 * 15


@pytest.mark.parametrize(
    "fields, sizes, as_they_lie",
    [
        (dict(h=1, w=1, ci=16, kh=1, kw=1), (1, 1, 16), True),
        (dict(h=1, w=1, ci=12, kh=1, kw=1), (1, 1, 12), False),
        (dict(h=7, w=7, ci=16, kh=7, kw=7), (1, 1, 784), True),
        (dict(h=7, w=7, ci=16, kh=7, kw=7, filter_layout="hwoi"), (7, 7, 16), False),
        (dict(h=7, w=7, ci=16, kh=1, kw=1), (1, 49, 16), False),
        (dict(h=1, w=1, ci=16, kh=3, kw=3, pad=1), (1, 1, 16), False),
    ],
)
def test_what_lies_in_line_stays(fields: dict[str, Any], sizes: tuple[int, int, int], as_they_lie: bool) -> None:
    problem = problem_of("conv2d_nchw", n=5, co=8, dtype="float16", **fields)
    assert isinstance(problem, NchwProblem)
    p = simplest(problem)
    assert (p.h, p.w, p.ci) == sizes and Positions(p, True).as_they_lie == as_they_lie
