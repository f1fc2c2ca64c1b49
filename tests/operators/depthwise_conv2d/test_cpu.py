from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from tests.conftest import assert_correct, problem_of
from tests.operators.depthwise_conv2d.shapes import LAYOUTS, SHAPES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_correct(host: Arch, shape: str, layout: str) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        assert_correct(problem_of("depthwise_conv2d", **SHAPES[shape], dtype=dtype, layout=layout), host, "cpu")
