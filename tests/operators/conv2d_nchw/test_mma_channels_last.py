from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import material, summary
from schedules.core.arch import Arch, parse_arch
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.mma_channels_last import default, space
from schedules.steps.tensor_core import TensorCoreConfig
from tests.conftest import assert_changes_the_source, assert_correct, problem_of

SHAPES: dict[str, dict[str, Any]] = {
    "whole tiles": dict(n=1, h=8, w=8, ci=32, co=64, kh=3, kw=3, pad=1),
    "wide rows": dict(n=2, h=3, w=128, ci=64, co=64, kh=3, kw=3, pad=1),
    "ragged, stride 2": dict(n=2, h=5, w=7, ci=13, co=27, kh=3, kw=2, pad=1, stride=2),
    "one of everything": dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1),
    "asymmetric, stride 3, dilated": dict(
        n=3, h=9, w=6, ci=40, co=70, kh=5, kw=3, pad="2,0", stride="3,1", dilation="1,2"
    ),
}


@pytest.mark.parametrize("arch", [parse_arch("sm_75"), parse_arch("sm_80"), parse_arch("sm_90a")], ids=str)
def test_schedule_is_correct(arch: Arch) -> None:
    problem = problem_of("conv2d_nchw", dtype="float16", **SHAPES["asymmetric, stride 3, dilated"])
    assert_correct(problem, arch, "mma_channels_last", routes=["serial"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", [parse_arch("sm_75"), parse_arch("sm_90a")], ids=str)
def test_generated_cuda_is_correct(emulation: None, arch: Arch, shape: str) -> None:
    problem = problem_of("conv2d_nchw", dtype="float16", bias=True, activation="relu", **SHAPES[shape])
    assert_correct(problem, arch, "mma_channels_last", routes=["emulated"])


def test_copies_and_product(cuda_compiler: None, sm_90a: Arch) -> None:
    fields = dict(n=16, ci=256, h=32, w=32, co=256, kh=3, kw=3, pad=1)
    built = build(problem_of("conv2d_nchw", dtype="float16", **fields), sm_90a, "mma_channels_last")
    source = str(built.sources["cu"])
    assert len(built.resources) == 3
    assert all(kernel.spill_stores == kernel.stack == 0 for kernel in built.resources)
    assert "*(uint4*)(data_ptr" in source
    assert "*(uint4*)(data_last_ptr" in source
    assert "ldmatrix.sync.aligned.m8n8.x4" in source
    counts = summary(material(built)).counts
    assert counts["mma"] > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_m", 64),
        ("block_n", 64),
        ("block_k", 128),
        ("warps_m", 4),
        ("warps_n", 4),
        ("stages", 2),
        ("min_blocks", 1),
    ],
)
def test_every_field_changes_the_source(sm_90a: Arch, field: str, value: int) -> None:
    problem = problem_of("conv2d_nchw", dtype="float16", n=16, ci=256, h=32, w=32, co=256, kh=3, kw=3, pad=1)
    base = TensorCoreConfig(128, 128, 64, 2, 2, 3)
    assert field in base.to_json() and len(base.to_json()) == 7
    assert_changes_the_source(problem, sm_90a, "mma_channels_last", base, **{field: value})


def test_the_rule(sm_90a: Arch) -> None:
    def chosen(arch: Arch = sm_90a, **fields: Any) -> str:
        problem = problem_of("conv2d_nchw", n=16, ci=64, h=32, w=32, co=64, **fields)
        return operator("conv2d_nchw").choose(problem, arch)

    assert chosen(parse_arch("sm_80"), dtype="float16", kh=3, kw=3, pad=1) == "mma_channels_last"
    assert chosen(parse_arch("sm_80"), dtype="float16", kh=1, kw=1) == "mma"
    assert chosen(dtype="float32", kh=1, kw=1) == "simt" and chosen(dtype="float32", kh=3, kw=3, pad=1) == "winograd"
    problem = problem_of("conv2d_nchw", n=16, ci=64, h=32, w=32, co=64, kh=3, kw=3, dtype="float16")
    assert default(problem, sm_90a).check(problem, sm_90a) is None
    assert sum(config.check(problem, sm_90a) is None for config in space(problem, sm_90a)) > 100


@pytest.mark.parametrize("schedule", ["mma", "mma_channels_last"])
def test_rows_that_are_no_whole_vectors_are_stored_in_vectors(cuda_compiler: None, sm_90a: Arch, schedule: str) -> None:
    # images of 20 x 20: eight pixels of a vector may lie in two rows, which are neighbours in memory all the same
    problem = problem_of("conv2d_nchw", n=2, h=20, w=20, ci=3, co=64, kh=3, kw=3, pad=1, dtype="float16")
    source = str(build(problem, sm_90a, schedule).sources["cu"])
    assert "longlong" not in source
    assert "*(uint4*)(output_ptr" in source
