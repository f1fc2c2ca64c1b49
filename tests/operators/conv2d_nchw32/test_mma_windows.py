"""NCHW32 convolution with few input channels: what it is made of, what it refuses, and whether it is right."""

from __future__ import annotations

import pytest

from schedules.core.arch import Arch
from tests.conftest import assert_correct, problem_of
from tests.windows.kernels import SHAPES, SMALL


@pytest.mark.parametrize("shape", SHAPES)
def test_emulated(emulation: None, sm_90a: Arch, shape: str) -> None:
    fields, words = SHAPES[shape]
    problem = problem_of("conv2d_nchw32", **fields)
    assert_correct(problem, sm_90a, "mma_windows", SMALL | words, ["emulated"])


@pytest.mark.parametrize(
    ("shape", "lanes"),
    [("7x7, stride 2", 4), ("ragged, residual", 4), ("a loop", 8), ("one channel", 4), ("3x3", 16), ("1x1", 8)],
)
def test_few_lanes(emulation: None, sm_90a: Arch, shape: str, lanes: int) -> None:
    """Data whose pixels have 4, 8 or 16 channels, which are read as they lie."""
    fields, words = SHAPES[shape]
    problem = problem_of("conv2d_nchw32", **fields, lanes=lanes)
    assert_correct(problem, sm_90a, "mma_windows", SMALL | words, ["emulated"])
