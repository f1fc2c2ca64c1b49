"""Tiles of pixels in a line, whichever way they come: any problem is built, or why not is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.core.arch import Arch
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import assert_builds_or_says_why
from tests.operators.conv2d_nchw.test_tma_wgmma_lines import CONFIGS as LINES
from tests.operators.conv2d_nchw.test_tma_wgmma_turned import CONFIGS as TURNED

sizes = st.integers(1, 30)
WAYS = dict(tma_wgmma_turned=TURNED, tma_wgmma_lines=LINES)


@pytest.mark.parametrize("schedule", WAYS)
@settings(max_examples=5, deadline=None)
@given(
    n=st.integers(1, 9), h=sizes, w=sizes, ci=st.integers(1, 100), co=st.integers(1, 300), kh=st.integers(1, 3),
    kw=st.integers(1, 9), stride=st.integers(1, 4), dilation=st.integers(1, 3), data=st.data(),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, schedule: str, n: int, h: int, w: int, ci: int, co: int, kh: int, kw: int, stride: int,
    dilation: int, data: st.DataObject,
) -> None:  # fmt: skip
    fields: dict[str, Any] = dict(n=n, h=h + dilation * kh, w=w + dilation * kw, co=co, kh=kh, kw=kw, dtype="float16")
    fields |= dict(ci=ci if schedule == "tma_wgmma_turned" else -(-ci // 8) * 8, dilation=dilation)
    fields |= dict(pad=(kh // 2, kw // 2), stride=(stride, 1))
    words = data.draw(st.sampled_from([{}, *WAYS[schedule]]))
    assert_builds_or_says_why("conv2d_nchw", fields, words, schedule)


# 28 x 4 tiles of 128 positions for 132 multiprocessors, without a channel too many
STRIDED = dict(n=8, h=40, w=40, ci=384, co=576, kh=3, kw=3, stride=2, pad=1), (128, 144)
FLAT = dict(n=32, h=7, w=7, ci=512, co=2048, kh=1, kw=1), (128, 208)


@pytest.mark.parametrize(
    "schedule, case",
    [("turned", STRIDED), ("spans", STRIDED), ("runs", STRIDED), ("turned", FLAT), ("spans", FLAT), ("lines", FLAT)],
)
def test_tiles_that_fit_are_tried(sm_90a: Arch, schedule: str, case: tuple[dict[str, Any], tuple[int, int]]) -> None:
    fields, tile = case
    problem: Any = problem_of("conv2d_nchw", dtype="float16", **fields)
    space = operator("conv2d_nchw").schedule(f"tma_wgmma_{schedule}").space(problem, sm_90a)
    assert tile in {(config.block_m, config.block_n) for config in space}
