"""HWCN convolution of float32 in TF32: what it is made of, that it rounds and nothing else, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import Built, build
from schedules.check.verify import MODES, emulated_runs, judge, on_device, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import FLOAT32, TF32
from schedules.core.errors import ConfigError
from schedules.core.operator import Array
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import (
    assert_builds_or_says_why,
    assert_correct_on,
    assert_emulated,
    assert_well_made,
    to_tf32,
)

WORK: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float32")
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=64, h=3, w=4, ci=64, co=32, kh=3, kw=3, pad=1),
    "ragged, stride 2": dict(n=36, h=7, w=6, ci=13, co=43, kh=3, kw=2, pad=1, stride=2),
    "asymmetric, dilated": dict(n=4, h=9, w=6, ci=40, co=7, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2"),
    "some pixels see padding only": dict(n=20, h=1, w=2, ci=3, co=16, kh=2, kw=3, pad=3, dilation=2),
}
# what a config says of none of its own, whatever the default for the problem
PLAIN = dict(block_k=32, consumers=2, cluster_m=1, cluster_n=1, grid=132, blocks_sm=1, split_k=1)
CONFIGS: list[dict[str, Any]] = [
    dict(),
    *(
        PLAIN | words
        for words in [
            dict(block_m=256, block_n=128, num_stages=3, cluster_n=2, skip_padding=False),
            dict(block_m=64, block_n=256, block_k=64, consumers=1, num_stages=2, cluster_m=4, grid=120),
            dict(block_m=192, block_n=192, block_k=16, consumers=3, num_stages=6, grid=0),
            dict(block_m=64, block_n=64, block_k=64, consumers=1, num_stages=2, blocks_sm=2, split_k=2, grid=264),
        ]
    ),
]
SMALL: list[dict[str, Any]] = [
    PLAIN | words
    for words in [
        dict(block_m=64, block_n=16, num_stages=3, consumers=1, cluster_m=2, grid=2),
        dict(block_m=256, block_n=16, block_k=16, num_stages=2, cluster_n=2, grid=8),
        dict(block_m=64, block_n=32, block_k=64, num_stages=2, consumers=1, split_k=2, skip_padding=False),
    ]
]


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = dict(
        block_m=128, block_n=256, block_k=32, num_stages=4, consumers=2, cluster_m=2, grid=132, skip_padding=True
    )
    built = build(problem_of("conv2d_hwcn", **WORK), sm_90a, "tf32", words)
    found, source = assert_well_made(built, "HGMMA", stored_by_tma=False), str(built.sources["cu"])
    assert "wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32" in source and ", p, 1, 1;" in source
    # of a stage four steps, each by two reads; nothing beside them touches the operands on their way
    assert found["HGMMA"] == 4 and found["LDS"] == 8 and "cvt." not in source
    # the filter is read and stored by a kernel of its own; of a tile each thread has 64 pairs
    assert found["LDG"] == 8 and found["STG"] == 2 + 64
    assert len(built.resources) == 2 and built.config.block_k == 32  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", CONFIGS[1::2], ids=str)
def test_other_configs(cuda_compiler: None, sm_90a: Arch, words: dict[str, Any]) -> None:
    built = build(problem_of("conv2d_hwcn", **WORK), sm_90a, "tf32", words)
    assert_well_made(built, "HGMMA", stored_by_tma=False)


@settings(max_examples=3)
@given(
    n=st.integers(1, 40), h=st.integers(1, 20), ci=st.integers(1, 100), co=st.integers(1, 300), k=st.integers(1, 4),
    stride=st.integers(1, 9), words=st.sampled_from(CONFIGS), ragged=st.booleans(),
)  # fmt: skip
def test_check_and_build_agree(
    cuda_compiler: None, n: int, h: int, ci: int, co: int, k: int, stride: int, words: dict[str, Any], ragged: bool
) -> None:
    fields = dict(n=4 * n + ragged, h=h + k, w=h + 2, ci=ci, co=co, kh=k, kw=1, pad=k // 2, stride=stride)
    built = assert_builds_or_says_why("conv2d_hwcn", fields, words, "tf32")
    assert not (ragged and built)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_hwcn").schedule("tf32")
    base = dict(block_m=128, block_n=256, block_k=32, num_stages=4, consumers=2, cluster_m=2, cluster_n=1)
    for words, reason in (
        (dict(block_k=8), "block_k=8 is one step of wgmma, of which two take turns"),
        (dict(block_m=192, block_n=192, consumers=3), "needs about 160 registers, there are 152"),
        (dict(block_m=64, consumers=1, cluster_n=4, cluster_m=1), "block_m=64 is not cluster_n=4 times a multiple"),
        (dict(num_stages=5), "num_stages=5 needs 245840 bytes of shared memory"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_hwcn", **WORK), sm_90a, base | words)
    for fields, reason in (
        (dict(n=6), "n=6 is not a multiple of 4, which TMA needs"),
        (dict(dtype="float16"), "dtype=float16 is not float32"),
        (dict(n=2048, h=64, w=64, ci=4, co=256), "output has 2\\*\\*31 elements or more"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_hwcn", **WORK | fields), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem_of("conv2d_hwcn", **WORK), parse_arch("sm_80"))


def test_it_is_only_used_where_it_is_named(sm_90a: Arch) -> None:
    problem, op = problem_of("conv2d_hwcn", **WORK), operator("conv2d_hwcn")
    spec = op.schedule("tf32")
    assert spec.opt_in and spec not in op.offered(sm_90a) and op.choose(problem, sm_90a) == "winograd"
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


# ---- values


@pytest.mark.parametrize(
    ("shape", "words"),
    [*((shape, SMALL[0]) for shape in SHAPES), *(("ragged, stride 2", words) for words in SMALL[1:])],
)
def test_emulated(emulation: None, shape: str, words: dict[str, Any]) -> None:
    assert_emulated("conv2d_hwcn", SHAPES[shape], words, "tf32")


def rounded_only(built: Built, arrays: list[Array], got: Array) -> bool:
    """Whether `got` is what float32 sums of the rounded operands come to, and not of the operands."""
    of_rounded = judge(built.problem, [to_tf32(array) for array in arrays], [got], arithmetic=FLOAT32)
    return of_rounded.passed and not judge(built.problem, arrays, [got], arithmetic=FLOAT32).passed


def test_rounding_is_all_that_is_lost(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"])
    built = build(problem, sm_90a, "tf32", SMALL[0], device_code=False)
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    ((_, run),) = emulated_runs(built, str(built.sources["cu"]), MODES[:1])
    (got,) = run([*arrays, *poisoned(problem)])
    assert rounded_only(built, arrays, got)
    # what is rounded away of a product of two is within what is allowed, and near it
    one = problem_of("conv2d_hwcn", n=4, h=1, w=1, ci=1, co=4, kh=1, kw=1)
    halfway = [np.full(a.shape, 1 + 2.0**-11 - 2.0**-23, "float32") for a in one.arguments()]
    assert 0.8 < judge(one, halfway[:2], [to_tf32(halfway[2]) ** 2], arithmetic=TF32).error < 1


@pytest.mark.gpu
@pytest.mark.parametrize("words", [*CONFIGS, *SMALL], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_device(gpu: Arch, shape: str, words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_hwcn", SHAPES[shape], words, "tf32")


@pytest.mark.gpu
def test_tma_rounds_on_a_device(gpu: Arch) -> None:
    if "wgmma" not in gpu.features:
        pytest.skip(f"{gpu} has no wgmma")
    problem = problem_of("conv2d_hwcn", **SHAPES["whole tiles"])
    built = build(problem, gpu, "tf32")
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    (got,) = on_device(built, problem, gpu)([*arrays, *poisoned(problem)])
    assert rounded_only(built, arrays, got)
