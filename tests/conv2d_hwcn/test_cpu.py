from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedules.arch import Arch
from schedules.build import build
from schedules.conv2d_hwcn.cpu import CpuConfig
from schedules.errors import ConfigError
from tests.conftest import assert_correct, problem_of
from tests.conv2d_hwcn.test_tutorial import SHAPES

PROBLEM: dict[str, Any] = dict(n=96, h=4, w=4, ci=8, co=24, kh=3, kw=3, pad=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "config", [{}, dict(lanes="co", vector=8), dict(padding="buffer", block_lanes=2, chunk=1)], ids=str
)
def test_schedule_is_correct(host: Arch, shape: str, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_hwcn", **SHAPES[shape]), host, "cpu", config)


def test_portable_target() -> None:
    from schedules.arch import parse_arch

    built = build(problem_of("conv2d_hwcn", **PROBLEM), parse_arch("llvm:x86-64-v3"), "cpu")
    assert "ymm" in str(built.sources["s"])
    assert "zmm" not in str(built.sources["s"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("lanes", "co"), ("vector", 8), ("block_lanes", 2), ("block_rows", 2), ("chunk", 1), ("padding", "buffer")],
)
def test_every_field_changes_the_code(host: Arch, field: str, value: Any) -> None:
    base = CpuConfig()
    assert set(base.words()) == {"lanes", "vector", "block_lanes", "block_rows", "chunk", "padding"}
    problem = problem_of("conv2d_hwcn", **PROBLEM)
    sources = {build(problem, host, "cpu", config).sources["ll"] for config in (base, replace(base, **{field: value}))}
    assert len(sources) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(lanes="h"), "lanes=h is not n or co"),
        (dict(padding="mirror"), "padding=mirror"),
        (dict(vector=12), "vector=12"),
        (dict(chunk=0), "chunk=0"),
        (dict(block_lanes=64, block_rows=8), "over 1024 accumulators"),
    ],
)
def test_illegal_configs_are_refused(host: Arch, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(problem_of("conv2d_hwcn", **PROBLEM), host, "cpu", config)
