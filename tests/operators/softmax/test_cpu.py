from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch, physical_cores
from schedules.core.cpu import last_level_cache
from schedules.core.errors import ConfigError
from schedules.operators.softmax.cpu import CpuConfig, default
from schedules.operators.softmax.definition import FUNCTIONS
from tests.conftest import assert_correct, problem_of
from tests.operators.softmax.test_gpu_schedules import PROBLEMS


@pytest.mark.parametrize("fields", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("config", [{}, dict(vector=8, unroll=4, rows_per_task=1, keep=False)], ids=str)
def test_schedule_is_correct(host: Arch, fields: dict[str, Any], config: dict[str, Any]) -> None:
    assert_correct(problem_of("softmax", rows=7, **fields), host, "cpu", config)


@settings(max_examples=8)
@given(
    rows=st.integers(1, 9), cols=st.integers(1, 300), function=st.sampled_from(FUNCTIONS),
    vector=st.sampled_from((2, 8, 16, 64)), keep=st.booleans(), drawn=st.booleans(),
)  # fmt: skip
def test_any_shape_is_correct(
    host: Arch, rows: int, cols: int, function: str, vector: int, keep: bool, drawn: bool
) -> None:
    dropout = dict(keep=0.7, drop="drawn") if drawn else {}
    problem = problem_of("softmax", rows=rows, cols=cols, function=function, dtype="float32", **dropout)
    assert_correct(problem, host, "cpu", dict(vector=vector, keep=keep))


@pytest.mark.parametrize("cols", [1023, 8193, 50257, 100000])
def test_long_rows(host: Arch, cols: int) -> None:
    assert_correct(problem_of("softmax", rows=3, cols=cols, dtype="float32"), host, "cpu")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_sum_of_a_very_long_row_keeps_its_digits(host: Arch, function: str) -> None:
    """One partial sum a lane, 65536 elements long, would be five times the tolerance off."""
    assert_correct(problem_of("softmax", rows=3, cols=2**20, dtype="float32", function=function), host, "cpu")


@pytest.mark.parametrize(("cols", "vector"), [(1, 4), (5, 4), (8, 8), (16, 16), (24, 16), (1000, 32), (4096, 64)])
def test_the_default_has_no_more_lanes_than_columns(cols: int, vector: int) -> None:
    problem = problem_of("softmax", rows=64, cols=cols)
    assert default(problem, parse_arch("llvm:x86-64-v4")).vector == vector
    half = default(problem, parse_arch("llvm:x86-64-v3")).vector
    assert half == (vector if cols < 16 else vector // 2)


def test_every_core_has_tasks(host: Arch) -> None:
    for rows, cols in ((16, 262144), (256, 32768), (16384, 8)):
        config = default(problem_of("softmax", rows=rows, cols=cols), host)
        assert -(-rows // config.rows_per_task) >= physical_cores()


def test_a_small_problem_is_one_task(host: Arch) -> None:
    def tasks(rows: int, cols: int) -> int:
        return -(-rows // default(problem_of("softmax", rows=rows, cols=cols), host).rows_per_task)

    assert tasks(16, 64) == tasks(128, 64) == tasks(8, 1024) == 1
    assert tasks(512, 64) >= physical_cores() and tasks(32, 1024) >= physical_cores()


def test_problems_larger_than_the_last_cache_store_past_it(host: Arch) -> None:
    def streaming(rows: int, cols: int, **fields: Any) -> str:
        return default(problem_of("softmax", rows=rows, cols=cols, dtype="float32", **fields), host).streaming

    many = last_level_cache() // 1024
    for function in FUNCTIONS:
        assert streaming(many, 1024, function=function) == "stores"
        assert streaming(many // 16, 1024, function=function) == "no"
    assert streaming(many, 1023) == "no"
    assert streaming(many, 1024, keep=0.5) == "no"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(cols=1023), "for rows of whole 16 bytes"),
        (dict(cols=64, keep=0.5), "not for dropout, which reads y again"),
    ],
    ids=str,
)
def test_what_can_not_go_past_the_caches_is_refused(host: Arch, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(problem_of("softmax", rows=1, dtype="float32", **fields), host, "cpu", dict(streaming="stores"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("vector", 8), ("unroll", 4), ("rows_per_task", 16), ("keep", False), ("streaming", "stores")],
)
def test_every_field_changes_the_code(host: Arch, field: str, value: int) -> None:
    assert set(CpuConfig().to_json()) == {"vector", "unroll", "rows_per_task", "keep", "streaming"}
    problem = problem_of("softmax", rows=64, cols=1024)
    configs = (CpuConfig(), replace(CpuConfig(), **{field: value}))
    assert len({build(problem, host, "cpu", config).sources["ll"] for config in configs}) == 2


@pytest.mark.parametrize(
    "config",
    [dict(vector=12), dict(vector=1), dict(unroll=0), dict(rows_per_task=0), dict(streaming="both")],
    ids=str,
)
def test_illegal_configs_are_refused(host: Arch, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        build(problem_of("softmax", rows=1, cols=64), host, "cpu", config)


@pytest.mark.parametrize("cols", [8, 100, 1024, 4096])
def test_exp_is_vectorised(host: Arch, cols: int) -> None:
    source = str(build(problem_of("softmax", rows=64, cols=cols, dtype="float32"), host, "cpu").sources["ll"])
    assert "floor.v" in source and "floor.f32(" not in source
    assert "@expf" not in source and "@exp2f" not in source
