"""NHWC convolution with few input channels: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

import pytest

from schedules.core.arch import Arch
from tests.conftest import assert_correct, problem_of
from tests.windows.kernels import SHAPES, SMALL


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated(emulation: None, sm_90a: Arch, shape: str) -> None:
    fields, words = SHAPES[shape]
    problem = problem_of("conv2d_nhwc", **fields, dtype="float16")
    assert_correct(problem, sm_90a, "mma_windows", SMALL | words, ["emulated"])
