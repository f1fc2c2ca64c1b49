"""NCHW convolution by TMA and wgmma: what it is made of, what it refuses, and on a device whether it is right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.tma_wgmma import TmaWgmmaConfig
from tests.conftest import assert_correct, problem_of
from tests.hopper_kernels import assert_builds_or_says_why, assert_correct_on, assert_emulated, assert_well_made

PACKED: dict[str, Any] = dict(dtype="float16", filter_layout="hwoi")
WORK: dict[str, Any] = dict(n=16, h=32, w=32, ci=256, co=256, kh=3, kw=3, pad=1, **PACKED)
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=2, h=8, w=32, ci=64, co=128, kh=3, kw=3, pad=1),
    "ragged, stride 2 down": dict(n=3, h=9, w=24, ci=24, co=70, kh=3, kw=3, pad=1, stride="2,1", bias=True),
    "asymmetric, stride 3 down, dilated": dict(
        n=1, h=15, w=40, ci=72, co=9, kh=5, kw=3, pad="2,2", stride="3,1", dilation="1,2", activation="relu"
    ),
    "narrow images": dict(n=5, h=3, w=8, ci=16, co=33, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "shifts to the right only": dict(n=2, h=5, w=16, ci=8, co=20, kh=2, kw=9, pad=0),
    "wider output": dict(n=2, h=4, w=8, ci=8, co=20, kh=1, kw=1, pad="0,4", bias=True),
    "far to both sides": dict(n=2, h=4, w=64, ci=8, co=20, kh=1, kw=3, pad="0,5", dilation="1,5"),
    "wider than a tile": dict(n=2, h=3, w=200, ci=24, co=40, kh=3, kw=3, pad=1, bias=True),
    "one long row to the right": dict(n=1, h=1, w=304, ci=16, co=64, kh=1, kw=9),
    "1x1": dict(n=3, h=5, w=8, ci=72, co=200, kh=1, kw=1, bias=True, activation="relu"),
    "1x1, rows of no whole vectors": dict(n=2, h=8, w=7, ci=40, co=24, kh=1, kw=1),
    "bfloat16": dict(n=2, h=6, w=48, ci=40, co=30, kh=3, kw=3, pad=1, bias=True, dtype="bfloat16"),
    "many tiles": dict(n=24, h=32, w=32, ci=16, co=200, kh=3, kw=3, pad=1),
}
CONFIGS: list[dict[str, Any]] = [
    dict(block_m=128, block_n=128, consumers=2, consumers_n=1, num_stages=3, cluster_m=1, cluster_n=2),
    dict(block_m=64, block_n=256, consumers=2, consumers_n=2, num_stages=3, cluster_m=2, cluster_n=1),
    dict(block_m=128, block_n=96, consumers=2, consumers_n=1, num_stages=3, cluster_m=1, cluster_n=4, grid=120),
    dict(block_m=128, block_n=64, consumers=2, consumers_n=1, num_stages=2, cluster_m=2, cluster_n=2, grid=120),
    dict(block_m=128, block_n=128, consumers=2, consumers_n=2, num_stages=2, cluster_m=4, cluster_n=1, grid=0),
    dict(block_m=192, block_n=64, consumers=3, consumers_n=1, block_k=32, num_stages=4, cluster_m=1, cluster_n=1),
    dict(block_m=64, block_n=192, consumers=3, consumers_n=3, block_k=16, num_stages=5, cluster_m=1, cluster_n=1),
    dict(block_m=64, block_n=128, consumers=1, consumers_n=1, num_stages=2, cluster_m=1, cluster_n=2, blocks_sm=2),
    dict(block_m=64, block_n=32, consumers=1, consumers_n=1, block_k=128, num_stages=2, cluster_m=1, cluster_n=1,
         grid=2),
    dict(block_m=64, block_n=256, consumers=2, consumers_n=2, block_k=32, num_stages=3, cluster_m=1, cluster_n=2,
         halo=True),
    dict(block_m=128, block_n=128, consumers=2, consumers_n=1, block_k=16, num_stages=4, cluster_m=2, cluster_n=2,
         grid=120, halo=True),
    dict(block_m=64, block_n=192, consumers=2, consumers_n=2, block_k=32, num_stages=2, cluster_m=1, cluster_n=4,
         grid=120, halo=True),
    dict(block_m=128, block_n=64, consumers=2, consumers_n=1, block_k=16, num_stages=3, cluster_m=2, cluster_n=1,
         halo=True),
    dict(block_m=64, block_n=128, consumers=2, consumers_n=2, block_k=16, num_stages=3, cluster_m=1, cluster_n=2,
         split_k=2, grid=4),
    dict(block_m=64, block_n=32, consumers=1, consumers_n=1, block_k=16, num_stages=2, cluster_m=1, cluster_n=1,
         split_k=2, grid=4, halo=True),
    dict(block_m=64, block_n=64, consumers=2, consumers_n=1, block_k=16, num_stages=3, cluster_m=1, cluster_n=2,
         grid=2, halo=True, ping_pong=True),
]  # fmt: skip
CONFIGS = [dict(block_k=64, split_k=1, halo=False) | words for words in CONFIGS]
ODD = "ragged, stride 2 down"


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PACKED | SHAPES[request.param]


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = CONFIGS[0]
    built = build(problem_of("conv2d_nchw", **WORK), sm_90a, "tma_wgmma", words)
    found, source = assert_well_made(built, "HGMMA"), str(built.sources["cu"])
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16" in source and ", p, 1, 1, 0, 1;" in source
    assert "float sums_ptr[192]" in source and not found["LDG"] and not found["STG"]
    # for each of 64 outputs of a thread one sum comes from the left and one from the right, each of every second
    assert found["SHFL"] >= 64 and source.count("= hopper_sum_") <= 64
    assert found["HGMMA"] % (4 * 3) == 0  # steps of 16 channels, taps along a row


@settings(max_examples=5)
@given(
    n=st.integers(1, 20), h=st.integers(1, 20), w=st.integers(1, 20), ci=st.integers(1, 20), co=st.integers(1, 300),
    kh=st.integers(1, 3), kw=st.integers(1, 9), stride=st.integers(1, 9), dilation=st.integers(1, 3),
    left=st.integers(0, 9), words=st.sampled_from([{}, *CONFIGS]),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, w: int, ci: int, co: int, kh: int, kw: int, stride: int, dilation: int,
    left: int, words: dict[str, Any],
) -> None:  # fmt: skip
    h, w = h + dilation * kh, 8 * w + dilation * (kw - 1) // 8 * 8
    fields = dict(n=n, h=h, w=w, ci=8 * ci, co=co, kh=kh, kw=kw, pad=(kh // 2, left), stride=(stride, 1))
    assert_builds_or_says_why("conv2d_nchw", PACKED | fields | dict(dilation=dilation, bias=True), words)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_nchw").schedule("tma_wgmma")
    for words, reason in {
        "block_n=112": "block_n=112 for consumers_n=1 holds no whole number of rows of 32 pixels",
        "consumers_n=3": "consumers_n=3 does not divide consumers=2",
        "block_n=100": "block_n=100 is not a multiple of 16 up to 256",
        "block_n=160": "block_m=128 x block_n=160 needs about 280 registers, there are 232",
        "cluster_n=4 block_m=64 consumers=1 grid=2": "grid=2 is less than a cluster of 4",
        "num_stages=4": "num_stages=4 needs",
        "halo=true": "num_stages=3 needs",
    }.items():
        given = CONFIGS[0] | dict(word.split("=") for word in words.split())
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a, given)
    with pytest.raises(ConfigError, match="halo=True at stride=.2, 1. would load rows that no tap looks at"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(stride="2,1")), sm_90a, dict(halo=True))
    for fields, reason in (
        (dict(ci=12), "ci=12 is not a multiple of 8"),
        (dict(w=36), "w=36 is not a multiple of 8"),
        (dict(pad=0), "out_w=30 is not a multiple of 8"),
        (dict(stride=2), "moves 2 pixels along a row"),
        (dict(pad=9, kw=11), "pad=9, dilation=1 reach over 9 pixels, sums shift by 8 at most"),
        (dict(kw=11), "reach over 9 pixels"),
        (dict(dtype="float32"), "dtype=float32 is not float16 or bfloat16"),
        (dict(stride="9,1"), "data is read at every element in 9, TMA reaches 8"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nchw", **WORK | fields), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), parse_arch("sm_80"))


@pytest.mark.parametrize(
    "fields", [dict(), dict(w=128, h=9, ci=64, co=64), dict(n=2, w=64, h=64), dict(kw=1, kh=1, pad=0)]
)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", **WORK | fields), operator("conv2d_nchw").schedule("tma_wgmma")
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.parametrize("shape", [shape for shape, fields in SHAPES.items() if "stride" not in fields])
def test_halo_emulated(emulation: None, shape: str) -> None:
    """The widest tile that each shape has with all kernel rows in a stage."""
    problem, spec = problem_of("conv2d_nchw", **PACKED | SHAPES[shape]), operator("conv2d_nchw").schedule("tma_wgmma")
    arch = parse_arch("sm_90a")
    halos = (config for config in spec.space(problem, arch) if config.to_json()["halo"])
    config = next((config for config in halos if config.check(problem, arch) is None), None)
    assert (config is None) == (SHAPES[shape]["kh"] == 1)
    if config:
        assert_correct(problem, arch, "tma_wgmma", config, ["emulated"])


def test_the_search_tries_few_columns_for_wide_kernels(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nchw", **WORK | dict(kw=5, pad="1,2"))
    assert isinstance(problem, NchwProblem)
    config = operator("conv2d_nchw").schedule("tma_wgmma").config_for(problem, sm_90a)
    assert isinstance(config, TmaWgmmaConfig) and 5 * config.accumulators <= 192


def test_shapes(emulation: None, cuda_compiler: None, fields: dict[str, Any]) -> None:
    found = assert_well_made(assert_emulated("conv2d_nchw", fields, {}, compiled=True), "HGMMA")
    assert bool(found["LDG"]) == fields.get("bias", False)


@pytest.mark.parametrize("words", CONFIGS[1::2], ids=str)  # the others by those of other layouts
def test_configs(emulation: None, cuda_compiler: None, words: dict[str, Any]) -> None:
    width = dict(w=64 if words["block_n"] // words["consumers_n"] % 64 == 0 else 32)
    stride = dict(stride=1) if words.get("halo") else {}
    built = assert_emulated("conv2d_nchw", PACKED | SHAPES[ODD] | width | stride, words, compiled=True)
    assert_well_made(built, "HGMMA")


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, words)
