"""What the comparison catches in rows of 2**20 columns, where most values of a softmax are near 1e-6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedules.core.problem import numpy_dtype
from schedules.core.tolerance import compare
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem
from schedules.operators.softmax.reference import inputs, reference

Array = np.ndarray[Any, Any]
COLS = 2**20
PART = COLS // 64


def total(values: Array) -> Array:
    return values.sum(axis=-1, keepdims=True, dtype=np.float32)


def without(start: int) -> Callable[[Array], Array]:
    """A sum that misses a 64th of the row."""

    def missing(values: Array) -> Array:
        return total(values) - total(values[:, start : start + PART])

    return missing


def compute(
    p: SoftmaxProblem,
    arrays: list[Array],
    total: Callable[[Array], Array] = total,
    peak: Callable[[Array], Array] = lambda peaks: peaks,
) -> Array:
    """The function in float32, with another sum, or with other rows' maxima."""
    if p.is_grad:
        y, dy = (array.astype(np.float32) for array in arrays)
        return dy - np.exp(y) * total(dy) if p.is_log else y * (dy - total(y * dy))
    x = arrays[0].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        shifted = x - peak(x.max(axis=-1, keepdims=True))
        e = np.exp(shifted)
        e[e < 2.0**-126] = 0  # as on GPUs, and by the CPU's polynomial
        return shifted - np.log(total(e)) if p.is_log else e / total(e)


@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_sums_of_a_long_row_are_caught(function: str, dtype: str) -> None:
    problem = SoftmaxProblem(1, COLS, function, dtype)
    arrays = inputs(problem, np.random.default_rng(0))
    (expected,) = reference(problem, arrays)

    def passed(output: Array) -> bool:
        return compare(output.astype(numpy_dtype(dtype)), expected, dtype).passed

    right = compute(problem, arrays)
    assert passed(right)
    assert not passed(right * np.float32(1.01))
    assert not passed(np.zeros_like(right))
    if not problem.is_log:
        assert not passed(np.where(np.abs(right) < 1e-6, 0, right))
    for start in (0, COLS // 2, COLS - PART):
        assert not passed(compute(problem, arrays, without(start))), start


@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("cols", [32, COLS])
def test_the_maximum_of_another_row_is_caught(function: str, dtype: str, cols: int) -> None:
    problem = SoftmaxProblem(3, cols, function, dtype)
    for seed in range(3 if cols < COLS else 1):
        arrays = inputs(problem, np.random.default_rng(seed))
        (expected,) = reference(problem, arrays)
        for step in (1, -1) if cols < COLS else (1,):
            wrong = compute(problem, arrays, peak=lambda peaks, step=step: np.roll(peaks, step, axis=0))  # type: ignore[misc]
            for row in range(3):  # each row for itself
                got = np.where(np.arange(3)[:, np.newaxis] == row, wrong, compute(problem, arrays))
                assert not compare(got.astype(numpy_dtype(dtype)), expected, dtype).passed, (seed, step, row)


@pytest.mark.parametrize("dtype", SoftmaxProblem.dtypes)
def test_rows_of_equal_values_are_not_zero(dtype: str) -> None:
    """Each is 2**-20, sixteen of float16's smallest steps."""
    problem = SoftmaxProblem(1, COLS, dtype=dtype)
    arrays: list[Array] = [np.full((1, COLS), 3, numpy_dtype(dtype))]
    (expected,) = reference(problem, arrays)
    right = np.full((1, COLS), 1 / COLS, numpy_dtype(dtype))
    assert compare(right, expected, dtype).passed
    assert not compare(np.zeros_like(right), expected, dtype).passed
    assert not compare((right * 1.2).astype(right.dtype), expected, dtype).passed
