"""NCHW convolution of few filters by TMA and wgmma: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.few_tiles import FewWork
from tests.conftest import caught, problem_of
from tests.hopper_kernels import assert_builds_or_says_why, assert_correct_on, assert_emulated, assert_well_made

NAME = "tma_wgmma_few"
PACKED: dict[str, Any] = dict(dtype="float16", filter_layout="hwoi")
WORK: dict[str, Any] = dict(n=16, h=64, w=64, ci=128, co=27, kh=3, kw=3, pad=1, **PACKED)
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=64, ci=64, co=32, kh=3, kw=3, pad=1),
    "ragged": dict(n=3, h=7, w=40, ci=24, co=27, kh=3, kw=3, pad=1, bias=True),
    "one filter, dilated": dict(n=1, h=9, w=32, ci=72, co=1, kh=5, kw=3, pad="2,2", dilation="2,2", activation="relu"),
    "a warp is a row": dict(n=2, h=5, w=8, ci=16, co=9, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "rows of two wgmmas": dict(n=2, h=3, w=128, ci=16, co=12, kh=3, kw=3, pad=1, bias=True),
    "rows of three wgmmas": dict(n=1, h=4, w=168, ci=24, co=8, kh=2, kw=3, pad=1),
    "eight to the right": dict(n=2, h=5, w=16, ci=8, co=5, kh=2, kw=9, pad=0),
    "eight to both sides": dict(n=2, h=4, w=64, ci=8, co=20, kh=1, kw=3, pad="0,8", dilation="1,8"),
    "wider output": dict(n=2, h=4, w=8, ci=8, co=20, kh=1, kw=1, pad="0,4", bias=True),
    "1x1": dict(n=3, h=5, w=8, ci=72, co=30, kh=1, kw=1, bias=True, activation="relu"),
    "bfloat16": dict(n=2, h=6, w=64, ci=40, co=13, kh=3, kw=3, pad=1, bias=True, dtype="bfloat16"),
    "many tiles": dict(n=70, h=8, w=64, ci=16, co=4, kh=3, kw=3, pad=1),
}
CONFIGS: list[dict[str, Any]] = [
    dict(block_m=256, consumers=2, num_stages=2, block_k=64),
    dict(block_m=256, consumers=2, num_stages=4, block_k=32, cluster_m=2),
    dict(block_m=512, consumers=2, num_stages=3, block_k=32, cluster_m=4, grid=120),
    dict(block_m=192, consumers=3, num_stages=2, block_k=64, grid=0),
    dict(block_m=64, consumers=1, num_stages=4, block_k=16, grid=2),
    dict(block_m=64, consumers=1, num_stages=2, block_k=32, blocks_sm=2, grid=264),
    dict(block_m=64, consumers=1, num_stages=2, block_k=64),
    dict(block_m=256, consumers=2, num_stages=3, block_k=16, split_k=2, grid=4),
    dict(block_m=128, consumers=3, num_stages=3, block_k=32, ping_pong=True, stationary=True, grid=1),
    dict(block_m=64, consumers=1, num_stages=2, block_k=128, stationary=True),
]
ODD = "bfloat16"


def columns(fields: dict[str, Any], unit: int) -> int:
    """Of all taps along a row, output channels rounded up to `unit`."""
    return -(-fields["kw"] * -(-fields["co"] // unit) * unit // 8) * 8


def whole(words: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`words`, where blocks of a cluster share channels in whole groups of them, which then have to be whole."""
    return words | dict(block_n=columns(fields, 8)) if "cluster_m" in words else words


# where channels rounded up to 4 make fewer columns, of which a tap's begin in the middle of a group
HALVES = {name: fields for name, fields in SHAPES.items() if columns(fields, 4) < columns(fields, 8)}


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PACKED | SHAPES[request.param]


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    config = CONFIGS[0] | dict(block_n=96, cluster_m=1, ping_pong=False)
    built = build(problem_of("conv2d_nchw", **WORK), sm_90a, NAME, config)
    found, source = assert_well_made(built, "HGMMA"), str(built.sources["cu"])
    assert "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16" in source and ", p, 1, 1, 1, 0;" in source
    assert not found["LDG"] and not found["STG"] and found["STSM"] + found["STS"] > 0
    # 16 steps of channels and kernel rows would be nine taps' if the pixels were loaded for each
    assert found["HGMMA"] % (4 * 3 * 2) == 0 and found["UTMALDG"] == 2


@settings(max_examples=5)
@given(
    n=st.integers(1, 20), h=st.integers(1, 20), w=st.integers(1, 20), ci=st.integers(1, 20), co=st.integers(1, 100),
    kh=st.integers(1, 3), kw=st.integers(1, 9), dilation=st.integers(1, 3), left=st.integers(0, 9),
    words=st.sampled_from([{}, *CONFIGS]),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, w: int, ci: int, co: int, kh: int, kw: int, dilation: int, left: int,
    words: dict[str, Any],
) -> None:  # fmt: skip
    h, w = h + dilation * kh, 8 * w + dilation * (kw - 1) // 8 * 8
    fields = dict(n=n, h=h, w=w, ci=8 * ci, co=co, kh=kh, kw=kw, pad=(kh // 2, left), dilation=dilation, bias=True)
    assert_builds_or_says_why("conv2d_nchw", PACKED | fields, words, NAME)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_nchw").schedule(NAME)
    for words, reason in {
        "block_n=80": "block_n=80 is not 96 or 88, kw=3 times co=27 rounded up to 8 or 4",
        "block_n=88 cluster_m=2": "co=27 rounded up to 28 is not cluster_m=2 times a multiple of 8",
        "cluster_n=2": "cluster_n=2 is not 1, a block has all filters",
        "block_m=320 consumers=1": "block_m=320 x block_n=96 needs about 280 registers, there are 255",
        "num_stages=3": "num_stages=3 needs",
        "grid=-1": "grid=-1 must be at least 0",
        "consumers=0": "consumers=0 must be at least 1",
    }.items():
        given = CONFIGS[0] | dict(block_n=96) | dict(word.split("=") for word in words.split())
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a, given)
    for fields, config, reason in (
        (dict(ci=12), {}, "ci=12 is not a multiple of 8"),
        (dict(w=36), {}, "w=36 is not a multiple of 8"),
        (dict(pad=0), {}, "out_w=62 is not a multiple of 8"),
        (dict(stride="2,1"), {}, "stride=.2, 1. is not 1"),
        (dict(kw=11), {}, "reach over 9 pixels"),
        (dict(w=128), dict(block_m=192, consumers=1), "gives each consumer no whole number of rows of 128 pixels"),
        (dict(co=4), dict(cluster_m=2), "co=4 rounded up to 8 is not cluster_m=2 times a multiple of 8"),
        (dict(co=100), {}, "block_n=312 is not a multiple of 8 up to 256"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK | fields), sm_90a, config)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), parse_arch("sm_80"))


