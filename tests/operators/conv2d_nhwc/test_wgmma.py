"""NHWC convolution by wgmma as a tensor intrinsic: correct by every route, what it is made of, what it refuses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import Built, build
from schedules.build.inspect import summary, view
from schedules.build.toolchain import cuda
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.reference import normal_inputs
from schedules.core.registry import operator
from tests.conftest import assert_correct, caught, problem_of
from tests.operators.conv2d_nhwc.shapes import K100, SHAPES

CONFIGS: list[dict[str, Any]] = [
    dict(block_m=64, block_n=16, block_k=16, stages=2, min_blocks=0),
    dict(block_m=64, block_n=48, block_k=32, stages=3, min_blocks=2),
    dict(block_m=192, block_n=32, block_k=64, stages=2, min_blocks=1),
    dict(block_m=256, block_n=128, block_k=64, stages=4, min_blocks=1),
]


# each shape in one dtype, the ragged one in both
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (dtype, shape)
        for i, dtype in enumerate(["float16", "bfloat16"])
        for j, shape in enumerate(SHAPES)
        if (i + j) % 2 == 0 or shape == "ragged, stride 2"
    ],
)
def test_it_is_correct(emulation: None, sm_90a: Arch, dtype: str, shape: str) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES[shape], dtype=dtype)
    assert_correct(problem, sm_90a, "wgmma", routes=["serial", "emulated"])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES["ragged, stride 2"] | dict(ci=72), dtype="float16")
    assert_correct(problem, sm_90a, "wgmma", config, ["serial", "emulated"])


@settings(max_examples=6)
@given(
    n=st.integers(1, 3), h=st.integers(1, 5), ci=st.integers(1, 40), co=st.integers(1, 40), k=st.integers(1, 3),
    stride=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_is_correct(sm_90a: Arch, n: int, h: int, ci: int, co: int, k: int, stride: int) -> None:
    problem = problem_of(
        "conv2d_nhwc", n=n, h=h, w=h + 1, ci=ci, co=co, kh=k, kw=k, pad=k // 2, stride=stride, dtype="float16"
    )
    assert_correct(problem, sm_90a, "wgmma", CONFIGS[0], routes=["serial"])


@pytest.fixture(scope="module")
def article(cuda_compiler: None) -> Built:
    config = dict(block_m=128, block_n=256, block_k=64, stages=4, min_blocks=1)
    return build(problem_of("conv2d_nhwc", **K100[2]), parse_arch("sm_90a"), "wgmma", config)


def test_what_it_is_made_of(article: Built) -> None:
    source, kernel = str(article.sources["cu"]), summary(article)
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in source and "ldmatrix" not in source
    assert kernel.spills == 0 and kernel.registers and kernel.registers * 256 <= 65536
    # ptxas says so where wgmma cannot overlap, and then waits for each
    assert "C75" not in article.log


def test_the_next_tile_is_fetched_while_one_is_multiplied(article: Built) -> None:
    if cuda.find_tool("nvdisasm") is None:
        pytest.skip("no SASS disassembler; pip install nvidia-cuda-nvdisasm")
    order = re.findall(r"HGMMA|LDGSTS|WARPGROUP\.DEPBAR", view(article, "sass"))
    products = [at for at, name in enumerate(order) if name == "HGMMA"]
    assert len(products) == 4 and products == list(range(products[0], products[0] + 4))
    assert order[products[-1] + 1] == "LDGSTS"


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("    fence_async_proxy();\n", ""),
        ("    cp_async_wait_1();\n    ", "    "),
        ("threadIdx.y & 3", "threadIdx.y & 1"),
        ('asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");', ""),
    ],
)
def test_what_breaks_it_is_noticed(emulation: None, sm_90a: Arch, what: str, instead: str) -> None:
    problem = problem_of("conv2d_nhwc", n=2, h=8, w=8, ci=64, co=32, kh=3, kw=3, pad=1, dtype="float16")
    config = dict(block_m=128, block_n=32, block_k=32, stages=3, min_blocks=1)
    built = build(problem, sm_90a, "wgmma", config)
    source = str(built.sources["cu"])
    assert what in source
    assert caught(built, source.replace(what, instead), normal_inputs(problem, np.random.default_rng(0)))


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec = operator("conv2d_nhwc").schedule("wgmma")
    for words, reason in {
        "block_m=96": "block_m=96 is not a multiple of 64, the rows of a warpgroup",
        "block_n=24": "block_n=24 is not a multiple of 16 up to 256",
        "block_k=48": "block_k=48 is not 16, 32 or 64",
        "stages=1": "stages=1 must be at least 2",
        "stages=9": "stages=9 needs 442368 bytes of shared memory, cuda:sm_90a has 232448",
        "min_blocks=2": "block_n=256 needs about 176 registers a thread, 128 are left to it",
        "block_m=1024": "block_m=1024 and min_blocks=1 are 2048 threads a block, too many",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem_of("conv2d_nhwc", **K100[2]), sm_90a, dict([words.split("=")]))
    with pytest.raises(ConfigError, match="cuda:sm_80 has no wgmma"):
        spec.config_for(problem_of("conv2d_nhwc", **K100[2]), parse_arch("sm_80"))
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nhwc", **{**K100[2], "dtype": "float32"}), sm_90a)


@pytest.mark.parametrize("number", K100)
def test_the_space_holds_the_default(sm_90a: Arch, number: int) -> None:
    problem, spec = problem_of("conv2d_nhwc", **K100[number]), operator("conv2d_nhwc").schedule("wgmma")
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, *CONFIGS], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_device(gpu: Arch, shape: str, config: dict[str, Any]) -> None:
    if "wgmma" not in gpu.features:
        pytest.skip(f"{gpu} has no wgmma")
    problem = problem_of("conv2d_nhwc", **SHAPES[shape], dtype="float16")
    assert_correct(problem, gpu, "wgmma", config, ["device"])
