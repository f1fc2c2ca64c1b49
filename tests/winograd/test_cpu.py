"""Winograd's tiles on the CPU: correct in every layout and config."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.arithmetic import FLOAT32
from schedules.core.errors import ConfigError
from schedules.core.registry import operator_of
from schedules.winograd import cpu
from schedules.winograd.cpu import WinogradCpuConfig, cycles, default, part, space
from tests.conftest import assert_changes_the_source, assert_correct, problem_of
from tests.winograd.test_gpu import LAYER, LAYOUTS, SHAPES


def is_taken(problem: Any, arch: Arch) -> bool:
    """Whether nobody has to ask for it."""
    return operator_of(problem).choose(problem, arch) == "winograd_cpu"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_is_correct(host: Arch, layout: str, shape: str) -> None:
    assert_correct(problem_of(layout, **SHAPES[shape]), host, "winograd_cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (dict(n=2, h=15, w=18, ci=40, co=24, kh=3, kw=3, pad=1, stride=2, bias=True), {}),
        (dict(n=1, h=12, w=13, ci=40, co=20, kh=3, kw=3, stride=(1, 2)), dict(tile_h="3", tile_w="4+2")),
        (dict(n=2, h=11, w=9, ci=40, co=24, kh=5, kw=2, pad=(2, 0), stride=(3, 2)), dict(tile_h="3", tile_w="5")),
        (dict(n=1, h=9, w=11, ci=64, co=24, kh=1, kw=3, stride=(2, 4)), dict(tile_h="1", tile_w="2")),
    ],
    ids=str,
)
def test_any_stride_is_correct(host: Arch, layout: str, shape: dict[str, Any], config: dict[str, Any]) -> None:
    assert_correct(problem_of(layout, **shape), host, "winograd_cpu", config)


def test_a_stride_takes_fewer_products() -> None:
    """Where an image is large beside its filters: five points of one phase and four of the other make four outputs."""
    arch = parse_arch("llvm:x86-64-v4")
    for layout in ("conv2d_nchw", "conv2d_nhwc"):
        problem = problem_of(layout, n=16, h=56, w=56, ci=128, co=128, kh=3, kw=3, pad=1, stride=2)
        config = default(problem, arch)
        made = config.graph(problem)
        assert made.rows.points * made.columns.points < 9 * made.rows.period * made.columns.period
        assert is_taken(problem, arch)


@pytest.mark.parametrize(("n", "vector"), [(8, 4), (8, 8), (16, 8), (6, 4), (1, 8)])
def test_any_number_of_images_inside_is_correct(host: Arch, n: int, vector: int) -> None:
    """Images fill vectors of the last tiles too, of which some are beyond the end; or channels are brought inside."""
    problem = problem_of("conv2d_hwcn", n=n, h=11, w=14, ci=24, co=20, kh=3, kw=3, pad=1, bias=True)
    config = WinogradCpuConfig("4", "3", vector=vector, block_lanes=2, block_rows=4, columns=7)
    made = config.graph(problem)
    assert made.turned == bool(n % vector) and made.tiles % made.tile[1]
    assert made.lanes == ("channels" if made.turned else "images")
    assert_correct(problem, host, "winograd_cpu", config)
    lowered = build(problem, host, "winograd_cpu", config).lowered
    assert "pixels_local[" in lowered
    assert made.turned or not re.search(r"pixels_local\[[^\]]*_s\b", lowered), "images are copied one by one"


def test_where_direct_products_are_faster() -> None:
    """Wide pipes multiply in half the time, and transform in as much.  Lanes that hold channels are idle
    where there are few."""
    wide = parse_arch("llvm:znver5")
    few = dict(n=16, h=64, w=64, ci=320, co=4, kh=3, kw=3, pad=1)
    for layout in ("conv2d_nchw", "conv2d_nhwc"):
        strided = problem_of(layout, n=16, h=14, w=14, ci=512, co=512, kh=3, kw=3, pad=1, stride=2)
        assert not is_taken(strided, wide) and is_taken(replace(strided, stride=(1, 1)), wide)
        assert is_taken(problem_of(layout, **few), wide) == (layout == "conv2d_nhwc")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(stride=2, dilation=2), "stride=(2, 2) of a filter with dilation=(2, 2)"),
        (dict(dtype="float16"), "dtype=float16: transforms are in float32"),
    ],
)
def test_what_is_refused(host: Arch, fields: dict[str, Any], words: str) -> None:
    problem = problem_of("conv2d_nhwc", **{**LAYER, **fields})
    assert str(WinogradCpuConfig().check(problem, host)).startswith(words)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [
        dict(tile_h="6", tile_w="4+2", vector=4, block_lanes=1, block_rows=3, columns=2, chunk=2),
        dict(tile_h="2", tile_w="5", vector=8, block_lanes=3, block_rows=4, columns=1, chunk=1),
        dict(tile_h="4", tile_w="4", vector=4, block_lanes=1, block_rows=3, columns=99, chunk=2),
    ],
    ids=str,
)
def test_other_configs_are_correct(host: Arch, layout: str, config: dict[str, Any]) -> None:
    problem = problem_of(layout, n=8, h=7, w=9, ci=16, co=48, kh=3, kw=3, pad=1, bias=True)
    assert_correct(problem, host, "winograd_cpu", config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_stay_in_registers(layout: str) -> None:
    """No store and no spill in the inner loop of the products."""
    problem = problem_of(layout, n=8, h=8, w=8, ci=64, co=32, kh=3, kw=3, pad=1)
    config = dict(vector=8, block_lanes=2, block_rows=4)
    built = build(problem, parse_arch("llvm:x86-64-v3"), "winograd_cpu", config)
    blocks = re.split(r"^\.LBB\w+:", str(built.sources["s"]), flags=re.M)
    loop = max(
        (text.split("\tj")[0] for text in blocks), key=lambda text: text.count("vfmadd231ps") - text.count("\n") / 4
    )
    assert loop.count("vfmadd") % 8 == 0 and "rsp" not in loop and not re.search(r"vmovups\s+%ymm\d+, ", loop)


def test_channels_are_summed_in_parts(host: Arch) -> None:
    """In one chain the worst of these is off by 0.7 of the tolerance."""
    assert [part(ci) for ci in (16, 63, 64, 97, 240, 256)] == [0, 0, 32, 0, 40, 32]
    problem = problem_of("conv2d_nchw", n=8, h=14, w=14, ci=256, co=128, kh=3, kw=3, pad=1)
    built = build(problem, host, "winograd_cpu", dict(tile_h="4", tile_w="4"))
    data, weights = built.operator.inputs(problem, np.random.default_rng(0))[:2]
    got = np.full(problem.shapes()[2], np.nan, np.float32)
    built(data, weights, got)
    (expected,) = built.operator.reference(problem, [data, weights])
    assert (np.abs(got - expected.values) <= 0.4 * FLOAT32.error * expected.magnitude).all()


def test_outputs_go_past_the_caches(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=1, h=7, w=9, ci=64, co=32, kh=3, kw=3, pad=1, bias=True)
    config = WinogradCpuConfig(tile_h="2", tile_w="2", vector=16, block_lanes=2, block_rows=4)
    assert_changes_the_source(problem, host, "winograd_cpu", config, streaming="stores")
    assert_correct(problem, host, "winograd_cpu", replace(config, streaming="stores").to_json())
    tiles = replace(config, streaming="stores").check(problem_of("conv2d_nchw", **LAYER), host)
    assert tiles == "streaming=stores is for data with channels inside"


def test_few_tiles_of_many_channels_have_their_filters_near(host: Arch) -> None:
    problem = problem_of("conv2d_nhwc", n=1, h=14, w=14, ci=512, co=512, kh=3, kw=3, pad=1)
    config = default(problem, host)
    assert config.graph(problem).owned  # type: ignore[attr-defined]
    assert cycles(config, problem, host) < cycles(replace(config, columns=1), problem, host)  # type: ignore[arg-type]


def test_tasks_fill_the_cores_and_the_cache(host: Arch) -> None:
    for shape in (LAYER, {**LAYER, "n": 1}, {**LAYER, "n": 1, "h": 14, "w": 14, "ci": 256, "co": 256}):
        problem = problem_of("conv2d_nhwc", **shape)
        config = default(problem, host)
        assert config.check(problem, host) is None
        made = config.graph(problem)
        points = made.rows.points * made.columns.points
        assert points * problem.ci * config.block(True)[1] * config.columns * 4 <= 2 * 2**20  # type: ignore[attr-defined]
        assert any(other != config and other.check(problem, host) is None for other in space(problem, host))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(vector=3), "vector=3 is not a power of two"),
        (dict(columns=0), "columns=0 must be at least 1"),
        (dict(chunk=-1), "chunk=-1 must not be negative"),
        (dict(block_rows=100), "block_rows=100 make a register tile of over 1024 sums"),
        (dict(tile_h="7"), "tile_h=7 is not one to 3"),
    ],
)
def test_illegal_configs_are_refused(host: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        build(problem_of("conv2d_nchw", **LAYER), host, "winograd_cpu", config)


def test_fields_are_those_of_the_cut_and_of_the_tile() -> None:
    assert set(WinogradCpuConfig().to_json()) == {
        "tile_h", "tile_w", "vector", "block_lanes", "block_rows", "columns", "chunk", "streaming",
    }  # fmt: skip


def test_filters_take_longer_from_farther_caches(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("conv2d_nhwc", n=1, h=32, w=32, ci=640, co=640, kh=3, kw=3, pad=1)
    config = default(problem, host)
    took = []
    for nearest, last in ((1 << 40, 1 << 40), (1, 1 << 40), (1, 1)):  # bytes that the caches hold
        monkeypatch.setattr(cpu, "_near", lambda nearest=nearest: nearest)
        monkeypatch.setattr(cpu, "beyond_caches", lambda nbytes, share, last=last: nbytes > share * last)
        took.append(cycles(config, problem, host))
    assert took[0] < took[1] < took[2]
