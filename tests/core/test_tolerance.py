from __future__ import annotations

import numpy as np
import pytest

from schedules.core.arithmetic import BF16X3, FLOAT32
from schedules.core.operator import Expected
from schedules.core.tolerance import EDGE, compare


def expect(values: list[float], magnitude: float = 1.0) -> Expected:
    array = np.asarray(values, dtype=np.float64)
    return Expected(array, np.full(array.shape, magnitude))


def test_rounding_of_the_dtype_passes() -> None:
    values = np.linspace(-3, 3, 1001)
    assert compare(values.astype(np.float16), expect(list(values)), "float16").passed
    assert compare(values.astype(np.float32), expect(list(values)), "float32").passed


def test_small_values_are_held_to_their_own_size() -> None:
    # a softmax of 32768 columns: a fixed tolerance of 1e-3 would let zeros pass
    wanted = Expected(np.full((1, 32768), 1 / 32768), np.full((1, 32768), 1 / 32768))
    assert compare(np.full((1, 32768), 1 / 32768, np.float16), wanted, "float16").passed
    assert not compare(np.zeros((1, 32768), np.float16), wanted, "float16").passed
    assert not compare(np.full((1, 32768), 1.01 / 32768, np.float16), wanted, "float16").passed


def test_a_schedule_is_held_to_its_arithmetic() -> None:
    wanted = expect([0.0, 1.0], magnitude=100.0)
    off = np.asarray([40 * FLOAT32.error * 100, 1.0], np.float32)
    assert not compare(off, wanted, "float32").passed
    assert compare(off, wanted, "float32", BF16X3).passed
    assert not compare(2 * off, wanted, "float32", BF16X3).passed


@pytest.mark.parametrize(
    ("got", "wanted", "passed"),
    [
        (np.nan, np.nan, True),
        (np.nan, 1.0, False),
        (1.0, np.nan, False),
        (np.inf, np.inf, True),
        (-np.inf, np.inf, False),
        (np.inf, 65519.0, False),
        (np.inf, 65520.0, True),
        (np.inf, 65536.0, True),  # rounds to it; the largest is within the tolerance too
        (65504.0, 65536.0, True),
        (-np.inf, 65536.0, False),
        (np.inf, 1e6, True),  # beyond float16
        (65504.0, 1e6, False),
    ],
)
def test_special_values(got: float, wanted: float, passed: bool) -> None:
    assert compare(np.asarray([got], np.float16), expect([wanted]), "float16").passed is passed


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 40), ("bfloat16", 20), ("float32", 26)])
def test_the_edge_is_where_numbers_round_to_infinity(dtype: str, bits: int) -> None:
    kind = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16  # by way of float32
    with np.errstate(over="ignore"):
        at, below = (np.float64(x).astype(kind) for x in (EDGE[dtype], EDGE[dtype] * (1 - 2.0**-bits)))
    assert np.isinf(at) and np.isfinite(below)


def test_the_worst_element_is_named() -> None:
    got = np.asarray([1.0, 2.0, 3.5], np.float32)
    worst = compare(got, expect([1.0, 2.0, 3.0]), "float32")
    assert not worst.passed
    assert worst.index == (2,)
    assert "got 3.5, wanted 3" in str(worst)


def test_integers_are_exact() -> None:
    assert compare(np.asarray([3], np.int32), expect([3.0]), "int32").passed
    assert not compare(np.asarray([4], np.int32), expect([3.0], magnitude=1e9), "int32").passed


def test_rows_that_repeat_are_all_compared() -> None:
    block = Expected(np.ones((2, 3)), np.ones((2, 3)))
    got = np.ones((5, 3), np.float32)
    assert compare(got, block, "float32").passed
    got[4, 1] = 2
    worst = compare(got, block, "float32")
    assert not worst.passed
    assert worst.index == (4, 1)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare(np.ones((2, 2), np.float32), Expected(np.ones((2, 3)), np.ones((2, 3))), "float32")


def test_a_result_may_be_rounded_twice() -> None:
    twice = Expected(np.asarray([1.0]), np.asarray([0.0]), roundings=2)
    got = np.asarray([1 + 1.5 * 2.0**-10], np.float16)
    assert compare(got, twice, "float16").passed
    assert not compare(got, Expected(twice.values, twice.magnitude), "float16").passed
