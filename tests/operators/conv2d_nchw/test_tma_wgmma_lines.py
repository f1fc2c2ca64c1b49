"""NCHW convolution from lines of pixels as they lie: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import (
    assert_correct_on,
    assert_emulated,
    assert_producer_fits,
    assert_well_made,
)

NAME = "tma_wgmma_lines"
WORK: dict[str, Any] = dict(n=8, h=14, w=14, ci=128, co=128, kh=1, kw=1)
SHAPES: dict[str, dict[str, Any]] = {
    "1x1, neighbours share words": dict(n=3, h=6, w=7, ci=64, co=48, kh=1, kw=1, bias=True),
    "1x1, odd images": dict(n=3, h=7, w=7, ci=32, co=70, kh=1, kw=1, bias=True, residual=True),
    "1x1 that leaves pixels out": dict(n=2, h=14, w=14, ci=32, co=48, kh=1, kw=1, stride=2, activation="relu"),
    "images": dict(n=3, h=7, w=7, ci=16, co=70, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "images longer than a tile": dict(n=1, h=12, w=14, ci=40, co=40, kh=3, kw=3, pad=1, residual=True),
    "rows, stride 2": dict(n=3, h=14, w=14, ci=24, co=40, kh=3, kw=3, pad=1, stride=2, bias=True),
    "rows, no padding": dict(n=2, h=9, w=11, ci=16, co=24, kh=3, kw=3),
    "ragged channels, odd rows": dict(n=2, h=9, w=13, ci=40, co=33, kh=3, kw=3, pad=1, stride=2, residual=True),
    "odd strides and dilation": dict(
        n=2, h=11, w=10, ci=16, co=24, kh=3, kw=2, pad="2,1", stride="2,3", dilation="2,1"
    ),
    "packed": dict(n=2, h=8, w=8, ci=16, co=24, kh=3, kw=3, pad=1, filter_layout="hwoi"),
    "padding wider than the image": dict(n=2, h=2, w=3, ci=8, co=16, kh=5, kw=7, pad="4,6"),
    "bfloat16": dict(n=1, h=12, w=10, ci=16, co=24, kh=3, kw=3, pad=1, dtype="bfloat16", bias=True, residual=True),
}
SMALL = dict(
    block_m=128, block_n=32, block_k=32, num_stages=2, consumers=2, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    SMALL | dict(block_m=256, cluster_m=2, grid=4),
    SMALL | dict(block_m=64, block_n=48, block_k=64, consumers=1),
    SMALL | dict(split_k=2, grid=4),
    SMALL | dict(block_m=64, ping_pong=True, num_stages=3),
    SMALL | dict(block_m=64, block_n=64, consumers=1, blocks_sm=2, grid=3, stationary=True),
    SMALL | dict(block_m=192, block_n=16, consumers=3),
]
WHOLE_SECTORS = SMALL | dict(block_m=192, block_n=16, consumers=3, whole_sectors=True)
ODD = dict(n=2, h=9, w=7, ci=40, co=40, kh=3, kw=2, pad=1, stride="1,2", bias=True)


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(dtype="float16") | SHAPES[request.param]


def test_emulated(emulation: None, fields: dict[str, Any]) -> None:
    assert_emulated("conv2d_nchw", fields, SMALL, NAME)


def test_one_output_of_an_image(emulation: None) -> None:
    """Its rows are stored as others are, not by TMA, which knows nothing of their order."""
    words = SMALL | dict(block_m=64, consumers=1)
    fields = dict(n=5, h=3, w=3, ci=32, co=48, kh=3, kw=2, stride=3, dtype="float16")
    assert_emulated("conv2d_nchw", fields, words, NAME)


@pytest.mark.parametrize("words", [*CONFIGS, WHOLE_SECTORS], ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    small = dict(co=32, ci=16) if words["stationary"] else {}
    assert_emulated("conv2d_nchw", dict(dtype="float16") | ODD | small, words, NAME)


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_n=64, num_stages=4, grid=0)
    built = build(problem_of("conv2d_nchw", **WORK, dtype="float16"), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA", stored_by_tma=False)
    assert_producer_fits(built)
    # filters of 1x1 are taken as they lie, pixels in whole 16 bytes, two of them in a word
    assert len(built.resources) == 1 and built.resources[0].stack == 0
    assert found["LDGSTS"] and "ld.shared.b32" in str(built.sources["cu"])
    assert "ld.shared.u16" not in str(built.sources["cu"])


def test_data_are_copied_before_filters_are_packed(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_n=64, num_stages=3, grid=0)
    built = build(problem_of("conv2d_nchw", **WORK | dict(kh=3, kw=3, pad=1), dtype="float16"), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA", stored_by_tma=False)
    assert_producer_fits(built)
    source = str(built.sources["cu"])
    assert len(built.resources) == 2 and source.count("griddepcontrol_wait();") == 1
    # of a stage: the boxes of the taps of a row, and lines that they share
    assert found["UTMALDG"] == 3 and found["LDGSTS"]


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, dtype="float16")
    for words, reason in (
        (dict(block_n=48, cluster_m=4, grid=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(cluster_n=2), "cluster_n=2 would share pixels, which threads bring for their own block; give 1"),
        (dict(block_k=16), "block_k=16 is not 32, 64 or 128"),
        (dict(num_stages=40), "num_stages=40 needs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, SMALL | words)
    with pytest.raises(ConfigError, match="ci=20 is not a multiple of 8, after which channels begin at 16 bytes"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(ci=20), dtype="float16"), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a)
    with pytest.raises(ConfigError, match="data has 2\\*\\*31 elements or more"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(n=4096, h=64, w=64), dtype="float16"), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


def test_what_the_choice_is_told_of_memory_is_what_a_stage_has() -> None:
    spec = operator("conv2d_nchw").schedule(NAME)
    assert spec.stage_bytes
    for fields in (WORK, WORK | dict(n=3, w=13, kh=3, kw=3, pad=1), WORK | dict(n=2, h=31, w=9, stride=2)):
        problem: Any = problem_of("conv2d_nchw", dtype="float16", **fields)
        for words in CONFIGS:
            config: Any = spec.config(**words)
            work = config.work(problem)
            assert spec.stage_bytes(problem, config.block_m, config.block_k) == work.a.nbytes <= work.stage_bytes


@pytest.mark.parametrize("fields", [dict(), dict(n=1, w=56, h=56, kh=3, kw=3, pad=1), dict(stride=2)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", dtype="float16", **WORK | fields), operator("conv2d_nchw").schedule(NAME)
    assert spec.config_for(problem, sm_90a) in spec.space(problem, sm_90a)


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, words, NAME)
