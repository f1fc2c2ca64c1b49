"""HWCN convolution on matrix cores: correct by every route, and made of the instructions it is meant to be made of."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedules.build.builder import Built, build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.registry import operator
from tests.amd import assert_fits, loops
from tests.conftest import assert_correct, problem_of

TUTORIAL: dict[str, Any] = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1, dtype="float16")
SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=64, h=3, w=3, ci=32, co=64, kh=3, kw=3, pad=1),
    "ragged, stride 2": dict(n=20, h=5, w=7, ci=13, co=30, kh=3, kw=2, pad=1, stride=2),
    "one of everything": dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1),
    "asymmetric, stride 3, dilated": dict(
        n=3, h=9, w=6, ci=5, co=7, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2"
    ),
    "kernel in the padding": dict(n=2, h=1, w=1, ci=2, co=3, kh=3, kw=3, pad=2),
    "few channels": dict(n=24, h=9, w=8, ci=3, co=40, kh=7, kw=5, pad=3, stride=2),
    "1x1": dict(n=66, h=2, w=3, ci=72, co=40, kh=1, kw=1),
}


ON = [("sm_75", "float16"), ("sm_80", "bfloat16"), ("sm_90a", "float16")]


# each shape on two of them, one on all
@pytest.mark.parametrize(
    ("arch", "dtype", "shape"),
    [
        (*on, shape)
        for i, shape in enumerate(SHAPES)
        for j, on in enumerate(ON)
        if (i + j) % 3 or shape == "ragged, stride 2"
    ],
)
def test_mma_is_correct(emulation: None, arch: str, dtype: str, shape: str) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES[shape], dtype=dtype)
    assert_correct(problem, parse_arch(arch), "mma", routes=["emulated"])


@pytest.mark.parametrize(("arch", "shape"), [(f"gfx9{('0a', '42')[i % 2]}", shape) for i, shape in enumerate(SHAPES)])
def test_mfma_is_correct(arch: str, shape: str) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES[shape], dtype="float16")
    assert_correct(problem, parse_arch(arch), "mma", routes=["serial"])


# each shape by both schedules, each of them in one dtype, and one shape in both
@pytest.mark.parametrize(
    ("schedule", "dtype", "shape"),
    [
        (schedule, dtype, shape)
        for i, schedule in enumerate(["tutorial", "cpu"])
        for j, dtype in enumerate(["float16", "bfloat16"])
        for k, shape in enumerate(SHAPES)
        if (i + j + k) % 2 == 0 or shape == "ragged, stride 2"
    ],
)
def test_other_schedules_take_the_dtype(emulation: None, schedule: str, dtype: str, shape: str) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES[shape], dtype=dtype)
    if schedule == "cpu":
        assert_correct(problem, parse_arch("llvm"), "cpu")
    else:
        assert_correct(problem, parse_arch("sm_80"), "tutorial", routes=["emulated"])


@pytest.mark.parametrize(
    "config",
    [
        dict(block_m=16, block_n=64, warps_m=1, warps_n=2, block_k=64, stages=3),
        dict(block_m=64, block_n=8, warps_m=2, warps_n=1, stages=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any]) -> None:
    problem = problem_of("conv2d_hwcn", **SHAPES["ragged, stride 2"], dtype="float16")
    assert_correct(problem, sm_90a, "mma", config, ["serial", "emulated"])


@pytest.fixture(scope="module")
def tutorial(cuda_compiler: None) -> Built:
    return build(problem_of("conv2d_hwcn", **TUTORIAL), parse_arch("sm_90a"), "mma")


def test_what_it_is_made_of(tutorial: Built) -> None:
    ptx, source, kernel = str(tutorial.sources["ptx"]), str(tutorial.sources["cu"]), summary(tutorial)
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], 16,", ptx)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert kernel.counts["global store 128-bit"] and "global store" not in kernel.counts
    assert "global load" not in kernel.counts
    assert kernel.spills == 0 and not any("spill" in name for name in kernel.counts)
    assert re.search(r"float conv_local_ptr\[128\]", source)
    assert len(re.findall(r"half \w+_local_ptr\[64\]", source)) == 2


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_mfma_code_objects(amd_linker: None, arch: str) -> None:
    built = build(problem_of("conv2d_hwcn", **TUTORIAL), parse_arch(arch), "mma")
    assembly = assert_fits(built)
    assert any(re.search(r"v_mfma_f32_16x16x16_?f16", loop) for loop in loops(assembly))
    # the tiles are turned on their way into LDS, 16 bytes at a time
    assert "ds_write_b128" in assembly and "ds_read_u16" not in assembly


@pytest.mark.parametrize(
    ("arch", "dtype", "name"),
    [
        ("sm_80", "float16", "mma"),
        ("sm_90a", "float16", "mma"),
        ("sm_80", "float32", "winograd"),
        ("sm_90a", "float32", "winograd"),
        ("sm_75", "float32", "winograd"),
        ("sm_75", "bfloat16", "tutorial"),
        ("gfx90a", "float32", "mma"),
        ("gfx1100", "float32", "winograd"),
        ("gfx90a", "float16", "mma"),
        ("llvm", "float16", "cpu"),
    ],
)
def test_the_rule(arch: str, dtype: str, name: str) -> None:
    problem = problem_of("conv2d_hwcn", **{**TUTORIAL, "dtype": dtype})
    assert operator("conv2d_hwcn").schedule_for(problem, parse_arch(arch)).name == name
