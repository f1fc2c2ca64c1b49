"""NHWC convolution on matrix cores: correct by every route, and made of the instructions it is meant to be made of."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import Built, build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nhwc.mma import space
from schedules.steps.tensor_core import TensorCoreConfig
from tests.amd import assert_fits, loops
from tests.conftest import EMULATED_ARCHES, assert_correct, problem_of
from tests.operators.conv2d_nhwc.shapes import K100, SHAPES

SMALL: dict[str, Any] = dict(block_m=32, block_n=32, block_k=32, warps_m=2, warps_n=1)


# each shape on sm_75 and sm_90a, and on sm_80 in one of its dtypes
@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        (arch, dtype, shape)
        for i, shape in enumerate(SHAPES)
        for arch, dtype in (("sm_75", "float16"), ("sm_80", ("float16", "bfloat16")[i % 2]), ("sm_90a", "float16"))
    ],
)
def test_mma_is_correct(emulation: None, arch: str, dtype: str, shape: str) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES[shape], dtype=dtype)
    assert_correct(problem, parse_arch(arch), "mma", routes=["emulated"])


@pytest.mark.parametrize(("arch", "shape"), [(f"gfx9{('0a', '42')[i % 2]}", shape) for i, shape in enumerate(SHAPES)])
def test_mfma_is_correct(arch: str, shape: str) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES[shape], dtype="float16")
    assert_correct(problem, parse_arch(arch), "mma", routes=["serial"])


@pytest.mark.parametrize(
    "config",
    [
        dict(block_m=64, block_n=8, warps_m=4, warps_n=1),
        dict(block_m=16, block_n=16, warps_m=1, warps_n=1, block_k=64, stages=3),
        dict(block_m=32, block_n=96, warps_m=1, warps_n=2, stages=2),
        dict(block_m=64, block_n=16, warps_m=2, warps_n=2, stages=6, min_blocks=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nhwc", **SHAPES["ragged, stride 2"], dtype="float16")
    assert_correct(problem, sm_90a, "mma", config, ["serial", "emulated"])


@settings(max_examples=8)
@given(
    n=st.integers(1, 3), h=st.integers(1, 5), ci=st.integers(1, 40), co=st.integers(1, 40), k=st.integers(1, 3),
    stride=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_is_correct(sm_90a: Arch, n: int, h: int, ci: int, co: int, k: int, stride: int) -> None:
    problem = problem_of(
        "conv2d_nhwc", n=n, h=h, w=h + 1, ci=ci, co=co, kh=k, kw=k, pad=k // 2, stride=stride, dtype="float16"
    )
    assert_correct(problem, sm_90a, "mma", SMALL, routes=["serial"])


@pytest.fixture(scope="module")
def article(cuda_compiler: None) -> Built:
    return build(problem_of("conv2d_nhwc", **K100[2]), parse_arch("sm_90a"), "mma")


def test_what_it_is_made_of(article: Built) -> None:
    ptx, source = str(article.sources["ptx"]), str(article.sources["cu"])
    counts = summary(article).counts
    assert "cp.async.cg.shared.global [%r" in ptx and re.search(r"cp\.async\.cg\.shared\.global \[.*\], 16,", ptx)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert counts["global store 128-bit"] == counts.get("global store", 0) + counts["global store 128-bit"]
    assert "global load" not in counts and "local load (spill or indexed)" not in counts
    # a 64 x 64 tile of each of four warps, two sets of fragments
    assert re.search(r"float conv_local_ptr\[128\]", source)
    assert re.search(r"half columns_shared_dyn_local_ptr\[64\]", source)
    assert re.search(r"half weights_shared_dyn_local_ptr\[64\]", source)


@pytest.mark.parametrize(
    ("arch", "number"), [(arch, 1 + (i + j) % 3) for i, arch in enumerate(EMULATED_ARCHES) for j in (0, 1)], ids=str
)
def test_defaults_do_not_spill(cuda_compiler: None, arch: Arch, number: int) -> None:
    kernel = summary(build(problem_of("conv2d_nhwc", **K100[number]), arch, "mma"))
    assert kernel.spills == 0
    assert not any("spill" in name for name in kernel.counts)
    assert kernel.blocks_sm and kernel.blocks_sm * (kernel.threads or 0) >= 128


@pytest.mark.parametrize(("number", "widest"), [(1, 32), (6, 8)])
def test_few_channels_waste_no_wide_tile(sm_90a: Arch, number: int, widest: int) -> None:
    problem = problem_of("conv2d_nhwc", **K100[number])
    config = operator("conv2d_nhwc").schedule("mma").config_for(problem, sm_90a)
    assert isinstance(config, TensorCoreConfig) and config.block_n <= widest


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("number", [2, 6])
def test_mfma_code_objects(amd_linker: None, arch: str, number: int) -> None:
    built = build(problem_of("conv2d_nhwc", **K100[number]), parse_arch(arch), "mma")
    assembly = assert_fits(built)
    assert any(re.search(r"v_mfma_f32_16x16x16_?f16", loop) for loop in loops(assembly))
    counts = summary(built).counts
    assert counts["global load 128-bit"] >= 4 and "global load" not in counts
    assert not re.search(r"^\s+flat_", assembly, re.M)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", **K100[2])
    spec = operator("conv2d_nhwc").schedule("mma")
    for words, reason in {
        "block_m=100": "block_m=100 gives each of 2 warps 50, not a multiple of 16",
        "block_k=48": "block_k=48 is not a multiple of 32",
        "stages=1": "stages=1 must be at least 2",
        "stages=20": "stages=20 needs 655360 bytes of shared memory, cuda:sm_90a has 232448",
        "warps_m=0": "warps_m=0 must be at least 1",
        "block_n=256": "needs about .* registers a thread",
        "min_blocks=20": "min_blocks=20 are 2560 threads",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, dict([words.split("=")]))
    with pytest.raises(ConfigError, match="has no cp.async"):
        spec.config_for(problem, parse_arch("sm_75"), {"stages": "3"})
    with pytest.raises(ConfigError, match="no matrix instruction for dtype=float32"):
        spec.config_for(problem_of("conv2d_nhwc", **{**K100[2], "dtype": "float32"}), sm_90a)


def test_the_space_holds_the_default(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", **K100[2])
    assert operator("conv2d_nhwc").schedule("mma").config_for(problem, sm_90a) in set(space(problem, sm_90a))


@pytest.mark.parametrize(
    ("arch", "dtype", "name"),
    [
        ("sm_90a", "float16", "mma"),
        ("sm_80", "float16", "mma"),
        ("sm_75", "bfloat16", "simt"),
        ("sm_90a", "float32", "winograd"),
        ("gfx942", "float16", "mma"),
        ("gfx942", "bfloat16", "mma"),
        ("gfx1100", "float16", "mma"),
        ("gfx1030", "float16", "simt"),
        ("llvm", "float16", "cpu"),
    ],
)
def test_the_rule(arch: str, dtype: str, name: str) -> None:
    problem = problem_of("conv2d_nhwc", **{**K100[2], "dtype": dtype})
    assert operator("conv2d_nhwc").schedule_for(problem, parse_arch(arch)).name == name
