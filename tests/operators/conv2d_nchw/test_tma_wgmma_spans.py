"""NCHW convolution from data turned in the block: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.tma_wgmma_spans import SpansWork
from tests.conftest import problem_of
from tests.hopper_kernels import assert_emulated, assert_producer_fits, assert_well_made

NAME = "tma_wgmma_spans"
HALF = dict(dtype="float16")
WORK: dict[str, Any] = dict(n=8, h=13, w=13, ci=128, co=128, kh=3, kw=3, pad=1)
SHAPES: dict[str, dict[str, Any]] = {
    "1x1, odd images": dict(n=3, h=7, w=7, ci=72, co=70, kh=1, kw=1, bias=True, residual=True),
    "1x1, neighbours share words": dict(n=5, h=6, w=7, ci=37, co=40, kh=1, kw=1, bias=True),
    "1x1 that leaves pixels out": dict(n=2, h=14, w=14, ci=32, co=48, kh=1, kw=1, stride=2, activation="relu"),
    "one output of an image": dict(n=5, h=3, w=3, ci=32, co=48, kh=3, kw=2, stride=3),
    "images": dict(n=3, h=7, w=7, ci=16, co=70, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "ragged channels": dict(n=2, h=9, w=13, ci=21, co=33, kh=3, kw=3, pad=1, residual=True),
    "stride 2": dict(n=3, h=13, w=11, ci=40, co=40, kh=5, kw=5, pad=1, stride=2, bias=True),
    "stride 2, planes share words": dict(n=2, h=9, w=14, ci=40, co=40, kh=5, kw=5, pad=2, stride=2, bias=True),
    "stride 2, planes of unlike taps": dict(n=3, h=8, w=10, ci=21, co=33, kh=2, kw=4, pad="0,1", stride="1,2"),
    "rows, neighbours share words": dict(n=2, h=7, w=14, ci=40, co=24, kh=5, kw=5, pad=2),
    "odd strides and dilation": dict(
        n=2, h=11, w=10, ci=16, co=24, kh=3, kw=2, pad="2,1", stride="2,3", dilation="2,1"
    ),
    "dilation, packed": dict(n=1, h=13, w=15, ci=8, co=24, kh=3, kw=3, pad=2, dilation=2, filter_layout="hwoi"),
    "padding wider than the image": dict(n=2, h=2, w=3, ci=8, co=16, kh=5, kw=7, pad="4,6"),
    "bfloat16": dict(n=1, h=12, w=10, ci=16, co=24, kh=3, kw=3, pad=1, dtype="bfloat16", residual=True),
}
SMALL = dict(
    block_m=128, block_n=32, block_k=32, num_stages=2, consumers=2, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, lines_outside=False, halo=False,
    whole_sectors=False,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    SMALL | dict(block_m=256, cluster_m=2, grid=4, halo=True),
    SMALL | dict(block_m=64, block_n=48, block_k=32, consumers=1, num_stages=6),
    SMALL | dict(block_m=64, block_k=128, consumers=1),
    SMALL | dict(split_k=2, grid=4, lines_outside=True, num_stages=4),
    SMALL | dict(block_m=64, ping_pong=True, num_stages=5),
    SMALL | dict(block_m=64, block_n=16, block_k=64, consumers=1, cluster_m=2, grid=2, num_stages=3),
    SMALL | dict(block_m=64, block_n=64, consumers=1, blocks_sm=2, grid=3, stationary=True, halo=True),
    SMALL | dict(block_m=192, block_n=16, consumers=3),
    SMALL | dict(block_m=128, whole_sectors=True),
]
ODD = dict(n=2, h=9, w=7, ci=40, co=40, kh=3, kw=2, pad=1, stride="1,2", bias=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated(emulation: None, shape: str) -> None:
    """By rows of the kernel, and each other shape by all of them at once."""
    fields = HALF | SHAPES[shape]
    halo = fields["kh"] > 1 and list(SHAPES).index(shape) % 2 == 0
    assert_emulated("conv2d_nchw", fields, SMALL | dict(halo=halo), NAME)


@pytest.mark.parametrize("words", CONFIGS, ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    small = dict(co=32, ci=16) if words["stationary"] else {}
    assert_emulated("conv2d_nchw", HALF | ODD | small, words, NAME)


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_n=64, num_stages=3, grid=0)
    built = build(problem_of("conv2d_nchw", **WORK, **HALF), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA", stored_by_tma=False)
    assert_producer_fits(built)
    # one kernel packs the filter; a stage has three taps of it, and what they look at is turned once: five units of a
    # thread for 130 rows, eight channels each, for two stages in turn
    assert len(built.resources) == 2 and found["UTMALDG"] == 3
    assert str(built.sources["ptx"]).count("ld.global.nc.u16") == 5 * 8 * 2


def test_two_pixels_come_at_once_where_they_share_a_word(cuda_compiler: None, sm_90a: Arch) -> None:
    fields = WORK | dict(h=14, w=14, kh=1, kw=1, pad=0)
    built = build(problem_of("conv2d_nchw", **fields, **HALF), sm_90a, NAME, SMALL | dict(grid=0))
    ptx = str(built.sources["ptx"])
    # filters of 1x1 are taken as they lie
    assert len(built.resources) == 1
    assert ptx.count("ld.global.nc.b32") == 2 * 8 and "ld.global.nc.u16" not in ptx


def test_pixels_of_two_planes_come_at_once_where_they_share_a_word(cuda_compiler: None, sm_90a: Arch) -> None:
    built = build(problem_of("conv2d_nchw", **WORK | dict(w=26, stride=2), **HALF), sm_90a, NAME, SMALL | dict(grid=0))
    ptx = str(built.sources["ptx"])
    # five units of a thread for 129 rows, which it stores as one of either plane, in the loop and behind it
    assert ptx.count("ld.global.nc.b32") == 5 * 8 and ptx.count("st.shared.v4") == 2 * 2 * 5
    assert "ld.global.nc.u16" not in ptx


def test_taps_are_rows_of_what_is_turned_once(sm_90a: Arch) -> None:
    spec = operator("conv2d_nchw").schedule(NAME)
    problem = problem_of("conv2d_nchw", n=1, h=33, w=33, ci=64, co=32, kh=3, kw=3, stride=2, **HALF)
    for words, rows, taps in ((dict(), 160 + 128, [0, 160, 1]), (dict(halo=True), 160 + 160 + 160 + 128, None)):
        config = spec.config_for(problem, sm_90a, SMALL | words)
        work = SpansWork(problem, config)  # type: ignore[arg-type]
        found = [each.a // work.a.tile.swizzle for each in work.products]
        # of 128 positions those of even pixels and one more, then those of odd ones; and the line below of both
        assert (work.a.tile.rows, len(found)) == (rows, 9 if config.halo else 3)  # type: ignore[attr-defined]
        assert taps is None or found == taps


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, **HALF)
    for words, reason in (
        (dict(block_n=48, cluster_m=4, grid=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(cluster_n=2), "cluster_n=2 would share pixels, which threads bring for their own block; give 1"),
        (dict(block_k=16), "block_k=16 is not 32, 64 or 128"),
        (dict(num_stages=40), "num_stages=40 needs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, SMALL | words)
    with pytest.raises(ConfigError, match="halo=True is for kernels of several rows"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(kh=1), **HALF), sm_90a, SMALL | dict(halo=True))
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a)
    with pytest.raises(ConfigError, match="data has 2\\*\\*31 elements or more"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(n=4096, h=65, w=65), **HALF), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


@pytest.mark.parametrize("fields", [dict(), dict(kh=1, kw=1, pad=0), dict(stride=2)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", **WORK | fields, **HALF), operator("conv2d_nchw").schedule(NAME)
    assert spec.default(problem, sm_90a).check(problem, sm_90a) is None
    assert spec.default(problem, sm_90a) in spec.space(problem, sm_90a)
