"""One build for rows of any width up to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, ProblemError
from schedules.core.registry import operator
from schedules.operators.softmax.definition import SoftmaxProblem
from tests.conftest import assert_correct


@pytest.mark.parametrize(
    "fields",
    [
        dict(dtype="float32"),
        dict(function="log_softmax", dtype="float16", mask="cols"),
        dict(dtype="bfloat16", mask="full", keep=0.8, scale=-0.5),
        dict(function="softmax_grad", dtype="float32", keep=0.8),
        dict(dtype="float16", mask="cols", keep=0.8, drop="drawn"),
        dict(function="softmax_grad", dtype="float32", keep=0.8, drop="drawn"),
        dict(function="log_softmax_grad", dtype="float16"),
    ],
)
def test_every_function(host: Arch, fields: dict[str, Any]) -> None:
    problem = SoftmaxProblem(5, 70, cols_from=1, **fields)
    checks = assert_correct(problem, host, "cpu")
    assert [check.problem.cols for check in checks] == [1, 35, 70]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def built(host: Arch) -> Any:
    return build(SoftmaxProblem(1, 100, dtype="float32", cols_from=2), host, "cpu", {"vector": 8, "rows_per_task": 3})


def test_each_width(built: Any) -> None:
    for cols in range(2, 101):
        rows = 1 + cols % 7
        x = np.random.default_rng(cols).standard_normal((rows, cols), dtype=np.float32)
        y = np.full_like(x, np.nan)
        built.module["main"](x, y)
        power = np.exp(x - x.max(axis=1, keepdims=True), dtype=np.float64)
        np.testing.assert_allclose(y, power / power.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("keep", ["true", "false"])
def test_special_values_are_those_of_pytorch(host: Arch, keep: str) -> None:
    made = build(SoftmaxProblem(1, 40, dtype="float32", cols_from=2), host, "cpu", {"keep": keep})
    for cols in (5, 16, 37):
        x = np.zeros((4, cols), np.float32)
        x[0, 1] = np.nan
        x[1, -1] = np.inf
        x[2] = -np.inf
        x[3, :-1] = -np.inf
        y = np.zeros_like(x)
        made.module["main"](x, y)
        assert np.isnan(y[:3]).all()
        assert (y[3, :-1] == 0).all() and y[3, -1] == 1


def test_other_widths_and_schedules_are_refused(host: Arch, sm_90a: Arch, built: Any) -> None:
    x = np.zeros((2, 101), np.float32)
    with pytest.raises(ValueError, match=r"x.shape\[1\] must be 2 to 100"):
        built.module["main"](x, x.copy())
    with pytest.raises(ProblemError, match="cols_from=9 is not 1 to cols=8"):
        SoftmaxProblem(1, 8, cols_from=9)
    with pytest.raises(ConfigError, match="leave it out"):
        build(SoftmaxProblem(1, 9000, dtype="float32", cols_from=1), host, "cpu", {"vector": 4})
    problem = SoftmaxProblem(1, 64, cols_from=1)
    for spec in operator("softmax").offered(sm_90a):
        with pytest.raises(ConfigError, match="is built for one shape"):
            build(problem, sm_90a, spec.name)


def test_what_is_wide_is_built_alone() -> None:
    narrow, wide = SoftmaxProblem(7, 1024), SoftmaxProblem(7, 1025)
    assert narrow.widened() == SoftmaxProblem(1, 1024, cols_from=1)
    assert wide.widened() == wide
    range_ = narrow.widened()
    assert all(range_.covers(SoftmaxProblem(rows, cols)) for rows, cols in ((1, 1), (9, 1024)))
    assert not range_.covers(wide) and not range_.covers(SoftmaxProblem(1, 8, scale=2.0))
