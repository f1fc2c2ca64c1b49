from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from tests.conftest import assert_correct, problem_of
from tests.operators.conv2d_nhwc.shapes import SHAPES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_correct(host: Arch, shape: str, dtype: str) -> None:
    assert_correct(problem_of("conv2d_nhwc", **SHAPES[shape], dtype=dtype), host, "cpu")


@pytest.mark.parametrize(
    "config", [dict(vector=4, block_vectors=3, block_rows=5), dict(vector=8, chunk=1), dict(vector=1)], ids=str
)
def test_other_configs_are_correct(host: Arch, config: dict[str, Any]) -> None:
    assert_correct(problem_of("conv2d_nhwc", **SHAPES["1x1"]), host, "cpu", config)
