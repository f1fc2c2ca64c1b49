from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError
from schedules.operators.conv2d_hwcn.cpu import LANES, CpuConfig, copies, default
from tests.conftest import assert_changes_the_source, assert_correct, problem_of
from tests.operators.conv2d_hwcn.test_tutorial import SHAPES

PROBLEM: dict[str, Any] = dict(n=96, h=4, w=4, ci=8, co=24, kh=3, kw=3, pad=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "config", [{}, dict(lanes="co", vector=8, packed=False), dict(lanes="n", block_lanes=2, chunk=1)], ids=str
)
def test_schedule_is_correct(host: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), host, "cpu", config)


@settings(max_examples=8)
@given(
    n=st.integers(1, 20), size=st.integers(1, 9), ci=st.integers(1, 9), co=st.integers(1, 20), k=st.integers(1, 3),
    stride=st.integers(1, 3), pad=st.integers(0, 2), lanes=st.sampled_from(LANES), packed=st.booleans(),
    block=st.tuples(*[st.integers(1, 3)] * 3), tiles=st.integers(1, 3), chunk=st.integers(0, 3),
    images=st.integers(1, 3),
)  # fmt: skip
def test_any_shape_is_correct(
    host: Arch, n: int, size: int, ci: int, co: int, k: int, stride: int, pad: int,
    lanes: str, packed: bool, block: tuple[int, int, int], tiles: int, chunk: int, images: int,
) -> None:  # fmt: skip
    size = max(size, k - 2 * pad)
    problem = problem_of(
        "conv2d_hwcn", n=n, h=size, w=size + 1, ci=ci, co=co, kh=k, kw=k, pad=pad, stride=stride
    )  # fmt: skip
    along, rows, x = block
    config = dict(
        vector=4, lanes=lanes, block_lanes=along, block_rows=rows, block_x=x,
        tiles_x=tiles, tiles_y=tiles, tiles_n=images, chunk=chunk, packed=packed,
    )  # fmt: skip
    assert_correct(problem, host, "cpu", config)


@pytest.mark.parametrize(("n", "lanes"), [(1, "co"), (4, "co"), (7, "n"), (16, "n"), (96, "n")])
def test_default_fills_the_lanes(n: int, lanes: str) -> None:
    assert default(problem_of("conv2d_hwcn", **{**PROBLEM, "n": n}), parse_arch("llvm:x86-64-v4")).lanes == lanes


def test_data_is_read_as_it_lies_where_nothing_is_gained_by_a_copy(host: Arch) -> None:
    config = CpuConfig(block_x=2)
    fields = dict(n=16, h=4, w=4, ci=8, co=24, kh=1, kw=1)
    assert not copies(problem_of("conv2d_hwcn", **fields), config)
    for change in (dict(n=15), dict(w=5), dict(pad=1), dict(kh=3)):
        assert copies(problem_of("conv2d_hwcn", **{**fields, **change}), config)
    built = build(problem_of("conv2d_hwcn", **fields), host, "cpu", config)
    assert "padded" not in built.lowered


def test_portable_target() -> None:
    built = build(problem_of("conv2d_hwcn", **PROBLEM), parse_arch("llvm:x86-64-v3"), "cpu")
    assert "ymm" in str(built.sources["s"])
    assert "zmm" not in str(built.sources["s"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lanes", "co"),
        ("vector", 8),
        ("block_lanes", 2),
        ("block_rows", 2),
        ("block_x", 2),
        ("tiles_x", 2),
        ("tiles_y", 2),
        ("chunk", 1),
        ("tiles_n", 2),
        ("packed", False),
    ],  # fmt: skip
)
def test_every_field_changes_the_code(host: Arch, field: str, value: Any) -> None:
    base = CpuConfig(block_x=1)
    assert set(base.to_json()) == {
        "lanes", "vector", "block_lanes", "block_rows", "block_x", "tiles_x", "tiles_y", "tiles_n", "chunk", "packed"
    }  # fmt: skip
    assert_changes_the_source(problem_of("conv2d_hwcn", **PROBLEM), host, "cpu", base, **{field: value})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(lanes="h"), "lanes=h is not n or co"),
        (dict(vector=12), "vector=12"),
        (dict(tiles_x=0), "tiles_x=0"),
        (dict(block_lanes=64, block_rows=8), "over 1024 sums"),
    ],
)
def test_illegal_configs_are_refused(host: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(problem_of("conv2d_hwcn", **PROBLEM), host, "cpu", config)
