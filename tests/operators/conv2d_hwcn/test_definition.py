from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from schedules.definitions.implicit import textbook
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, inputs, reference


def naive(problem: HwcnProblem, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The definition, one output at a time."""
    p = problem
    out = np.zeros((p.out_h, p.out_w, p.co, p.n))
    for y, x, ry, rx in np.ndindex(p.out_h, p.out_w, p.kh, p.kw):
        row = y * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        col = x * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        if 0 <= row < p.h and 0 <= col < p.w:
            out[y, x] += weight[ry, rx].astype(np.float64).T @ data[row, col].astype(np.float64)
    return out


@st.composite
def problems(draw: st.DrawFn) -> HwcnProblem:
    small = st.integers(1, 6)
    kh, kw, dh, dw = (draw(st.integers(1, 3)) for _ in range(4))
    pad = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    h = max(draw(small), dh * (kh - 1) + 1 - 2 * pad[0])
    w = max(draw(small), dw * (kw - 1) + 1 - 2 * pad[1])
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return HwcnProblem(draw(small), h, w, draw(small), draw(small), kh, kw, stride, pad, (dh, dw))


@given(problems())
@settings(max_examples=50)
def test_reference_is_the_definition(problem: HwcnProblem) -> None:
    arrays = inputs(problem, np.random.default_rng(0))
    (expected,) = reference(problem, arrays)
    np.testing.assert_allclose(expected.values, naive(problem, *arrays), rtol=1e-12, atol=1e-12)
    assert np.all(expected.magnitude + 1e-12 >= np.abs(expected.values))


@pytest.mark.parametrize("tile", [{}, {"ci": 4, "co": 8, "n": 16}], ids=["plain", "rounded up"])
@given(problem=problems())
@settings(max_examples=10)
def test_te_graph_is_the_definition(tile: dict[str, int], problem: HwcnProblem) -> None:
    function = tirx.build(te.create_prim_func(textbook(problem, tile)), "llvm")
    arrays = inputs(problem, np.random.default_rng(1))
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, np.full(problem.arguments()[-1].shape, np.nan, "f4"))]
    function["main"](*tensors)
    np.testing.assert_allclose(tensors[-1].numpy(), reference(problem, arrays)[0].values, rtol=1e-4, atol=1e-5)
