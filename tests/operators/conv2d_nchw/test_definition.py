from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from schedules.core.arch import parse_arch
from schedules.core.errors import ProblemError
from schedules.operators.conv2d_nchw import cpu, simt
from schedules.operators.conv2d_nchw.definition import NchwProblem, definition, inputs, reference
from schedules.operators.conv2d_nchw.packing import pack_filter, unpack_filter
from tests.conftest import problem_of

HOST = parse_arch("llvm")


def naive(problem: NchwProblem, data: np.ndarray, weight: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    """The definition, one tap of one pixel at a time."""
    p = problem
    if p.filter_layout == "hwoi":
        weight = np.einsum("yxfc->fcyx", weight)
    out = np.zeros((p.n, p.co, p.out_h, p.out_w))
    for y, x, ry, rx in np.ndindex(p.out_h, p.out_w, p.kh, p.kw):
        row = y * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        col = x * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        if 0 <= row < p.h and 0 <= col < p.w:
            out[:, :, y, x] += data[:, :, row, col].astype(np.float64) @ weight[:, :, ry, rx].astype(np.float64).T
    for term in terms:
        out += term.astype(np.float64) if term.ndim == 4 else term.astype(np.float64)[None, :, None, None]
    bounds = {"none": (None, None), "relu": (0, None), "relu6": (0, 6), "hardswish": (None, None)}[p.activation]
    out = np.clip(out, *bounds) if bounds != (None, None) else out
    return out * np.clip(out + 3, 0, 6) / 6 if p.activation == "hardswish" else out


@st.composite
def problems(draw: st.DrawFn) -> NchwProblem:
    small = st.integers(1, 6)
    kh, kw, dh, dw = (draw(st.integers(1, 3)) for _ in range(4))
    pad = (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    h = max(draw(small), dh * (kh - 1) + 1 - 2 * pad[0])
    w = max(draw(small), dw * (kw - 1) + 1 - 2 * pad[1])
    stride = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return NchwProblem(
        draw(small), h, w, draw(small), draw(small), kh, kw, stride, pad, (dh, dw),
        bias=draw(st.booleans()), residual=draw(st.booleans()),
        activation=draw(st.sampled_from(("none", "relu", "relu6", "hardswish"))),
        filter_layout=draw(st.sampled_from(NchwProblem.filter_layouts)),
    )  # fmt: skip


@given(problems())
@settings(max_examples=50)
def test_reference_is_the_definition(problem: NchwProblem) -> None:
    arrays = inputs(problem, np.random.default_rng(0))
    (expected,) = reference(problem, arrays)
    np.testing.assert_allclose(expected.values, naive(problem, *arrays), rtol=1e-12, atol=1e-11)
    assert np.all(expected.magnitude + 1e-12 >= np.abs(expected.values))


GRAPHS: dict[str, Callable[[NchwProblem], tirx.PrimFunc]] = {
    "plain": lambda problem: te.create_prim_func(definition(problem)),
    "gemm": lambda problem: simt.graph(problem, simt.SimtConfig((2, 4), (4, 4), step=4), HOST),
    "rows": lambda problem: cpu.graph(problem, cpu.CpuConfig(8, block_x=2, block_y=2, block_f=4), HOST),
}


@pytest.mark.parametrize("graph", GRAPHS)
@given(problem=problems())
@settings(max_examples=10)
def test_te_graphs_are_the_definition(graph: str, problem: NchwProblem) -> None:
    function = tirx.build(GRAPHS[graph](problem), "llvm")
    arrays = inputs(problem, np.random.default_rng(1))
    output = np.full(problem.arguments()[-1].shape, np.nan, "f4")
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, output)]
    function["main"](*tensors)
    np.testing.assert_allclose(tensors[-1].numpy(), reference(problem, arrays)[0].values, rtol=1e-4, atol=1e-5)


def test_arguments() -> None:
    problem = problem_of("conv2d_nchw", n=2, h=5, w=6, ci=3, co=4, kh=3, kw=2, stride=2, bias=True, dtype="float16")
    assert [(argument.name, argument.shape) for argument in problem.arguments()] == [
        ("data", (2, 3, 5, 6)),
        ("filter", (4, 3, 3, 2)),
        ("bias", (4,)),
        ("output", (2, 4, 2, 3)),
    ]
    assert {argument.dtype for argument in problem.arguments()} == {"float16"}


def test_packed_filter() -> None:
    fields = dict(n=2, h=5, w=6, ci=3, co=4, kh=3, kw=2)
    plain = problem_of("conv2d_nchw", **fields)
    packed = problem_of("conv2d_nchw", **fields, filter_layout="hwoi")
    assert packed.arguments()[1].shape == (3, 2, 4, 3)
    data, weight = inputs(plain, np.random.default_rng(0))
    assert pack_filter(weight).shape == (3, 2, 4, 3) and pack_filter(weight)[2, 1, 3, 0] == weight[3, 0, 2, 1]
    np.testing.assert_array_equal(unpack_filter(pack_filter(weight)), weight)
    expected, found = (
        reference(problem, [data, given])[0].values
        for problem, given in ((plain, weight), (packed, pack_filter(weight)))
    )
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ProblemError, match="filter_layout=hwio is not oihw or hwoi"):
        problem_of("conv2d_nchw", **fields, filter_layout="hwio")


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ProblemError, match="activation=swish is not none, relu, "):
        problem_of("conv2d_nchw", n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1, activation="swish")


def test_the_articles_shapes_have_a_quick_reference() -> None:
    """im2col an image at a time: a shape that a loop over taps and pixels would take minutes for."""
    problem = problem_of("conv2d_nchw", n=1, h=32, w=32, ci=256, co=256, kh=3, kw=3, pad=1)
    arrays = inputs(problem, np.random.default_rng(0))
    (expected,) = reference(problem, arrays)
    y, x = 31, 7
    window = arrays[0][0, :, 30:32, 6:9].astype(np.float64)
    np.testing.assert_allclose(
        expected.values[0, :, y, x], np.einsum("cyx,fcyx->f", window, arrays[1][:, :, :2].astype(np.float64))
    )
