"""NCHW convolution by 1x1 from slabs of pixels: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from tests.conftest import problem_of
from tests.hopper_kernels import assert_correct_on, assert_emulated, assert_producer_fits, assert_well_made
from tests.operators.conv2d_nchw.test_tma_wgmma_lines import CONFIGS as LINES
from tests.operators.conv2d_nchw.test_tma_wgmma_lines import SMALL

NAME = "tma_wgmma_slabs"
WORK: dict[str, Any] = dict(n=8, h=28, w=28, ci=128, co=128, kh=1, kw=1)
SHAPES: dict[str, dict[str, Any]] = {
    "planes of parts of slabs": dict(n=3, h=6, w=12, ci=64, co=48, kh=1, kw=1, bias=True),
    "less than a slab": dict(n=5, h=4, w=6, ci=32, co=70, kh=1, kw=1, bias=True, residual=True),
    "whole slabs": dict(n=2, h=8, w=16, ci=32, co=40, kh=1, kw=1, activation="relu"),
    "ragged channels": dict(n=1, h=10, w=20, ci=44, co=33, kh=1, kw=1, residual=True),
    "packed": dict(n=2, h=8, w=9, ci=16, co=24, kh=1, kw=1, filter_layout="hwoi"),
    "bfloat16": dict(n=2, h=12, w=10, ci=24, co=24, kh=1, kw=1, dtype="bfloat16", bias=True, activation="silu"),
}
CONFIGS: list[dict[str, Any]] = [
    *LINES,
    SMALL | dict(block_m=192, block_n=16, consumers=3, cluster_n=2, grid=4),
    SMALL | dict(block_m=128, block_n=16, cluster_n=4, block_k=64, grid=4),
    SMALL | dict(block_m=256, block_n=16, cluster_n=2, cluster_m=2, grid=4),
    SMALL | dict(block_n=80, cluster_n=2, grid=2),
]
ODD: dict[str, Any] = dict(n=5, h=10, w=12, ci=72, co=150, kh=1, kw=1, bias=True, residual=True)


@pytest.fixture(params=SHAPES)
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(dtype="float16") | SHAPES[request.param]


def test_emulated(emulation: None, fields: dict[str, Any]) -> None:
    assert_emulated("conv2d_nchw", fields, SMALL, NAME)


@pytest.mark.parametrize("words", CONFIGS, ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    assert_emulated("conv2d_nchw", dict(dtype="float16") | ODD, words, NAME)


def test_residuals_of_shared_reductions(emulation: None) -> None:
    """Read one by one, of no pixel beyond the image."""
    fields = dict(n=3, h=4, w=2, ci=64, co=70, kh=1, kw=1, residual=True, dtype="float16")
    assert_emulated("conv2d_nchw", fields, SMALL | dict(split_k=2, grid=4), NAME)


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_n=64, block_k=64, num_stages=4, grid=0)
    built = build(problem_of("conv2d_nchw", **WORK, dtype="float16"), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA", stored_by_tma=True)
    assert_producer_fits(built)
    # a kernel alone; of a stage a box of each slab of pixels, and one of filters
    assert len(built.resources) == 1 and built.resources[0].stack == 0
    assert found["UTMALDG"] == 3


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, dtype="float16")
    for words, reason in (
        (dict(block_n=48, cluster_m=4, grid=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(block_m=64, consumers=1, cluster_n=8, grid=8), "block_k=32 is not 8 blocks times a multiple of 8"),
        (dict(block_k=48), "block_k=48 is not 16, 32, 64 or 128"),
        (dict(num_stages=40), "num_stages=40 needs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, SMALL | words)
    with pytest.raises(ConfigError, match="an image has 49 pixels, TMA needs a multiple of 8"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(h=7, w=7), dtype="float16"), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="a kernel of 3x3, stride=.1, 1., pad=.1, 1. looks at more than a pixel"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(kh=3, kw=3, pad=1), dtype="float16"), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


def test_a_tile_is_of_slabs_of_whatever_images(sm_90a: Arch) -> None:
    """28x28 pixels are 12.25 slabs: of 8 images 104 slabs, tiles of four and a hundred and four of them."""
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, dtype="float16")
    assert spec.boxes
    assert [spec.boxes(problem, pixels) for pixels in (64, 256, 128, 96)] == [104, 26, 52, None]
    assert spec.boxes(problem, 128, 4) == 52 and spec.boxes(problem, 192, 4) == 36
    for words in CONFIGS:
        config: Any = spec.config(**words)
        work = config.work(problem)
        tiles = work.clusters * config.cluster_m
        assert tiles == spec.boxes(problem, config.block_m, config.cluster_m) * work.columns


def test_results_wait_where_stages_leave_room(sm_90a: Arch) -> None:
    """All of a consumer's 64 x 128, or half of them at a time."""
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, dtype="float16")
    words = SMALL | dict(block_m=64, block_n=128, block_k=64, consumers=1)
    for num_stages, width in ((8, 128), (9, 64)):
        config: Any = spec.config_for(problem, sm_90a, words | dict(num_stages=num_stages))
        assert config.work(problem).output.staging.width == width


@pytest.mark.parametrize("fields", [dict(), dict(n=1, w=56, h=56), dict(ci=44, co=320)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", dtype="float16", **WORK | fields), operator("conv2d_nchw").schedule(NAME)
    space = spec.space(problem, sm_90a)
    assert spec.config_for(problem, sm_90a) in space
    # chunks of 16 channels where part of the last 32 would be zeros
    assert any(config.block_k == 16 for config in space) == (problem.ci % 32 > 0)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("words", [{}, *CONFIGS], ids=str)
def test_on_a_device(gpu: Arch, fields: dict[str, Any], words: dict[str, Any]) -> None:
    assert_correct_on(gpu, "conv2d_nchw", fields, words, NAME)
