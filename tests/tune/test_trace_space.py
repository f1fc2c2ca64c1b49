from __future__ import annotations

import math
import random

import pytest

from schedules.core.arch import parse_arch
from schedules.tune.trace_space import MAX_ACCUMULATORS, MAX_VTHREADS, TraceSpace, _Outline, _tile
from tests.conftest import problem_of


@pytest.mark.parametrize("extent", [1, 7, 12, 256, 97 * 2])
@pytest.mark.parametrize("parts", [2, 5])
def test_tiles_multiply_to_the_extent(extent: int, parts: int) -> None:
    rng = random.Random(0)
    drawn = {tuple(_tile(extent, parts, 8, 1.0, rng)) for _ in range(200)}
    assert all(math.prod(tile) == extent and tile[-1] <= 8 for tile in drawn)
    assert extent == 1 or len(drawn) > 1


def test_drawn_traces_have_possible_threads() -> None:
    problem = problem_of("conv2d_hwcn", n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
    arch = parse_arch("sm_90a")
    space = TraceSpace(problem, arch, "cuda")
    rng = random.Random(0)
    sound = 0
    for _ in range(30):
        trace = space.draw(rng)
        outline = _Outline.of(trace)
        threads, vthreads, outputs = outline.threads([tile.factors for tile in outline.tiles])
        assert 32 <= threads <= arch.max_threads
        assert vthreads <= MAX_VTHREADS and vthreads * outputs <= MAX_ACCUMULATORS
        sch = space.finish(trace, 1)
        if sch is not None:
            sound += 1
            assert sound > 5 or space.verified(sch)
    assert sound >= 5
