"""What a config costs beside products: lacking registers, idle lanes, parts of sectors, other kernels, a residual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.core.arch import parse_arch
from schedules.core.presets import resolve
from schedules.core.problem import Config
from schedules.core.registry import operator_of
from schedules.predict.configs import columns_of
from schedules.predict.estimate import distinct, work

ARCH = parse_arch("cuda:sm_90a")
LAYER = {"n": "32", "h": "28", "w": "28", "ci": "64", "co": "64", "kh": "3", "kw": "3", "pad": "1", "dtype": "float16"}


def parts(name: str, schedule: str, layer: dict[str, str], *configs: dict[str, Any]) -> list[dict[str, float]]:
    _, problem = resolve(name, LAYER | layer)
    spec = operator_of(problem).schedule(schedule)
    made: list[Config] = [spec.config.parse(config) for config in configs]
    found = work(problem, spec, columns_of(made), ARCH)
    return [{key: float(part[row]) for key, part in found.parts.items()} for row in range(len(made))]


@pytest.mark.parametrize("count", (0, 1, 500))
def test_equal_rows_are_found_once(count: int) -> None:
    columns = [np.random.default_rng(i).integers(0, 3 + i, count).astype(float) for i in range(3)]
    rows, number = distinct(*columns)
    assert len(rows) == len(set(rows)) == len(set(zip(*columns, strict=True)))
    assert [rows[each] for each in number] == list(zip(*columns, strict=True))


def test_sums_that_registers_do_not_hold() -> None:
    tile = dict(block_m=256, block_n=64, block_k=32, warps_m=4, warps_n=1, stages=3)
    free, bound = parts("conv2d_nhwc", "mma", {}, tile, tile | dict(min_blocks=4))
    assert free["spill"] == 0 and bound["spill"] > bound["multiply"]


def test_lanes_that_a_warp_lacks() -> None:
    whole, part = (dict(block=block, pixels="4x4", filters=4, channels_per_stage=2) for block in ("32x32", "4x32"))
    full, idle = parts("conv2d_nchw", "direct", {"dtype": "float32"}, whole, part)
    assert idle["multiply"] > 2 * full["multiply"]


@pytest.mark.parametrize(("w", "whole"), [("28", True), ("27", False)])
def test_rows_that_end_within_sectors(w: str, whole: bool) -> None:
    tile = dict(tile_h=8, tile_w=32, block_n=64, warps_m=4, warps_n=1)
    few = {"ci": "4", "w": w}
    (rows,), (pixels,) = (parts(name, "mma_windows", few, tile) for name in ("conv2d_nchw", "conv2d_nhwc"))
    assert (rows["finish"] < 1.2 * pixels["finish"]) == whole


@pytest.mark.parametrize(("side", "apart", "joined"), [("28", 0, 0), ("7", 1, 0), ("37", 1, 1)])
def test_runs_of_pixels_that_begin_and_end_within_sectors(side: str, apart: int, joined: int) -> None:
    """None where planes are whole sectors, fewer where tiles overlap, none again where they have whole images."""
    tile = dict(block_m=128, block_n=64, block_k=64, consumers=2, cluster_m=1, cluster_n=1, grid=132)
    configs = tile, tile | dict(whole_sectors=True), tile | dict(ping_pong=True)
    usual, whole, turns = parts("conv2d_nchw", "tma_wgmma_turned", {"h": side, "w": side}, *configs)
    assert (usual["ends"] > 0, whole["ends"] > 0) == (apart, joined)
    assert whole["ends"] <= usual["ends"] / 4 and turns["ends"] <= usual["ends"]
    assert parts("conv2d_nhwc", "tma_wgmma", {"h": side, "w": side}, tile)[0]["ends"] == 0


def test_parts_of_a_reduction_that_another_kernel_adds_up() -> None:
    few = {"n": "1", "h": "7", "w": "7", "ci": "512", "co": "512", "dtype": "float32"}
    one, eight = parts("conv2d_nhwc", "simt", few, dict(tile=4, num_thread=8), dict(tile=4, num_thread=8, split_k=8))
    assert one["copies"] == 0 < eight["copies"] and eight["latency"] < one["latency"] / 4


def test_a_residual_comes_once_for_each_tile() -> None:
    """Through L2, however many taps there are."""
    tile = dict(block_m=128, block_n=64, block_k=64, num_stages=4)
    times = {}
    for size in ("1", "3"):
        for residual in ("false", "true"):
            layer = {"kh": size, "kw": size, "residual": residual}
            (times[size, residual],) = parts("conv2d_nhwc", "tma_wgmma", layer, tile)
    more = [times[size, "true"]["l2"] - times[size, "false"]["l2"] for size in ("1", "3")]
    assert more[0] == pytest.approx(more[1]) and more[0] > 0.2 * times["1", "false"]["l2"]


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("conv2d_hwcn", {"n": "130"}, dict(block_n=160, turned="true")),
        ("conv2d_hwcn", {"n": "130"}, dict(block_n=256)),
        ("conv2d_hwcn", {"n": "96", "h": "13", "w": "13"}, dict(block_n=192)),
        ("conv2d_hwcn", {"n": "96", "h": "13", "w": "13"}, dict(block_n=96, cluster_n=2)),
        ("conv2d_hwcn", {"n": "96", "h": "13", "w": "13"}, dict(block_n=96, cluster_n=2, lines=3)),
        ("conv2d_hwcn", {"n": "130"}, dict(block_n=144, block_k=16, lines=2)),
        ("conv2d_nhwc", {"h": "7", "w": "7"}, dict(block_n=64)),
        ("conv2d_nhwc", {"n": "3", "h": "7", "w": "7"}, dict(block_n=64, cluster_m=2)),
        ("conv2d_nhwc", {"kh": "1", "kw": "1", "pad": "0", "h": "7", "w": "7"}, dict(block_n=64)),
    ],
    ids=str,
)
def test_tiles_are_counted_as_their_boxes_are(name: str, layer: dict[str, str], words: dict[str, Any]) -> None:
    """Of odd batches and small images a tile has fewer outputs than places."""
    _, problem = resolve(name, LAYER | layer)
    spec = operator_of(problem).schedule("tma_wgmma")
    config: Any = spec.config.parse(dict(block_m=128, block_k=64, cluster_m=1, num_stages=2) | words)
    made = config.work(problem)
    assert made is not None
    assert work(problem, spec, columns_of([config]), ARCH).tiles[0] == made.clusters * config.cluster


@pytest.mark.parametrize(("size", "stride", "share"), [("3", "1", 4 / 6), ("5", "1", 6 / 10), ("3", "2", 5 / 6)])
def test_lines_of_a_tile_share_what_their_kernel_rows_look_at(size: str, stride: str, share: float) -> None:
    layer = {"n": "64", "kh": size, "kw": size, "pad": "1", "stride": stride}
    tile = dict(block_m=128, block_k=32, cluster_m=1, num_stages=3)
    wide, tall = parts("conv2d_hwcn", "tma_wgmma", layer, tile | dict(block_n=128), tile | dict(block_n=64, lines=2))
    assert tall["l2"] == pytest.approx(wide["l2"] * (1 + share) / 2) and tall["latency"] < wide["latency"]


def test_odd_batches_are_copied_where_their_channels_have_no_phases() -> None:
    odd, even, few = (
        parts("conv2d_hwcn", "tma_wgmma", words, *(dict(block_n=144, turned=turned) for turned in (False, True)))
        for words in ({"n": "130"}, {"n": "128"}, {"n": "130", "ci": "40"})
    )
    assert even[0]["copies"] == odd[0]["copies"] == 0 < few[0]["copies"]
    assert all(parts_of[1]["copies"] > 0 for parts_of in (odd, even, few))
    assert odd[0]["finish"] > odd[1]["finish"]  # sums move between phases
