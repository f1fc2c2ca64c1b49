"""HWCN convolution by TMA and wgmma: what it is made of, what it refuses, and on a device whether it is right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.hopper.cost import microseconds
from schedules.operators.conv2d_hwcn.tma_wgmma import HwcnWork, TmaWgmmaConfig
from tests.conftest import problem_of
from tests.hopper_kernels import (
    assert_builds_or_says_why,
    assert_correct_on,
    assert_emulated,
    assert_well_made,
    to_be_waited_for,
)

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float16")
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=64, h=3, w=3, ci=64, co=128, kh=3, kw=3, pad=1, dtype="float16"),
    "ragged, stride 2": dict(n=24, h=7, w=6, ci=13, co=40, kh=3, kw=2, pad=1, stride=2, dtype="bfloat16"),
    "asymmetric, stride 3, dilated": dict(
        n=8, h=9, w=6, ci=72, co=8, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2", dtype="float16"
    ),
    "some pixels see padding only": dict(n=16, h=1, w=2, ci=40, co=16, kh=2, kw=3, pad=3, dilation=2, dtype="float16"),
    "1x1": dict(n=200, h=5, w=3, ci=72, co=200, kh=1, kw=1, dtype="float16"),
    "boxes of pixels": dict(n=16, h=6, w=5, ci=24, co=130, kh=3, kw=3, pad=1, bias=True, dtype="float16"),
    "odd batch, few channels": dict(
        n=13, h=9, w=8, ci=3, co=61, kh=7, kw=5, pad="3,1", stride=2, residual=True, dtype="float16"
    ),
    "odd batch, turned": dict(n=26, h=5, w=6, ci=44, co=61, kh=3, kw=3, pad=1, residual=True, dtype="bfloat16"),
    "few images": dict(n=3, h=9, w=7, ci=40, co=30, kh=3, kw=3, pad=1, stride=2, dtype="float16"),
    "one image, one channel": dict(n=1, h=10, w=14, ci=80, co=1, kh=3, kw=3, pad=1, stride=2, dtype="float16"),
    "phases, a few runs": dict(n=130, h=3, w=2, ci=64, co=72, kh=3, kw=3, pad=1, bias=True, dtype="float16"),
    "many tiles": dict(n=256, h=9, w=11, ci=64, co=256, kh=3, kw=3, pad=1, dtype="float16"),
}
# what a config says of none of its own, whatever the default for the problem
PLAIN = dict(
    block_k=64, cluster_m=2, cluster_n=1, grid=132, blocks_sm=1, split_k=1, ping_pong=False, stationary=False,
    skip_padding=True, window=False, turned=False, lines=1,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    dict(),
    *(
        PLAIN | words
        for words in [
            dict(block_m=128, block_n=256, consumers=2, num_stages=4),
            dict(block_m=128, block_n=256, consumers=2, num_stages=4, skip_padding=False),
            dict(block_m=256, block_n=128, consumers=2, num_stages=3, cluster_m=1, cluster_n=2),
            dict(block_m=192, block_n=128, consumers=3, num_stages=4, cluster_m=1),
            dict(block_m=64, block_n=256, consumers=1, block_k=128, num_stages=2, cluster_m=4, grid=120),
            dict(block_m=128, block_n=128, consumers=2, block_k=32, num_stages=6, cluster_m=2, cluster_n=2, grid=120),
            dict(block_m=128, block_n=64, consumers=2, block_k=16, num_stages=5, cluster_m=1, grid=0),
            dict(block_m=64, block_n=128, consumers=1, num_stages=3, blocks_sm=2, grid=264),
            dict(block_m=128, block_n=128, consumers=2, num_stages=2, cluster_m=2, grid=2),
            dict(block_m=128, block_n=96, consumers=2, num_stages=4, turned=True, cluster_m=1),
            dict(block_m=64, block_n=96, consumers=1, num_stages=3, turned=True, cluster_m=1, block_k=96),
            dict(block_m=128, block_n=128, consumers=2, num_stages=3, block_k=32, cluster_m=1, cluster_n=2),
            dict(block_m=64, block_n=64, consumers=3, num_stages=4, cluster_m=1, grid=5, ping_pong=True),
            dict(block_m=128, block_n=64, consumers=2, num_stages=2, block_k=16, grid=4, lines=2),
            dict(
                block_m=128,
                block_n=128,
                consumers=2,
                num_stages=3,
                cluster_m=1,
                split_k=2,
                block_k=16,
                skip_padding=False,
            ),
        ]
    ),
]


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    tile = dict(block_m=128, block_n=256, cluster_m=2, cluster_n=1, skip_padding=True)
    built = build(problem_of("conv2d_hwcn", **WORK), sm_90a, "tma_wgmma", tile)
    found, source = assert_well_made(built, "HGMMA"), str(built.sources["cu"])
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in source and ", p, 1, 1, 1, 1;" in source
    assert "first_ry" in source and not found["LDG"] and not found["STG"]
    whole = build(problem_of("conv2d_hwcn", **WORK), sm_90a, "tma_wgmma", dict(tile, skip_padding=False))
    assert "first_ry" not in str(whole.sources["cu"])


@settings(max_examples=5)
@given(
    n=st.integers(1, 40), h=st.integers(1, 20), ci=st.integers(1, 100), co=st.integers(1, 40), k=st.integers(1, 4),
    stride=st.integers(1, 9), dilation=st.integers(1, 3), words=st.sampled_from(CONFIGS), ragged=st.booleans(),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, ci: int, co: int, k: int, stride: int, dilation: int, words: dict[str, Any],
    ragged: bool,
) -> None:  # fmt: skip
    reach = dilation * (k - 1) + 1
    fields = dict(n=8 * n + ragged, h=h + reach, w=h + 2, ci=ci, co=8 * co - ragged, kh=k, kw=1, pad=k // 2)
    words_of = fields | dict(stride=stride, dilation=dilation, dtype="float16")
    assert_builds_or_says_why("conv2d_hwcn", words_of, words)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_hwcn").schedule("tma_wgmma")
    for words, reason in {
        "block_n=16": "block_n=16 is not cluster_m=2 boxes of images and pixels",
        "block_k=192": "block_k=192 is over 128, with window=false",
        "block_k=48 turned=true": "block_k=48 is not 16, 32, 64, 96, 128, with turned=true",
        "window=true": "block_k=64 is not over 192, the products of all taps or of a kernel row's",
        "window=true turned=true": "window=true takes taps as they lie, turned=true has the channels between them",
        "cluster_n=4 cluster_m=1": "block_m=128 is not cluster_n=4 times a multiple of 64",
        "num_stages=5": "num_stages=5 needs 278608 bytes of shared memory",
        "lines=15": "lines=15 of a tile are more than the 14 of an image",
        "lines=2 window=true": "window=true takes taps as they lie, lines=2 share what their kernel rows look at",
        "lines=2 split_k=2": "split_k=2 has no way to add sums of lines=2, give 1",
        "lines=2": "block_m=128 x block_n=256 needs about 304 registers",
        "stationary=true": "stationary=true keeps filters as operand b, here they are operand a",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_hwcn", **WORK), sm_90a, dict(word.split("=") for word in words.split()))
    for fields, reason in ((dict(dtype="float32"), "dtype=float32 is not float16 or bfloat16"),):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_hwcn", **WORK | fields), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem_of("conv2d_hwcn", **WORK), parse_arch("sm_80"))


def test_the_estimate_hides_the_end_of_tiles_in_turn(sm_90a: Arch) -> None:
    tile = dict(block_m=64, block_n=256, num_stages=4)
    problem = problem_of("conv2d_hwcn", **WORK)
    one, in_turn = (
        microseconds(HwcnWork(problem, TmaWgmmaConfig(**(PLAIN | tile | words))), sm_90a.device)
        for words in (dict(consumers=1), dict(consumers=2, ping_pong=True))
    )
    assert in_turn < one


def test_the_space_holds_the_default(sm_90a: Arch) -> None:
    problem, spec = problem_of("conv2d_hwcn", **WORK), operator("conv2d_hwcn").schedule("tma_wgmma")
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.parametrize(
    ("fields", "serves"), [(dict(), True), (dict(n=13, co=36), True), (dict(dtype="float32"), False)]
)
def test_what_it_serves(sm_90a: Arch, fields: dict[str, Any], serves: bool) -> None:
    problem, spec = problem_of("conv2d_hwcn", **WORK | fields), operator("conv2d_hwcn").schedule("tma_wgmma")
    assert spec.serves(problem, sm_90a) == serves


# tiles of several lines: shared by a cluster whole or in parts, beyond the image, of several runs and phases
LINES: list[tuple[str, dict[str, Any]]] = [
    (shape, PLAIN | dict(block_m=128, consumers=2, num_stages=2, cluster_m=1, grid=4) | words)
    for shape, words in (
        ("boxes of pixels", dict(block_n=48, block_k=16, cluster_m=2, lines=4)),
        ("asymmetric, stride 3, dilated", dict(block_m=64, block_n=16, block_k=32, lines=3, ping_pong=True)),
        ("phases, a few runs", dict(block_n=144, block_k=16, cluster_n=2, lines=2)),
        ("odd batch, turned", dict(block_n=80, block_k=32, lines=2, turned=True)),
    )
]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        *((shape, {}) for shape in SHAPES),
        *(("ragged, stride 2", words) for words in CONFIGS[2::2]),  # the others by those of other layouts
        (
            "one image, one channel",
            PLAIN
            | dict(
                block_m=128,
                block_n=128,
                block_k=48,
                num_stages=3,
                consumers=2,
                cluster_m=4,
                grid=120,
                ping_pong=True,
                skip_padding=False,
            ),
        ),
        (
            "whole tiles",
            PLAIN | dict(block_m=64, block_n=64, block_k=16, num_stages=4, consumers=1, cluster_m=1, split_k=4, grid=4),
        ),
        *LINES,
    ],
)
def test_right_and_well_made(emulation: None, cuda_compiler: None, shape: str, words: dict[str, Any]) -> None:
    built = assert_emulated("conv2d_hwcn", SHAPES[shape], words, compiled=True)
    if len(built.resources) == 1:
        assert_well_made(built, "HGMMA", stored_by_tma=SHAPES[shape]["n"] % 8 == 0 and not words.get("turned"))
    else:
        to_be_waited_for(built)
    assert all(kernel.spill_stores == kernel.spill_loads == 0 for kernel in built.resources)


@pytest.mark.gpu
@pytest.mark.parametrize("words", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_device(gpu: Arch, shape: str, words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_hwcn", SHAPES[shape], words)