@pytest.mark.parametrize("fields", [dict(), dict(n=2, ci=320, co=4), dict(w=128, co=64)])
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", **WORK | fields), operator("conv2d_nchw").schedule(NAME)
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


def test_what_it_serves(sm_90a: Arch) -> None:
    def serves(**fields: Any) -> bool:
        return operator("conv2d_nchw").schedule(NAME).serves(problem_of("conv2d_nchw", **WORK | fields), sm_90a)

    assert serves() and serves(co=4) and not (serves(co=256) or serves(stride="2,1") or serves(w=60))


def test_shapes(emulation: None, cuda_compiler: None, fields: dict[str, Any]) -> None:
    found = assert_well_made(assert_emulated("conv2d_nchw", fields, {}, NAME, compiled=True), "HGMMA")
    assert bool(found["LDG"]) == fields.get("bias", False)


@pytest.mark.parametrize("words", CONFIGS[::2], ids=str)  # the others with half groups
def test_configs(emulation: None, cuda_compiler: None, words: dict[str, Any]) -> None:
    # biases are kept in registers, of which the widest tile has none to spare
    fields = PACKED | SHAPES[ODD] | dict(co=27, bias=words["block_m"] < 512)
    assert_well_made(assert_emulated("conv2d_nchw", fields, words | dict(block_n=96), NAME, compiled=True), "HGMMA")


@pytest.mark.parametrize("name", HALVES)
def test_half_groups_emulated(emulation: None, name: str) -> None:
    fields = PACKED | HALVES[name]
    assert_emulated("conv2d_nchw", fields, dict(block_n=columns(fields, 4)), NAME)


@pytest.mark.parametrize("words", [words for words in CONFIGS if "cluster_m" not in words][1::2], ids=str)
def test_configs_of_half_groups_emulated(emulation: None, words: dict[str, Any]) -> None:
    fields = PACKED | SHAPES[ODD] | dict(co=27, bias=words["block_m"] < 512)
    assert_emulated("conv2d_nchw", fields, words | dict(block_n=88), NAME)


def test_half_groups_load_less(cuda_compiler: None, sm_90a: Arch) -> None:
    """Spare rows of the filters' tile, from 84 to 88, are neither loaded nor expected."""
    problem, spec = problem_of("conv2d_nchw", **WORK), operator("conv2d_nchw").schedule(NAME)
    work = FewWork(problem, spec.config_for(problem, sm_90a, CONFIGS[6] | dict(block_n=88)))
    assert work.b.nbytes == 3 * 88 * 64 * 2 and work.b.loaded == 3 * 84 * 64 * 2
    built = build(problem, sm_90a, NAME, work.config)
    found = assert_well_made(built, "HGMMA")
    assert found["SHFL"] > 0 and found["UTMALDG"] == 1 + 3


def test_stages_of_two_runs_of_channels(emulation: None) -> None:
    """A box brings one run of a kernel row's taps, and stages lie behind each other without room between them."""
    fields = PACKED | dict(n=1, h=3, w=64, ci=320, co=4, kh=3, kw=3, pad=1)
    assert_emulated("conv2d_nchw", fields, dict(block_m=64, consumers=1, num_stages=3, block_k=128), NAME)


def test_a_missing_barrier_is_noticed(emulation: None, sm_90a: Arch) -> None:
    """Without the one between handing sums over and taking them, neighbours read what is not there yet."""
    problem = problem_of("conv2d_nchw", **PACKED | SHAPES["whole tiles"])
    words = dict(block_m=64, block_n=96, block_k=64, num_stages=7, consumers=3, cluster_m=4, grid=120)
    built = build(problem, sm_90a, NAME, dict(words, ping_pong=True, stationary=True), device_code=False)
    source = str(built.sources["cu"])
    barriers = list(re.finditer(r"^ +tvm_builtin_ptx_bar_sync\w*\(.*\);$", source, re.M))
    first = barriers[0]
    arrays = operator("conv2d_nchw").inputs(problem, np.random.default_rng(0))
    assert caught(built, source[: first.start()] + source[first.end() :], arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, whole(words, fields), NAME)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *(words for words in CONFIGS if "cluster_m" not in words)], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_half_groups_on_a_device(gpu: Arch, name: str, words: dict[str, Any]) -> None:
    fields = PACKED | HALVES[name]
    assert_correct_on(gpu, "conv2d_nchw", fields, words | dict(block_n=columns(fields, 4)), NAME)
