"""The CPU's schedule is exact."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError
from schedules.operators.conv2d_nchw32.cpu import CpuConfig
from tests.conftest import assert_correct, problem_of
from tests.operators.conv2d_nchw32.shapes import EPILOGUE_SHAPE, EPILOGUES, SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_schedule_is_exact(host: Arch, shape: str) -> None:
    assert_correct(problem_of("conv2d_nchw32", **SHAPES[shape]), host, routes=["device"])


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogue_is_exact(host: Arch, epilogue: str) -> None:
    problem = problem_of("conv2d_nchw32", **{**EPILOGUE_SHAPE, **EPILOGUES[epilogue]})
    assert_correct(problem, host, routes=["device"])


@pytest.mark.parametrize("config", [dict(vector=4, block_x=1), dict(vector=32, block_x=7)], ids=str)
def test_other_configs_are_exact(host: Arch, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nchw32", **EPILOGUE_SHAPE), host, "cpu", config)


@pytest.mark.parametrize(("config", "message"), [(dict(vector=5), "vector=5"), (dict(block_x=0), "block_x=0")])
def test_illegal_config_says_why(host: Arch, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CpuConfig(**config).require(problem_of("conv2d_nchw32", **SHAPES["whole tiles"]), host)
