"""NCHW convolution from runs of pixels turned in shared memory: what it is made of, what it refuses, and whether it is
right."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.tma_wgmma_runs import RunWork, layout_of, turned
from tests.conftest import caught, problem_of
from tests.hopper_kernels import assert_emulated, assert_producer_fits, assert_well_made

NAME = "tma_wgmma_runs"
HALF = dict(dtype="float16")
WORK: dict[str, Any] = dict(n=8, h=13, w=13, ci=128, co=128, kh=3, kw=3, pad=1)
SHAPES: dict[str, dict[str, Any]] = {
    "1x1, several images to a tile": dict(n=5, h=7, w=7, ci=72, co=70, kh=1, kw=1, bias=True, residual=True),
    "1x1, classes of channels": dict(n=2, h=9, w=17, ci=40, co=40, kh=1, kw=1, bias=True),
    "1x1 that leaves pixels out": dict(n=2, h=14, w=14, ci=32, co=48, kh=1, kw=1, stride=2, activation="relu"),
    "one output of an image": dict(n=5, h=3, w=3, ci=32, co=48, kh=3, kw=2, stride=3),
    "whole images": dict(n=3, h=7, w=7, ci=16, co=70, kh=3, kw=3, pad=1, bias=True, activation="relu"),
    "parts of images": dict(n=2, h=14, w=14, ci=40, co=33, kh=3, kw=3, pad=1, residual=True),
    "planes of whole vectors": dict(n=2, h=12, w=28, ci=21, co=24, kh=3, kw=3, pad=1),
    "stride 2": dict(n=3, h=13, w=11, ci=40, co=40, kh=5, kw=5, pad=1, stride=2, bias=True),
    "stride 2, planes of unlike taps": dict(n=3, h=8, w=10, ci=24, co=33, kh=2, kw=4, pad="0,1", stride="1,2"),
    "a column of taps": dict(n=2, h=17, w=17, ci=32, co=24, kh=7, kw=1, pad="3,0"),
    "odd strides and dilation": dict(
        n=2, h=11, w=10, ci=16, co=24, kh=3, kw=2, pad="2,1", stride="2,3", dilation="2,1"
    ),
    "dilation, packed": dict(n=1, h=13, w=15, ci=8, co=24, kh=3, kw=3, pad=2, dilation=2, filter_layout="hwoi"),
    "padding wider than the image": dict(n=2, h=2, w=3, ci=8, co=16, kh=5, kw=7, pad="4,6"),
    "bfloat16": dict(n=1, h=12, w=10, ci=16, co=24, kh=3, kw=3, pad=1, dtype="bfloat16", residual=True),
}
SMALL = dict(
    block_m=64, block_n=32, block_k=32, num_stages=2, consumers=1, cluster_m=1, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, row=True, whole_sectors=False,
)  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    SMALL | dict(block_m=128, block_n=64, consumers=2, cluster_m=2, grid=4),
    SMALL | dict(block_m=256, block_n=16, consumers=2, row=False),
    SMALL | dict(block_k=64, num_stages=4, row=False),
    SMALL | dict(consumers=2, ping_pong=True, num_stages=3),
    SMALL | dict(block_m=192, block_n=48, consumers=3),
    SMALL | dict(consumers=2, ping_pong=True, stationary=True),
    SMALL | dict(pairs=3),
    SMALL | dict(block_k=16, num_stages=3, consumers=2, ping_pong=True, stationary=True),
    SMALL | dict(pairs=3, block_m=128, consumers=2, block_k=64, split_k=2, grid=4, row=False),
    SMALL | dict(split_k=2, grid=4),
    SMALL | dict(split_k=4, grid=4, row=False, block_m=128, consumers=2),
    SMALL | dict(blocks_sm=2, grid=3, row=False, block_n=16),
    SMALL | dict(block_m=128, consumers=2, whole_sectors=True),
    SMALL | dict(consumers=2, ping_pong=True, num_stages=3, whole_sectors=True),
    SMALL | dict(split_k=2, grid=4, whole_sectors=True),
]


def work_of(arch: Arch, fields: dict[str, Any], **words: Any) -> RunWork:
    problem: Any = problem_of("conv2d_nchw", **HALF | fields)
    config: Any = operator("conv2d_nchw").schedule(NAME).config_for(problem, arch, SMALL | words)
    return RunWork(problem, config)


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated(emulation: None, shape: str) -> None:
    """By rows of the kernel, and each other shape tap by tap."""
    row = list(SHAPES).index(shape) % 2 == 0
    assert_emulated("conv2d_nchw", HALF | SHAPES[shape], SMALL | dict(row=row), NAME)


@pytest.mark.parametrize("words", CONFIGS, ids=str)
def test_configs_emulated(emulation: None, words: dict[str, Any]) -> None:
    """Of chunks of the channels that split_k does not divide, too."""
    fields = dict(n=3, h=9, w=7, ci=40, co=40, kh=3, kw=2, pad=1, bias=True)
    assert_emulated("conv2d_nchw", HALF | fields, words, NAME)


def test_what_it_is_made_of(cuda_compiler: None, sm_90a: Arch) -> None:
    words = SMALL | dict(block_m=128, block_n=64, consumers=2, num_stages=3, grid=0)
    built = build(problem_of("conv2d_nchw", **WORK, **HALF, filter_layout="hwoi"), sm_90a, NAME, words)
    found = assert_well_made(built, "HGMMA", stored_by_tma=False)
    assert_producer_fits(built)
    # a stage has three taps of the filter; another warp has runs of pixels brought, of one image or two, of all eight
    # classes of channels
    assert len(built.resources) == 1 and found["UTMALDG"] == 3 + 2 * 8
    # 128 positions and two rows of 14 and two more, in 5 blocks of a warp, for 2 groups of channels
    calls = Counter(re.findall(r"^ +(hopper_turned_\w+)\(", str(built.sources["cu"]), re.M))
    assert calls == {"hopper_turned_read": 5 * 2, "hopper_turned_put": 5 * 2}


def test_every_tap_finds_the_position_that_it_looks_at(sm_90a: Arch) -> None:
    for fields in SHAPES.values():
        work = work_of(sm_90a, fields, row=False)
        layout, p = work.layout, work.problem
        y_axis, x_axis = layout.axes
        for ry, rx in np.ndindex(p.kh, p.kw):
            moved = layout.moved_down(ry) + layout.moved_across(rx)
            (y, plane_y), (x, plane_x) = (
                divmod(r * axis.dilation - axis.pad, axis.stride) for r, axis in ((ry, y_axis), (rx, x_axis))
            )
            by, bx, first = layout.firsts[moved // layout.span]
            assert (by, bx) == (plane_y, plane_x)
            assert first + moved % layout.span == y * layout.positions.down + x
            # and it has all of the tile's there
            assert moved % layout.span + layout.pixels <= layout.span


def test_a_box_has_all_that_a_tile_looks_at(sm_90a: Arch) -> None:
    """Pixel by pixel, of every tile, as the channels of each class have them."""
    for fields in SHAPES.values():
        work = work_of(sm_90a, fields, row=False)
        layout, p, source = work.layout, work.problem, work.runs
        length, (y_stride, x_stride) = layout.positions.x.length, p.stride
        for tile in range(0, layout.positions.outputs, layout.pixels):
            image, rest = divmod(max(tile + layout.first, 0), layout.of_image)
            begin = rest // length * y_stride * p.w + min(rest % length * x_stride, p.w)
            begin = 0 if layout.whole else begin // 8 * 8
            for by, bx, first in layout.firsts:
                for at in range(max(tile + first, 0), tile + first + layout.pixels + layout.reach):
                    n, rest = divmod(at, layout.of_image)
                    y, x = rest // length * y_stride + by, rest % length * x_stride + bx
                    if n < p.n and y < p.h and x < p.w:
                        assert image <= n < image + source.images
                        place = y * p.w + x - (begin if n == image else 0)
                        assert place >= 0 and place + source.classes.latest < source.source.box[0]


def test_what_is_left_out_is_noticed(emulation: None, sm_90a: Arch) -> None:
    """Zeros where there is no pixel."""
    problem = problem_of("conv2d_nchw", **HALF | SHAPES["whole images"])
    built = build(problem, sm_90a, NAME, SMALL | dict(grid=1))
    arrays = operator("conv2d_nchw").inputs(problem, np.random.default_rng(0))
    source, zeros = str(built.sources["cu"]), "12850"
    assert source.count(zeros) >= 1 and not caught(built, source, arrays)
    assert caught(built, source.replace(zeros, str(0x5410)), arrays)


def test_illegal_configs_say_why(sm_90a: Arch) -> None:
    spec, problem = operator("conv2d_nchw").schedule(NAME), problem_of("conv2d_nchw", **WORK, **HALF)
    for words, reason in (
        (dict(block_n=48, cluster_m=4, grid=4), "block_n=48 is not 4 times a multiple of 8 rows"),
        (dict(cluster_n=2), "cluster_n=2 would share pixels, which threads bring for their own block; give 1"),
        (dict(block_k=128), "block_k=128 is not 16, 32 or 64"),
        (dict(num_stages=40), "num_stages=40 needs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            spec.config_for(problem, sm_90a, SMALL | words)
    with pytest.raises(ConfigError, match="ci=20 is not a multiple of the 8 channels that are whole 16 bytes"):
        spec.config_for(problem_of("conv2d_nchw", **WORK | dict(ci=20), **HALF), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="a tile looks at 336 pixels of an image side by side, TMA brings 256"):
        far = WORK | dict(w=299, dilation="1,128", kh=1)
        spec.config_for(problem_of("conv2d_nchw", **far, **HALF), sm_90a, SMALL)
    with pytest.raises(ConfigError, match="dtype=float32 is not float16 or bfloat16"):
        spec.config_for(problem_of("conv2d_nchw", **WORK), sm_90a)
    with pytest.raises(ConfigError, match="cuda:sm_80 has no tma and no wgmma"):
        spec.config_for(problem, parse_arch("sm_80"))


def test_what_the_choice_is_told_of_memory_is_what_a_block_has(sm_90a: Arch) -> None:
    for pixels, channels in ((64, 32), (64, 64), (128, 32)):
        words = dict(block_m=pixels, block_k=channels, consumers=2 if pixels > 64 else 1)
        work = work_of(sm_90a, WORK, **words)
        problem: Any = problem_of("conv2d_nchw", **WORK, **HALF)
        assert turned(problem, pixels, channels) == (work.runs.beside_stages, work.runs.loaded_bytes)
    wide: Any = problem_of("conv2d_nchw", **WORK | dict(w=299, dilation="1,128", kh=1), **HALF)
    assert turned(wide, 64, 32) is None and layout_of(wide, 64).run > 256


@pytest.mark.parametrize("fields", [dict(), dict(kh=1, kw=1, pad=0), dict(stride=2)], ids=str)
def test_the_space_holds_the_default(sm_90a: Arch, fields: dict[str, Any]) -> None:
    problem, spec = problem_of("conv2d_nchw", **WORK | fields, **HALF), operator("conv2d_nchw").schedule(NAME)
    assert spec.default(problem, sm_90a).check(problem, sm_90a) is None
    assert spec.default(problem, sm_90a) in spec.space(problem, sm_90a)
