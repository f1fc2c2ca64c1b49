"""Tiles that are tried beside those that every problem has."""

from __future__ import annotations

import pytest

from schedules.core.arch import Arch
from schedules.core.registry import operator
from schedules.hopper.config import K_STEPS, PING_PONG, SHAPES, blocks, fitting
from tests.conftest import problem_of


@pytest.mark.parametrize(
    ("pixels", "channels", "reduction", "shape"),
    [
        (6240, 384, 384, (192, 96, 3)),  # 33 x 4 tiles for 132 multiprocessors
        (1568, 2048, 512, (128, 208, 2)),  # 13 x 10
        (8192, 320, 640, None),  # 64 x 2 of 128 x 160
    ],
)
def test_shapes_that_fill_the_device(
    sm_90a: Arch, pixels: int, channels: int, reduction: int, shape: tuple[int, int, int] | None
) -> None:
    found = fitting(lambda m: -(-pixels // m), channels, reduction, sm_90a.device)
    assert found[:1] == ((shape,) if shape else ()) and not {*found} & {*SHAPES}


@pytest.mark.parametrize(("pixels", "channels", "reduction"), [(512, 1280, 2560), (512, 1280, 640)])
def test_shapes_that_fill_it_where_no_blocks_share_a_reduction(
    sm_90a: Arch, pixels: int, channels: int, reduction: int
) -> None:
    found = fitting(lambda m: -(-pixels // m), channels, reduction, sm_90a.device)
    assert (64, 80, 1) in found  # 8 x 16 tiles for 132 multiprocessors
    assert len(found) == len({*found})


def test_blocks_with_pixels_of_their_own_and_small_stages_are_some_of_all(sm_90a: Arch) -> None:
    every, device = blocks("float16", sm_90a.device, filters=True), sm_90a.device
    own = blocks("float16", device, filters=True, own_pixels=True, k_steps=K_STEPS[:2])
    assert {words["block_k"] for words in own} == {32, 64} and {words["block_k"] for words in every} == {32, 64, 128}
    assert [*own] == [words for words in every if words["cluster_n"] == 1 and words["block_k"] < 128]


def test_consumers_may_have_tiles_that_fit_of_their_own(sm_90a: Arch) -> None:
    """As wide as equal parts of 576 channels: of a block, or one of each consumer, unless those are too large."""
    shapes = (*SHAPES, (128, 144, 2), (64, 208, 1), (128, 176, 2), (192, 96, 3))
    turns = {
        (words["block_m"], words["block_n"], words["consumers"])
        for words in blocks("float16", sm_90a.device, shapes)
        if words.get("ping_pong")
    }
    assert turns == {*PING_PONG, (128, 144, 2), (64, 208, 2)}


def test_they_are_of_the_space_and_legal(sm_90a: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=32, h=7, w=7, ci=512, co=2048, kh=1, kw=1, dtype="float16")
    configs = [
        config
        for config in operator("conv2d_nhwc").schedule("tma_wgmma").space(problem, sm_90a)
        if (config.block_m, config.block_n) == (128, 208)
    ]
    assert any(config.check(problem, sm_90a) is None for config in configs)
