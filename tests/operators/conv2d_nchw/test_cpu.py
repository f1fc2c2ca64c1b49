from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch, physical_cores, vector_unit
from schedules.core.cpu import last_level_cache
from schedules.core.errors import ConfigError
from schedules.operators.conv2d_nchw.cpu import LANES, CpuConfig, default, is_alone, of_lanes
from tests.conftest import assert_changes_the_source, assert_correct, problem_of
from tests.operators.conv2d_nchw.shapes import SHAPES

TARGETS = ("llvm:x86-64-v4", "llvm:x86-64-v3", "llvm:x86-64")
PROBLEM: dict[str, Any] = dict(n=2, h=12, w=12, ci=64, co=24, kh=3, kw=3, pad=1)


CONFIGS: list[dict[str, Any]] = [
    dict(lanes="x", vector=8, block_x=3, block_y=2, block_f=4, tiles_x=2, tiles_y=3, chunk=1),
    dict(lanes="co", vector=8, block_x=5, block_y=1, block_f=2, tiles_x=2, tiles_y=3, chunk=1),
]


# each shape with either axis in the lanes, every third with the default config
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (config, shape)
        for number, shape in enumerate(SHAPES)
        for config in (*CONFIGS, *([{}] if number % 3 == 0 else []))
    ],
    ids=str,
)
def test_schedule_is_correct(host: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), host, "cpu", config)


@settings(max_examples=8)
@given(
    n=st.integers(1, 3), h=st.integers(1, 9), w=st.integers(1, 20), ci=st.integers(1, 9), co=st.integers(1, 20),
    k=st.integers(1, 3), stride=st.integers(1, 3), dilation=st.integers(1, 2), pad=st.integers(0, 2),
    block=st.tuples(*[st.integers(1, 4)] * 3), tiles=st.integers(1, 3), chunk=st.integers(0, 3),
    images=st.integers(1, 4), lanes=st.sampled_from(LANES),
)  # fmt: skip
def test_any_shape_is_correct(
    host: Arch, n: int, h: int, w: int, ci: int, co: int, k: int, stride: int, dilation: int, pad: int,
    block: tuple[int, int, int], tiles: int, chunk: int, images: int, lanes: str,
) -> None:  # fmt: skip
    reach = dilation * (k - 1) + 1 - 2 * pad
    problem = problem_of(
        "conv2d_nchw", n=n, h=max(h, reach), w=max(w, reach), ci=ci, co=co, kh=k, kw=k,
        pad=pad, stride=stride, dilation=dilation,
    )  # fmt: skip
    x, y, f = block
    config = dict(
        vector=4, lanes=lanes, block_x=x, block_y=y, block_f=f,
        tiles_x=tiles, tiles_y=tiles, tiles_n=images, chunk=chunk,
    )  # fmt: skip
    assert_correct(problem, host, "cpu", config)


def test_portable_target() -> None:
    built = build(problem_of("conv2d_nchw", **PROBLEM), parse_arch("llvm:x86-64-v3"), "cpu")
    assert "ymm" in str(built.sources["s"])
    assert "zmm" not in str(built.sources["s"])


def test_sums_stay_in_registers() -> None:
    """24 sums of 16 lanes: one multiply-add for each tap of the loop, and no store of one."""
    config = CpuConfig(block_x=4, block_y=1, block_f=6)
    built = build(problem_of("conv2d_nchw", **{**PROBLEM, "w": 64}), parse_arch("llvm:x86-64-v4"), "cpu", config)
    blocks = re.split(r"^\.LBB\w+:", str(built.sources["s"]), flags=re.M)
    (loop,) = [text.split("\tj")[0] for text in blocks if "vfmadd" in text]
    taps = loop.count("vfmadd") // 24
    assert taps in (1, 3, 9) and loop.count("vfmadd") == 24 * taps
    assert "rsp" not in loop and not re.search(r"vmovups\s+%zmm\d+, ", loop)


def test_default_fits_the_registers_and_the_problem(host: Arch) -> None:
    whole = problem_of("conv2d_nchw", **{**PROBLEM, "co": 48})  # vectors of every width
    tiles = {arch: default(whole, parse_arch(arch)) for arch in TARGETS}
    assert [tile.vector for tile in tiles.values()] == [16, 8, 4]
    for arch, tile in tiles.items():
        assert tile.sums * 4 <= vector_unit(parse_arch(arch)).registers * 3
    short = default(problem_of("conv2d_nchw", **{**PROBLEM, "co": 3, "w": 5}), host)
    assert short.block[0] <= 4 and short.block[2] <= 8


