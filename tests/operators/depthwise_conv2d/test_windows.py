from __future__ import annotations

from typing import Any

import pytest

from schedules.build.builder import build
from schedules.build.inspect import summary
from schedules.core.arch import Arch, parse_arch
from schedules.operators.depthwise_conv2d.windows import WindowsConfig, clocks, default, space
from tests.amd import assert_fits
from tests.conftest import CUDA_ARCHES, ROCM_ARCHES, assert_correct, assert_mutants_caught, problem_of
from tests.operators.depthwise_conv2d.shapes import LAYOUTS, SHAPES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dtype"), zip(SHAPES, ["float32", "float16", "bfloat16"] * 2, strict=True))
def test_generated_cuda_is_correct(emulation: None, sm_90a: Arch, shape: str, dtype: str, layout: str) -> None:
    problem = problem_of("depthwise_conv2d", **SHAPES[shape], dtype=dtype, layout=layout)
    assert_correct(problem, sm_90a, "windows", routes=["serial", "emulated"])
