"""Implicit GEMM on CUDA cores: correct by every route, fetched with zero fill, multiplied without tests."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.build.inspect import material, summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.simt import SimtConfig, default, space
from tests.amd import assert_fits
from tests.conftest import (
    CUDA_ARCHES,
    EMULATED_ARCHES,
    ROCM_ARCHES,
    assert_changes_the_source,
    assert_correct,
    problem_of,
)
from tests.operators.conv2d_nchw.shapes import SHAPES

LAYER: dict[str, Any] = dict(n=16, h=32, w=32, ci=256, co=256, kh=3, kw=3, pad=1)
GPUS = [*CUDA_ARCHES, *ROCM_ARCHES]


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_correct(shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), parse_arch("gfx90a"), "simt", routes=["serial"])


@pytest.mark.parametrize("arch", GPUS, ids=str)
def test_schedule_is_correct_on(arch: Arch) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES["ragged, stride 2, fused"]), arch, "simt", routes=["serial"])


@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), sm_90a, "simt", routes=["emulated"])


@pytest.mark.parametrize("arch", EMULATED_ARCHES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_generated_cuda_is_correct_on(emulation: None, arch: Arch, dtype: str) -> None:
    problem = problem_of("conv2d_nchw", **{**SHAPES["ragged, stride 2, fused"], "dtype": dtype})
    assert_correct(problem, arch, "simt", routes=["emulated"])


OTHERS: list[dict[str, Any]] = [
    dict(tile="4x8", num_thread="4x8"),
    dict(tile="8x4", num_thread="2x16", vthread="1x4", step=3),
    dict(vector=1, unroll=64, tile="1x4", num_thread="3x16", vthread=1),
    dict(tile=2, num_thread="3x5", vthread=1, step=5, vector=2),
    dict(tile="1x4", num_thread="2x64", vthread=1, step=8, stages=2),  # rows of half a vector
]


# all on one shape, and the others with some
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        *((config, "ragged, stride 2, fused") for config in OTHERS),
        *((config, "1x1 kernel") for config in OTHERS[1::2]),
        *((config, "1x1 image") for config in OTHERS[::4]),
    ],
    ids=str,
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any], shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), sm_90a, "simt", config, ["serial", "emulated"])


@settings(max_examples=8)
@given(
    n=st.integers(1, 3), h=st.integers(1, 9), w=st.integers(1, 9), ci=st.integers(1, 9), co=st.integers(1, 70),
    k=st.integers(1, 3), stride=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_is_correct(sm_90a: Arch, n: int, h: int, w: int, ci: int, co: int, k: int, stride: int) -> None:
    problem = problem_of("conv2d_nchw", n=n, h=h, w=w, ci=ci, co=co, kh=k, kw=k, pad=k // 2, stride=stride)
    assert_correct(problem, sm_90a, "simt", routes=["serial"])


def test_source(sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_nchw", **LAYER), sm_90a, "simt", SimtConfig(stages=2), device_code=False)
    source = str(built.sources["cu"])
    assert built.launch and built.launch.block == (16, 16, 1) and built.launch.grid == (128, 2, 1)
    loop = source[source.index("for (int step = 0") :]
    products = loop[: loop.index("stage_ptr[1] * 1024")]  # where the next stage is written
    assert "__syncthreads()" not in loop and source.count("__syncthreads()") == 1
    # whole tiles: no test after the fetch but of the last stage
    assert products.count("if (") == 1 and products.count("+ (weights") == 4
    assert len(re.findall(r"\*\(float4\*\)\(output_ptr", source)) == 4


def test_parts_of_the_reduction_are_added_up(emulation: None, sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nchw", **SHAPES["ragged, stride 2, fused"] | dict(ci=21))
    config = dict(tile=4, vthread=1, num_thread=8, step=4, split_k=4)
    assert_correct(problem, sm_90a, "simt", config, ["serial", "emulated"])


def test_pixels_of_a_1x1_kernel_are_fetched_as_vectors(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nchw", **{**LAYER, "kh": 1, "kw": 1, "pad": 0})
    source = str(build(problem, sm_90a, "simt", device_code=False).sources["cu"])
    assert re.search(r"\*\(float4\*\)\(data_ptr", source)
    half = replace(problem, dtype="float16")
    assert re.search(r"\*\(half4\*\)\(data_ptr", str(build(half, sm_90a, "simt", device_code=False).sources["cu"]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_resources(cuda_compiler: None, sm_90a: Arch, dtype: str) -> None:
    problem = problem_of("conv2d_nchw", **LAYER, dtype=dtype)
    config = operator("conv2d_nchw").schedule("simt").default(problem, sm_90a)
    built = build(problem, sm_90a, "simt", config)
    (kernel,) = built.resources
    assert kernel.shared == built.config.shared_bytes
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0
    found = summary(material(built))
    # both operands of a thread come as vectors of four, and its 64 products of one k need no other load
    assert found.counts["shared load 128-bit"] * 16 == found.counts["fp32 multiply-add"]


@pytest.mark.parametrize("co", [1, 4, 27, 64, 600])
def test_few_channels_do_not_waste_a_tile(sm_90a: Arch, co: int) -> None:
    problem = problem_of("conv2d_nchw", **{**LAYER, "co": co})
    config = default(problem, sm_90a)
    assert config.check(problem, sm_90a) is None
    assert config.block[0] < max(2 * co, 16)
    assert config.threads >= 64


def _changes() -> list[tuple[str, Any]]:
    tiles: list[tuple[str, Any]] = [("tile", (4, 8)), ("num_thread", (8, 16)), ("vthread", (1, 2))]
    return [*tiles, ("step", 4), ("vector", 2), ("stages", 1), ("ahead", True), ("unroll", 64), ("split_k", 2)]


def test_every_field_is_listed() -> None:
    assert {name for name, _ in _changes()} == set(SimtConfig().to_json())


@pytest.mark.parametrize(("field", "value"), _changes())
def test_every_field_changes_the_source(sm_90a: Arch, field: str, value: Any) -> None:
    problem = problem_of("conv2d_nchw", **LAYER)
    assert_changes_the_source(problem, sm_90a, "simt", SimtConfig(stages=2), **{field: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(tile=6, vthread=4), "tile=6 is not a multiple of vthread=4"),
        (dict(num_thread=33), "num_thread=(33, 33) makes blocks of 1089, cuda:sm_90a allows 1024"),
        (dict(step=128), "step=128 needs 196608 bytes of shared memory"),
        (dict(tile=16, num_thread=8, step=8), "tile=(16, 16) needs about 360 registers"),
        (dict(vector=3), "vector=3"),
        (dict(step=0), "step=0"),
        (dict(vthread=0), "vthread=(0, 0)"),
        (dict(unroll=-1), "unroll=-1"),
        (dict(stages=3), "stages=3 is not 1, or 2"),
        (dict(stages=1, ahead=True), "ahead=true needs stages=2 and an even step, not stages=1"),
        (dict(split_k=33), "split_k=33 is not 1 to 32, each of step="),
        (dict(split_k=0), "split_k=0 is not 1 to 32"),
        (dict(step=5, ahead=True), "ahead=true needs stages=2 and an even step, not stages=2 and step=5"),
    ],
)
def test_illegal_configs_are_refused(sm_90a: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_nchw", **LAYER), sm_90a, "simt", config)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("arch", ROCM_ARCHES, ids=str)
def test_amd_code_object(amd_linker: None, arch: Arch, dtype: str) -> None:
    built = build(problem_of("conv2d_nchw", **LAYER, dtype=dtype), arch, "simt")
    assert_fits(built)
    # LLVM leaves the taps in a loop: range-checked loads of the padding are too large for it to unroll
    assert summary(material(built)).counts["shared load 128-bit"] >= 4


def test_the_space_is_worth_searching(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nchw", **LAYER)
    legal = [config for config in space(problem, sm_90a) if config.check(problem, sm_90a) is None]
    assert len(legal) >= 200
