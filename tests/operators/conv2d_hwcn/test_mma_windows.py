"""HWCN convolution with few input channels of one image or two: whether it is right, and for which batches."""

from __future__ import annotations

import pytest

from schedules.core.arch import Arch
from schedules.core.registry import operator
from tests.conftest import assert_correct, problem_of
from tests.windows.kernels import SHAPES, SMALL


@pytest.mark.parametrize(
    "shape", ["7x7, stride 2", "3x3", "ragged, residual", "a loop", "dilated, 1 of width", "four channels"]
)
def test_emulated(emulation: None, sm_90a: Arch, shape: str) -> None:
    fields, words = SHAPES[shape]
    problem = problem_of("conv2d_hwcn", **fields | {"n": 2}, dtype="float16")
    assert_correct(problem, sm_90a, "mma_windows", SMALL | words, ["emulated"])


def test_one_image_is_channels_last(emulation: None, sm_90a: Arch) -> None:
    fields, words = SHAPES["one channel"]
    problem = problem_of("conv2d_hwcn", **fields | {"n": 1}, dtype="bfloat16")
    assert_correct(problem, sm_90a, "mma_windows", SMALL | words, ["emulated"])


def test_which_batches_it_serves(sm_90a: Arch) -> None:
    """Those whose images share a word."""
    spec, fields = operator("conv2d_hwcn").schedule("mma_windows"), SHAPES["3x3"][0]
    for n in (1, 2, 3, 4):
        problem = problem_of("conv2d_hwcn", **fields | {"n": n}, dtype="float16")
        assert spec.serves(problem, sm_90a) == (n <= 2)
        assert (operator("conv2d_hwcn").choose(problem, sm_90a) == "mma_windows") == (n <= 2)
    assert "n=3 images side by side share no word" in str(
        spec.config.parse(SMALL).check(problem_of("conv2d_hwcn", **fields | {"n": 3}, dtype="float16"), sm_90a)
    )