def test_default_packs_in_whole_vectors_near_who_reads_them() -> None:
    """Few pixels and many filters: how those are packed decides."""
    arch = parse_arch("llvm:znver5")
    few = problem_of("conv2d_nchw", n=1, h=14, w=14, ci=1024, co=2048, kh=1, kw=1, stride=2)
    config = default(few, arch)
    assert config.lanes == "co" and few.co % config.block[0] == 0
    assert is_alone(config, few) and not is_alone(default(replace(few, n=16), arch), replace(few, n=16))


def test_default_tasks_cover_the_cores(host: Arch) -> None:
    small = problem_of("conv2d_nchw", n=1, h=7, w=7, ci=512, co=512, kh=3, kw=3, pad=1)
    rows, columns, channels = default(small, host).counts(small)
    config = default(small, host)
    tasks = -(-rows // config.tiles_y) * -(-columns // config.tiles_x) * -(-channels // (config.chunk or channels))
    assert tasks >= physical_cores()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vector", 8),
        ("lanes", "co"),
        ("block_x", 1),
        ("block_y", 1),
        ("block_f", 3),
        ("tiles_x", 2),
        ("tiles_y", 2),
        ("chunk", 2),
        ("tiles_n", 2),
    ],
)
def test_every_field_changes_the_code(host: Arch, field: str, value: Any) -> None:
    base = CpuConfig(vector=4)
    names = {"vector", "lanes", "block_x", "block_y", "block_f", "tiles_x", "tiles_y", "chunk", "tiles_n"}
    assert set(base.to_json()) == names | {"streaming"}
    assert_changes_the_source(problem_of("conv2d_nchw", **PROBLEM), host, "cpu", base, **{field: value})


def test_outputs_go_past_the_caches(host: Arch) -> None:
    problem = problem_of("conv2d_nchw", **{**PROBLEM, "w": 16, "bias": True})
    config = dict(lanes="x", vector=16, block_x=1, block_y=3, block_f=4)
    assert_changes_the_source(problem, host, "cpu", CpuConfig(**config), streaming="stores")  # type: ignore[arg-type]
    assert_correct(problem, host, "cpu", {**config, "streaming": "stores"})


def test_only_outputs_that_no_cache_keeps_go_past_them() -> None:
    """Those of more than the last cache, or whose channels lie whole pages apart, eight ways of one set of the nearest,
    and are more than the next one has room for; of few products for each those that leave the last one little room."""
    arch, fields = parse_arch("llvm:x86-64-v4"), dict(n=1, ci=16, co=64, kh=3, kw=3, pad=1)
    rows = last_level_cache() // (64 * 48 * 4)
    sizes = [(rows // 2 | 1, 48), (rows | 1, 48), (rows | 1, 49), (8 * physical_cores() * 16, 64), (16, 64)]
    streaming = [default(problem_of("conv2d_nchw", **fields, h=h, w=w), arch).streaming for h, w in sizes]
    assert streaming == ["no", "stores", "no", "stores", "no"]
    few = problem_of("conv2d_nchw", **{**fields, "ci": 2}, h=rows // 2 | 1, w=48)
    assert default(few, arch).streaming == "stores"  # type: ignore[attr-defined]


def test_filters_of_a_vector_are_turned_by_shuffles() -> None:
    """Of whole vectors; none is gathered or scattered."""
    config = dict(lanes="co", vector=16, block_x=7, block_y=1, block_f=2)
    fields = dict(n=2, h=7, w=7, ci=16, co=32, kh=3, kw=3, pad=1)
    built = build(problem_of("conv2d_nchw", **fields), parse_arch("llvm:x86-64-v4"), "cpu", config)
    source = str(built.sources["s"])
    assert len(re.findall(r"\tv(?:unpck|perm|shuf|insert)\w+\s.*zmm", source)) >= 64
    assert "vscatter" not in source and "vgather" not in source


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(streaming="both"), "streaming=both is not no or stores"),
        (dict(streaming="stores", lanes="x"), "rows of whole tiles"),
        (dict(streaming="stores", lanes="co"), "streaming=stores is for lanes=x"),
        (dict(lanes="n"), "lanes=n is not x or co"),
        (dict(vector=12), "vector=12"),
        (dict(tiles_y=0), "tiles_y=0"),
        (dict(chunk=-1), "chunk=-1"),
        (dict(block_x=64, block_f=8), "over 1024 sums"),
    ],
)
def test_illegal_configs_are_refused(host: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(problem_of("conv2d_nchw", **PROBLEM), host, "cpu", config)


def test_filters_that_share_a_set_of_the_cache_are_read_a_few_at_a_time() -> None:
    """Rows of 2048 channels lie two times 4 KiB apart: eight ways of one set would hold all of them."""
    arch = parse_arch("llvm:x86-64-v3")
    fields = dict(n=1, h=7, w=7, co=512, kh=1, kw=1)
    far, near = (of_lanes("x", problem_of("conv2d_nchw", ci=ci, **fields), arch)[1] for ci in (2048, 2032))
    assert far.block_f <= 4 < near.block_f
