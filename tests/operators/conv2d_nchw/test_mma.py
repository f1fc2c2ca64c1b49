"""Implicit GEMM on matrix cores: correct by every route, fed by ldmatrix, no tile wasted on few channels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.build.inspect import material, summary
from schedules.core.arch import ARCHES, Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.presets import preset
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.mma import default, space
from schedules.steps.tensor_core import TensorCoreConfig
from tests.amd import assert_fits
from tests.conftest import EMULATED_ARCHES, ROCM_ARCHES, assert_changes_the_source, assert_correct, problem_of
from tests.operators.conv2d_nchw.shapes import SHAPES

LAYERS = [f"k100-{i}" for i in range(1, 7)]
AMD = [arch for arch in ROCM_ARCHES if "mfma" in arch.features]
HALF = {
    **{name: {**fields, "dtype": "float16"} for name, fields in SHAPES.items() if name != "bfloat16"},
    "aligned 1x1 kernel": dict(n=2, h=4, w=8, ci=40, co=24, kh=1, kw=1, dtype="float16"),
    "several tiles of k": dict(n=1, h=9, w=9, ci=24, co=70, kh=3, kw=3, pad=1, dtype="float16"),
}


@pytest.mark.parametrize("shape", HALF)
def test_mfma_is_correct(shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw", **HALF[shape]), parse_arch("gfx90a"), "mma", routes=["serial"])


@pytest.mark.parametrize("shape", HALF)
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw", **HALF[shape]), sm_90a, "mma", routes=["emulated"])


@pytest.mark.parametrize("arch", EMULATED_ARCHES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_generated_cuda_is_correct_on(emulation: None, arch: Arch, dtype: str) -> None:
    problem = problem_of("conv2d_nchw", **{**HALF["several tiles of k"], "dtype": dtype, "bias": True})
    if dtype == "bfloat16" and "bf16" not in arch.features:
        with pytest.raises(ConfigError, match="bfloat16 needs sm_80"):
            build(problem, arch, "mma", device_code=False)
        return
    assert_correct(problem, arch, "mma", routes=["emulated"])


CONFIGS: list[dict[str, Any]] = [
    dict(block_m=32, block_n=32, block_k=64, warps_m=2, warps_n=2, stages=2),
    dict(block_m=64, block_n=64, warps_m=2, warps_n=4, stages=4),
    dict(block_m=16, block_n=16, warps_m=1, warps_n=2, stages=3, min_blocks=2),
]
ENOUGH = ["ragged, stride 2, fused", "several tiles of k", "aligned 1x1 kernel"]


# each config with two of the shapes
@pytest.mark.parametrize(
    ("config", "shape"),
    [(config, shape) for i, config in enumerate(CONFIGS) for j, shape in enumerate(ENOUGH) if (i + j) % 3],
)
def test_other_configs_are_correct(emulation: None, sm_90a: Arch, config: dict[str, Any], shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw", **HALF[shape]), sm_90a, "mma", config, ["serial", "emulated"])


@settings(max_examples=6)
@given(
    n=st.integers(1, 3), h=st.integers(1, 9), w=st.integers(1, 9), ci=st.integers(1, 20), co=st.integers(1, 40),
    k=st.integers(1, 3), stride=st.integers(1, 3), bias=st.booleans(),
)  # fmt: skip
def test_any_shape_is_correct(
    emulation: None, sm_90a: Arch, n: int, h: int, w: int, ci: int, co: int, k: int, stride: int, bias: bool
) -> None:
    problem = problem_of(
        "conv2d_nchw", n=n, h=h, w=w, ci=ci, co=co, kh=k, kw=k, pad=k // 2, stride=stride, dtype="float16", bias=bias
    )
    assert_correct(problem, sm_90a, "mma", routes=["emulated"])


@pytest.mark.parametrize("name", LAYERS)
def test_the_rule_takes_matrix_cores_for_the_articles_layers(name: str) -> None:
    op, problem = operator("conv2d_nchw"), preset(name).problem()
    chosen = {arch: op.choose(problem, arch) for arch in ARCHES.values()}
    assert {name for arch, name in chosen.items() if arch.kind == "cuda"} == {"mma_channels_last"}
    assert {name for arch, name in chosen.items() if arch.features & {"mfma", "wmma"}} == {"mma"}
    assert chosen[ARCHES["rocm:gfx1030"]] == "simt" and chosen[ARCHES["llvm"]] == "cpu"
    assert op.choose(replace(problem, dtype="bfloat16"), parse_arch("sm_75")) == "simt"


@pytest.mark.parametrize(("co", "block_m"), [(1, 16), (4, 16), (27, 32), (64, 64), (192, 64), (256, 128), (640, 128)])
def test_few_channels_do_not_waste_a_tile(sm_90a: Arch, co: int, block_m: int) -> None:
    problem = problem_of("conv2d_nchw", n=16, h=64, w=64, ci=128, co=co, kh=3, kw=3, pad=1, dtype="float16")
    assert default(problem, sm_90a).block_m == block_m
    assert all(config.block_m < 2 * max(co, 16) for config in space(problem, sm_90a))


def test_source(sm_90a: Arch) -> None:
    problem = preset("k100-2").problem()
    built = build(problem, sm_90a, "mma", default(problem, sm_90a), device_code=False)
    source = str(built.sources["cu"])
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in source
    assert "ldmatrix_x4(" in source and "ldmatrix_x4_trans(" in source
    assert "cp_async_16(" in source  # the filter
    # fragments and sums are a lane's own: two sets of fragments, 32 x 32 sums of a warp over 32 lanes
    assert re.search(r"float conv_local_ptr\[32\]", source)
    assert re.search(r"half weights_shared_dyn_local_ptr\[32\]", source)
    assert re.search(r"half columns_shared_dyn_local_ptr\[32\]", source)
    # the next pixels are loaded in the first k step of this tile and stored in the last
    loop = source[source.index("for (int tile") :]
    load, store = (loop.index(text) for text in ("columns_shared_dyn_next_ptr[", "= columns_shared_dyn_next_ptr["))
    assert load < store and "step == 0" in loop[:load] and "step == 1" in loop[load:store]
    assert "*(uint4*)(output_ptr" in source


@pytest.mark.parametrize("name", LAYERS)
def test_resources_of_the_articles_layers(cuda_compiler: None, sm_90a: Arch, name: str) -> None:
    problem = preset(name).problem()
    config = default(problem, sm_90a)
    built = build(problem, sm_90a, "mma", config)
    (kernel,) = built.resources
    assert kernel.spill_stores == kernel.spill_loads == 0
    found = summary(material(built))
    warp = config.block_m // config.warps_m // 16 * (config.block_n // config.warps_n // 8)
    assert found.counts["mma"] == 2 * warp  # m16n8k16: two k steps of a warp's part of the tile
    assert found.counts["global store 128-bit"] >= 1 and found.counts["cp.async"] >= 1


@pytest.mark.parametrize("name", ["k100-1", "k100-2", "k100-6"])
@pytest.mark.parametrize("arch", AMD, ids=str)
def test_amd_code_object(amd_linker: None, arch: Arch, name: str) -> None:
    built = build(preset(name).problem(), arch, "mma")
    assert_fits(built)
    assert re.search(r"v_mfma_f32_16x16x16_?f16", str(built.sources["s"]))


def test_bfloat16_on_amd_takes_matrix_cores() -> None:
    problem = replace(preset("k100-2").problem(), dtype="bfloat16")
    assert {operator("conv2d_nchw").choose(problem, arch) for arch in AMD} == {"mma"}


def _changes() -> list[tuple[str, Any]]:
    return [
        ("block_m", 64),
        ("block_n", 64),
        ("block_k", 64),
        ("warps_m", 4),
        ("warps_n", 4),
        ("stages", 3),
        ("min_blocks", 2),
    ]


def test_every_field_is_listed() -> None:
    assert {name for name, _ in _changes()} == set(TensorCoreConfig().to_json())


@pytest.mark.parametrize(("field", "value"), _changes())
def test_every_field_changes_the_source(sm_90a: Arch, field: str, value: Any) -> None:
    problem = preset("k100-2").problem()
    assert_changes_the_source(problem, sm_90a, "mma", TensorCoreConfig(), **{field: value})


def test_single_precision_is_refused(sm_90a: Arch) -> None:
    with pytest.raises(ConfigError, match="float32"):
        build(problem_of("conv2d_nchw", **SHAPES["whole tiles"]), sm_90a, "mma")
