from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.arch import Arch, parse_arch
from schedules.build import build
from schedules.conv2d_nchw.cpu import CpuConfig, default
from schedules.errors import ConfigError
from tests.conftest import assert_correct, problem_of
from tests.conv2d_nchw.shapes import SHAPES

PROBLEM: dict[str, Any] = dict(n=2, h=12, w=12, ci=64, co=24, kh=3, kw=3, pad=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", [{}, dict(vector=8, block_rows=4, block_k=5, chunk=1)], ids=str)
def test_schedule_is_correct(host: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nchw", **SHAPES[shape]), host, "cpu", config)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 3), h=st.integers(1, 9), w=st.integers(1, 9), ci=st.integers(1, 70), co=st.integers(1, 20),
    k=st.integers(1, 3), stride=st.integers(1, 3), block_k=st.integers(1, 300), chunk=st.integers(0, 3),
)  # fmt: skip
def test_any_shape_is_correct(
    host: Arch, n: int, h: int, w: int, ci: int, co: int, k: int, stride: int, block_k: int, chunk: int
) -> None:
    problem = problem_of("conv2d_nchw", n=n, h=h, w=w, ci=ci, co=co, kh=k, kw=k, pad=k // 2, stride=stride)
    assert_correct(problem, host, "cpu", dict(block_k=block_k, chunk=chunk))


def test_portable_target() -> None:
    built = build(problem_of("conv2d_nchw", **PROBLEM), parse_arch("llvm:x86-64-v3"), "cpu")
    assert "ymm" in str(built.sources["s"])
    assert "zmm" not in str(built.sources["s"])


def test_sums_stay_in_registers() -> None:
    """24 sums of 16 lanes: one multiply-add for each in the loop over k, and no store of one."""
    config = CpuConfig(block_rows=6)
    built = build(problem_of("conv2d_nchw", **PROBLEM), parse_arch("llvm:x86-64-v4"), "cpu", config)
    blocks = re.split(r"^\.LBB\w+:", str(built.sources["s"]), flags=re.M)
    (loop,) = [text.split("\tj")[0] for text in blocks if "vfmadd" in text]
    assert loop.count("vfmadd") == 24 and loop.count("vbroadcastss") == 6
    assert loop.count("vmovups") == 4  # the columns; a sum would be loaded or stored by more


def test_default_tasks_cover_the_cores(host: Arch) -> None:
    small = problem_of("conv2d_nchw", n=1, h=7, w=7, ci=512, co=512, kh=3, kw=3, pad=1)
    assert default(small, host).chunk < 512 // default(small, host).block_rows
    assert default(problem_of("conv2d_nchw", **{**PROBLEM, "co": 7}), host).block_rows == 4


@pytest.mark.parametrize(
    ("field", "value"), [("vector", 8), ("block_vectors", 2), ("block_rows", 2), ("block_k", 64), ("chunk", 1)]
)
def test_every_field_changes_the_code(host: Arch, field: str, value: Any) -> None:
    base = CpuConfig()
    assert set(base.words()) == {"vector", "block_vectors", "block_rows", "block_k", "chunk"}
    problem = problem_of("conv2d_nchw", **PROBLEM)
    sources = {build(problem, host, "cpu", config).sources["ll"] for config in (base, replace(base, **{field: value}))}
    assert len(sources) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(vector=12), "vector=12"),
        (dict(block_k=0), "block_k=0"),
        (dict(chunk=-1), "chunk=-1"),
        (dict(block_vectors=64, block_rows=8), "over 1024 sums"),
    ],
)
def test_illegal_configs_are_refused(host: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(problem_of("conv2d_nchw", **PROBLEM), host, "cpu", config)
