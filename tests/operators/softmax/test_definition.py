from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te

from schedules.build.builder import compiled
from schedules.check.verify import judge
from schedules.core.arch import parse_arch
from schedules.core.philox import threshold, words
from schedules.core.problem import numpy_dtype
from schedules.operators.softmax.definition import DROPS, FUNCTIONS, MASKS, SoftmaxProblem
from schedules.operators.softmax.graph import definition
from schedules.operators.softmax.reference import distinct_rows, inputs, reference


def naive(p: SoftmaxProblem, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """One row at a time, as the formulas are written."""
    rows = []
    if p.is_drawn:
        drawn = words(*arrays["philox"].tolist(), np.arange(p.rows * p.cols + 3))[: p.rows * p.cols]
        kept = (drawn < threshold(p.keep)).reshape(p.rows, p.cols)
    for i in range(p.rows):
        at = {n: (a[i] if a.ndim == 2 or n == "lengths" else a).astype(np.float64) for n, a in arrays.items()}
        if p.mask == "causal":
            at["lengths"] = np.float64(i % p.queries + p.cols - p.queries + 1)
        drop = (at["drop"] if p.drop == "given" else kept[i]) / p.keep if p.keep < 1 else 1.0
        if p.function == "softmax_grad":
            dy = at["dy"] * drop
            rows.append([p.scale * at["y"] * (dy - np.dot(at["y"], dy))])
        elif p.function == "log_softmax_grad":
            dy = at["dy"] * drop
            rows.append([p.scale * (dy - np.exp(at["y"]) * dy.sum())])
        else:
            v = p.scale * at["x"] + at.get("mask", 0.0)
            v[np.arange(p.cols) >= at.get("lengths", p.cols)] = -np.inf
            e = np.exp(v - v.max())
            y = np.log(e / e.sum()) if p.is_log else e / e.sum()
            rows.append([y, y * drop] if p.keep < 1 else [y])
    return [np.stack(column) for column in zip(*rows, strict=True)]


@st.composite
def problems(draw: st.DrawFn) -> SoftmaxProblem:
    function = draw(st.sampled_from(FUNCTIONS))
    mask = "none" if function.endswith("grad") else draw(st.sampled_from(MASKS))
    cols = draw(st.integers(1, 40))
    return SoftmaxProblem(
        rows=draw(st.integers(1, 5)),
        cols=cols,
        function=function,
        dtype=draw(st.sampled_from(SoftmaxProblem.dtypes)),
        scale=draw(st.sampled_from([1.0, 0.125, -2.0])),
        mask=mask,
        queries=draw(st.integers(1, cols)) if mask == "causal" else 0,
        keep=draw(st.sampled_from([1.0, 0.8])),
        drop=draw(st.sampled_from(DROPS)),
    )


def named(problem: SoftmaxProblem, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    names = [argument.name for argument in problem.arguments() if not argument.output]
    return dict(zip(names, arrays, strict=True))


@given(problems())
@settings(max_examples=60)
def test_reference_is_the_definition(problem: SoftmaxProblem) -> None:
    arrays = inputs(problem, np.random.default_rng(0))
    with np.errstate(all="ignore"):
        wanted = naive(problem, named(problem, arrays))
    for expected, values in zip(reference(problem, arrays), wanted, strict=True):
        finite = np.isfinite(values) & np.isfinite(expected.values) & (np.abs(values) < 600)
        np.testing.assert_allclose(expected.values[finite], values[finite], rtol=1e-7, atol=1e-300)


@given(problems())
@settings(max_examples=25)
def test_te_graph_is_the_definition(problem: SoftmaxProblem) -> None:
    function = compiled(tvm.IRModule({"main": te.create_prim_func(definition(problem))}), parse_arch("llvm"))
    arrays = inputs(problem, np.random.default_rng(1))
    outputs = [
        tvm.runtime.tensor(np.full(argument.shape, np.nan, numpy_dtype(argument.dtype)))
        for argument in problem.arguments()
        if argument.output
    ]
    function["main"](*map(tvm.runtime.tensor, arrays), *outputs)
    assert judge(problem, arrays, [output.numpy() for output in outputs]).passed


@pytest.mark.parametrize("row", [[1.0, np.nan, 2.0], [1.0, np.inf, 2.0], [-np.inf, -np.inf, -np.inf]])
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_special_rows_are_nan_throughout(row: list[float], function: str) -> None:
    (expected,) = reference(SoftmaxProblem(1, 3, function), [np.asarray([row], np.float16)])
    assert np.all(np.isnan(expected.values))


def test_a_masked_column_is_zero() -> None:
    (expected,) = reference(SoftmaxProblem(1, 3), [np.asarray([[1.0, -np.inf, 1.0]], np.float16)])
    np.testing.assert_array_equal(expected.values, [[0.5, 0.0, 0.5]])


def test_large_problems_repeat_their_rows() -> None:
    problem = SoftmaxProblem(3000, 32768)
    rows = distinct_rows(problem)
    assert rows == 256
    (x,) = inputs(problem, np.random.default_rng(0))
    assert x.shape == (3000, 32768)
    assert np.array_equal(x[7], x[7 + 2 * rows])
    (expected,) = reference(problem, [x])
    assert expected.values.shape == (rows, 32768)
    x = x.copy()
    x[2999, 5] += 1  # not from `inputs` any more: every row counts
    small = SoftmaxProblem(2 * 64, 2**23 // 64)
    assert distinct_rows(small) == 64


def test_inputs_show_a_wrong_maximum() -> None:
    """A kernel that misses part of a row in its maximum must come out wrong on the data it is given."""
    problem = SoftmaxProblem(64, 128, dtype="float32")
    arrays = inputs(problem, np.random.default_rng(0))
    with np.errstate(over="ignore", invalid="ignore"):
        x = arrays[0]
        e = np.exp(x - x[:, :96].max(axis=1, keepdims=True))  # as if the last warp's columns were missed
        wrong = e / e.sum(axis=1, keepdims=True)
    assert not judge(problem, arrays, [wrong]).passed
    right = np.exp(x - x.max(axis=1, keepdims=True))
    assert judge(problem, arrays, [right / right.sum(axis=1, keepdims=True)]).passed
