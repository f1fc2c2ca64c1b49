from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from tests.conftest import assert_correct, problem_of
from tests.operators.pool2d.shapes import SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_correct(host: Arch, shape: str) -> None:
    assert_correct(problem_of("pool2d", **SHAPES[shape]), host, "cpu")


@pytest.mark.parametrize("config", [dict(vector=8, rows=1), dict(vector=16, rows=100)], ids=str)
def test_other_configs_are_correct(host: Arch, config: dict[str, Any]) -> None:
    for shape in ("maximum 3x3, stride 2", "asymmetric, dilated, activated"):
        assert_correct(problem_of("pool2d", **SHAPES[shape]), host, "cpu", config)
