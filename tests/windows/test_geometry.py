"""Addresses of a tile: what lanes read lies in the stage, and is the element that the reduction means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules.core.arch import parse_arch
from schedules.windows.config import WindowsConfig
from schedules.windows.geometry import OCTET, STEP, Windows
from tests.conftest import problem_of

OPERATORS = {"conv2d_nhwc": "float16", "conv2d_nchw": "bfloat16", "conv2d_nchw32": "int8"}


def windows(name: str, config: WindowsConfig, **fields: Any) -> Windows:
    given = dict(n=2, h=40, w=48, ci=3, co=64, kh=3, kw=3, dtype=OPERATORS[name]) | fields
    return Windows(problem_of(name, **given), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fields", "channels", "lead", "units"),
    [
        ("conv2d_nhwc", dict(stride=2, kh=7, kw=7, pad=3), 3, 1, 11),  # 9 elements of padding: one more leads
        ("conv2d_nhwc", dict(stride=2, kh=7, kw=7, pad=2), 3, 0, 11),
        ("conv2d_nhwc", dict(pad=1), 4, 0, 6),  # a window of three channels would start amid a word
        ("conv2d_nhwc", dict(ci=1, pad=1), 2, 0, 3),
        ("conv2d_nhwc", dict(kh=1, kw=1, ci=2), 2, 0, 3),  # four units reach over two rows at most
        ("conv2d_nchw", dict(stride=2, kh=7, kw=7, pad=3), 3, 1, 11),
        ("conv2d_nchw", dict(stride=2, kh=7, kw=7, pad=3, w=49), 3, 0, 11),
        ("conv2d_nchw32", dict(pad=1), 4, 0, 3),
        ("conv2d_nchw32", dict(ci=5, pad=1), 8, 0, 6),
    ],
)
def test_windows_start_at_whole_words(name: str, fields: dict[str, Any], channels: int, lead: int, units: int) -> None:
    w = windows(name, WindowsConfig(), **fields)
    assert (w.channels, w.lead, w.row_units) == (channels, lead, units)


@pytest.mark.parametrize(
    ("fields", "period", "periods"),
    [
        (dict(kh=7, kw=7, stride=2), 10, 1),
        (dict(kh=16, kw=16, stride=16), 3, 16),
        (dict(kh=11, kw=11, stride=4), 9, 3),  # 18 units, not 17, to a row: nine steps are four rows
    ],
)
def test_long_kernels_are_loops(fields: dict[str, Any], period: int, periods: int) -> None:
    w = windows("conv2d_nhwc", WindowsConfig(tile_w=8, warps_m=1), **fields)
    assert (w.period, w.periods) == (period, periods)
    assert periods == 1 or w.period * STEP == w.period_rows * w.row_units


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(OPERATORS)), ci=st.integers(1, 14), k=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    stride=st.integers(1, 5), pad=st.integers(0, 4), dilation=st.integers(1, 2), tile_h=st.integers(1, 6),
    octets=st.integers(1, 4), warps_m=st.sampled_from([1, 2, 4]), width=st.integers(40, 48),
)  # fmt: skip
def test_what_lanes_read_lies_in_the_stage(
    name: str, ci: int, k: tuple[int, int], stride: int, pad: int, dilation: int, tile_h: int, octets: int,
    warps_m: int, width: int,
) -> None:  # fmt: skip
    config = WindowsConfig(tile_h, 8 * octets, 64, warps_m, 1, 1, 1, 0)
    fields = dict(w=width, ci=ci, kh=k[0], kw=k[1], stride=stride, pad=pad, dilation=f"{dilation},1")
    w = windows(name, config, **fields)
    assume(config.check(w.problem, parse_arch("sm_90a")) is None)
    p, last = w.problem, 0
    base = (w.shift - w.lead) // w.unit
    rows = w.periods * w.period_rows if w.periods > 1 else p.kh
    for unit in range(w.steps * STEP):
        ry, of_row = divmod(unit, w.row_units)
        if ry >= rows:  # beyond: the last row goes on
            ry, of_row = rows - 1, unit - (rows - 1) * w.row_units
            if of_row // 4 * 4 >= w.row_units + 4:
                continue
        row = (tile_h - 1) * p.stride[0] + ry * p.dilation[0]
        last = max(last, row * w.pitch + base + (config.tile_w - 1) * w.pixel_words + of_row)
    assert last < w.patch_words and base >= 0
    whole = w.pixels * w.channels * w.item if w.pixels > 1 else max(4, w.vector)  # bytes of a piece
    assert w.pitch * 4 % whole == 0 and w.patch_words % 4 == 0
    # a kernel row's elements are those of its window, and rows do not run into each other
    reach = base * w.unit + w.lead + ((config.tile_w - 1) * p.stride[1] + p.kw) * w.channels
    assert reach <= w.pitch * w.unit and w.lead + p.kw * w.channels <= w.row_units * w.unit
    assert w.pixel_octets * warps_m * OCTET == tile_h * config.tile_w
