"""What configs of `mma_windows` are legal, which are tried, and where the rule takes the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import problem_of

STEM: dict[str, Any] = dict(n=32, h=224, w=224, ci=3, co=64, kh=7, kw=7, stride=2, pad=3)
DTYPES = {"conv2d_nhwc": "float16", "conv2d_nchw": "bfloat16", "conv2d_nchw32": "int8"}


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_nhwc").schedule("mma_windows")
    base = dict(
        tile_h=16, tile_w=16, block_n=64, warps_m=4, warps_n=1, num_stages=1, blocks_sm=2, grid=264
    )  # fmt: skip
    for words, reason in (
        (dict(tile_h=0), "tile_h=0 must be at least 1"),
        (dict(num_stages=3), "num_stages=3 is not 1 or 2"),
        (dict(tile_w=12), "tile_w=12 is not a multiple of 8, the rows of a fragment"),
        (dict(warps_m=32, warps_n=2), "warps_m=32 x warps_n=2 is more than 32 warps"),
        (dict(block_n=40, warps_n=2), "block_n=40 is not a multiple of 8 for each of warps_n=2"),
        (dict(tile_h=1), "tile_h=1 x tile_w=16 is not a multiple of 8 pixels for each of 4 warps"),
        (dict(tile_h=5, tile_w=48, warps_m=6), "tile_w=48 and the 40 pixels of a warp do not divide one another"),
        (dict(tile_h=2), "tile_h=2 leaves a warp 8 rows, not a multiple of 16"),
        (dict(blocks_sm=4), "blocks_sm=4 of 128 threads with about 220 registers do not fit"),
        (
            dict(tile_h=1, tile_w=32, warps_m=1, block_n=768, warps_n=16, blocks_sm=1),
            "bytes of shared memory, blocks_sm=1",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nhwc", **STEM, dtype="float16"), sm_90a, base | words)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("conv2d_nhwc", dict(dtype="float32"), "dtype=float32 is not float16, bfloat16 or int8"),
        ("conv2d_nhwc", dict(dilation=2), "dilation=2 along a row leaves gaps in a window"),
        ("conv2d_nhwc", dict(n=2**14), "2\\*\\*31 elements or more, which 32-bit indices do not reach"),
        ("conv2d_nchw32", dict(ci=40), "ci=40 is more than one group of channels"),
    ],
)
def test_problems_that_are_refused(sm_90a: Arch, name: str, fields: dict[str, Any], reason: str) -> None:
    spec, problem = operator(name).schedule("mma_windows"), problem_of(name, **STEM | dict(dtype=DTYPES[name]) | fields)
    assert not spec.serves(problem, sm_90a)
    with pytest.raises(ConfigError, match=reason):
        spec.config_for(problem, sm_90a)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("fields", [dict(), dict(h=9, w=9, n=1, co=3), dict(kh=16, kw=16, stride=16, pad=0, co=768)])
def test_the_space_holds_the_default(sm_90a: Arch, name: str, fields: dict[str, Any]) -> None:
    spec, problem = operator(name).schedule("mma_windows"), problem_of(name, **STEM | dict(dtype=DTYPES[name]) | fields)
    config = spec.config_for(problem, sm_90a)
    assert config in set(spec.space(problem, sm_90a)) and len(spec.numbered_space(problem, sm_90a)) <= 1152


@pytest.mark.parametrize(
    ("name", "fields", "arch", "chosen"),
    [
        ("conv2d_nhwc", dict(), "sm_90a", True),
        ("conv2d_nhwc", dict(ci=15), "sm_80", True),
        ("conv2d_nhwc", dict(ci=16), "sm_90a", False),  # fills a step
        ("conv2d_nhwc", dict(), "sm_75", False),
        ("conv2d_nhwc", dict(dilation=2), "sm_90a", False),
        ("conv2d_nchw", dict(), "sm_90a", True),
        ("conv2d_nchw", dict(dtype="float32"), "sm_90a", False),
        ("conv2d_nchw32", dict(), "sm_90a", True),
        ("conv2d_nchw32", dict(ci=32), "sm_90a", False),
    ],
)
def test_the_rule(name: str, fields: dict[str, Any], arch: str, chosen: bool) -> None:
    problem = problem_of(name, **STEM | dict(dtype=DTYPES[name]) | fields)
    assert (operator(name).choose(problem, parse_arch(arch)) == "mma_windows") == chosen
