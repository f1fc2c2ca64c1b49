"""Filters (co, ci, kh, kw) before kernels that take them packed."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.repack import IN_REGISTERS, STAGED, by_classes, filter_argument
from tests.conftest import problem_of
from tests.hopper_kernels import assert_correct_on, assert_emulated

SHAPES: dict[str, dict[str, Any]] = {
    "3x3": dict(n=2, h=6, w=16, ci=24, co=20, kh=3, kw=3, pad=1, bias=True),
    "a block of threads and a part of one": dict(n=1, h=4, w=8, ci=40, co=28, kh=3, kw=3, pad=1),
    "two taps": dict(n=2, h=5, w=8, ci=16, co=40, kh=2, kw=1, pad="1,0"),
    "one tap": dict(n=2, h=5, w=8, ci=40, co=12, kh=1, kw=1, bias=True),
    "bfloat16, as many as registers take": dict(n=1, h=8, w=16, ci=8, co=12, kh=5, kw=5, pad=2, dtype="bfloat16"),
    "more taps than registers take": dict(n=1, h=9, w=16, ci=16, co=6, kh=6, kw=5, pad="2,2"),
}
SCHEDULES = ("tma_wgmma", "tma_wgmma_few")


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(dtype="float16") | SHAPES[request.param]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_emulated(emulation: None, fields: dict[str, Any], schedule: str) -> None:
    assert_emulated("conv2d_nchw", fields, {}, schedule)


def test_it_is_a_kernel_of_its_own(cuda_compiler: None, sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem = problem_of("conv2d_nchw", **fields)
    built = build(problem, sm_90a, "tma_wgmma")
    taps, kernels = fields["kh"] * fields["kw"], len(built.resources)
    assert kernels == (1 if taps == 1 else 2) and (filter_argument(problem).name == "packed") == (taps > 1)
    assert all(each.stack == each.spill_stores == each.spill_loads == 0 for each in built.resources)
    assert ("uint4 v = ((const uint4*)from)[i]" in str(built.sources["cu"])) == (1 < taps <= IN_REGISTERS)


def test_a_block_copies_what_it_packs_together(cuda_compiler: None, sm_90a: Arch, fields: dict[str, Any]) -> None:
    """In whole sectors, as far as shared memory reaches."""
    taps = fields["kh"] * fields["kw"]
    source = str(build(problem_of("conv2d_nchw", **fields), sm_90a, "tma_wgmma").sources["cu"])
    assert ("cp_async_cg_async_cg_shared_glob" in source) == (taps > 1 and (taps | 1) * 16 * 128 <= STAGED)


def test_classes_of_channels_are_packed_as_taps(cuda_compiler: None, sm_90a: Arch) -> None:
    """Planes of 7x7 have eight classes: 32 channels of each, packed eight at a time."""
    problem = problem_of("conv2d_nchw", n=4, h=7, w=7, ci=256, co=40, kh=1, kw=1, dtype="float16")
    words = dict(block_m=64, block_n=64, block_k=16, num_stages=3, consumers=1, cluster_m=1, cluster_n=1, grid=0)
    built = build(problem, sm_90a, "tma_wgmma", words | dict(consumers_n=1, phases=True, halo=False, split_k=1))
    assert filter_argument(by_classes(problem, 8)).shape == (1, 8, 40, 32) and len(built.resources) == 2
    assert "uint4 v = ((const uint4*)from)[i]" in str(built.sources["cu"])
    assert by_classes(problem, 1) is problem


def test_filters_are_taken_as_they_lie(sm_90a: Arch) -> None:
    fields = dict(n=16, h=32, w=32, ci=256, co=256, dtype="float16")

    def serves(name: str, kernel: int, **changes: Any) -> bool:
        sizes = dict(kh=kernel, kw=kernel, pad=kernel // 2)
        problem = problem_of("conv2d_nchw", **fields | sizes | changes)
        return operator("conv2d_nchw").schedule(name).serves(problem, sm_90a)

    assert serves("tma_wgmma", 1) and serves("tma_wgmma", 3) and serves("tma_wgmma", 3, filter_layout="hwoi")
    assert serves("tma_wgmma_few", 1, co=4) and serves("tma_wgmma_few", 3, co=4)
    assert not serves("tma_wgmma", 1, dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], schedule: str) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, {}, schedule)
