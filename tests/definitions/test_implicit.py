"""Every form of the implicit product is the convolution, whatever the layout, the tiles and the ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from schedules.core.problem import Conv2dProblem, numpy_dtype
from schedules.core.registry import operator
from schedules.core.tolerance import compare
from schedules.definitions.implicit import Implicit, product, textbook
from tests.conftest import problem_of

FORMS = {
    "nest": ("kh kw pixel ci", "kh kw co ci", "pixel co"),
    "nest, channels as rows": ("kh kw pixel ci", "kh kw co ci", "co pixel"),
    "fused": ("k pixel", "co k", "co pixel"),
    "fused, pixels as rows": ("pixel k", "k co", "pixel co"),
    "for each pixel": ("y x kh kw ci n", "kh kw ci co", "y x co n"),
}
GROUPED = ("gi kh kw pixel li", "gi kh kw co li", "pixel co")
TILES = {"pixel": 16, "co": 8, "ci": 4, "k": 8, "n": 4, "gi": 2, "x": 4, "y": 2}


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    small, pad = st.integers(1, 5), draw(st.tuples(*[st.integers(0, 2)] * 2))
    (kh, kw), (dh, dw) = (draw(st.tuples(*[st.integers(1, 3)] * 2)) for _ in range(2))
    return dict(
        n=draw(small), ci=draw(small), co=draw(small), kh=kh, kw=kw, pad=pad, dilation=(dh, dw),
        h=max(draw(small), dh * (kh - 1) + 1 - 2 * pad[0]), w=max(draw(small), dw * (kw - 1) + 1 - 2 * pad[1]),
        stride=draw(st.tuples(*[st.integers(1, 3)] * 2)), bias=draw(st.booleans()), residual=draw(st.booleans()),
    )  # fmt: skip


def error(problem: Conv2dProblem, program: tirx.PrimFunc) -> float:
    """Of the program's output, in units of the tolerance."""
    op, output = operator(problem_name(problem)), problem.arguments()[-1]
    arrays = op.inputs(problem, np.random.default_rng(0))
    empty = np.full(output.shape, np.nan if output.dtype.startswith("float") else 99, numpy_dtype(output.dtype))
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, empty)]
    tirx.build(program, "llvm")["main"](*tensors)
    return compare(tensors[-1].numpy(), op.reference(problem, arrays)[0], output.dtype).error


def problem_name(problem: Conv2dProblem) -> str:
    return f"conv2d_{type(problem).__name__.removesuffix('Problem').lower()}"


def made(name: str, given: dict[str, Any]) -> Conv2dProblem:
    problem = problem_of(name, **given)
    assert isinstance(problem, Conv2dProblem)
    return problem


@pytest.mark.parametrize("name", ["conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc"])
@given(given=fields(), form=st.sampled_from(sorted(FORMS)), options=st.tuples(*[st.booleans()] * 3))
@settings(max_examples=8)
def test_forms(name: str, given: dict[str, Any], form: str, options: tuple[bool, bool, bool]) -> None:
    tiled, wide, staged = options
    if (form == "for each pixel") != (name == "conv2d_hwcn"):
        form = "for each pixel" if name == "conv2d_hwcn" else "fused"
    problem = made(name, given)
    assert error(problem, product(problem, *FORMS[form], TILES if tiled else {}, wide=wide, staged=staged)) <= 1


@pytest.mark.parametrize("name", ["conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc", "conv2d_nchw32"])
@given(given=fields(), wide=st.booleans())
@settings(max_examples=4)
def test_textbook(name: str, given: dict[str, Any], wide: bool) -> None:
    problem = made(name, given)
    tiles = {axis: size for axis, size in TILES.items() if axis in problem.output_axes or axis in problem.data_axes}
    for tile in ({}, tiles):
        assert error(problem, te.create_prim_func(textbook(problem, tile, wide=wide))) <= 1


def test_operands_that_read_too_far_are_noticed() -> None:
    """A form whose weights forget their ends."""
    problem = made("conv2d_nhwc", dict(n=1, h=4, w=4, ci=3, co=5, kh=3, kw=3, pad=1))
    tile = {"ci": 4}

    class Forgetful(Implicit):
        def _ends(self, at: Any, *axes: str) -> list[Any]:
            return []

    def program(kind: type[Implicit]) -> tirx.PrimFunc:
        columns, weights, conv = FORMS["nest"]
        graph = kind(problem, tile)
        pair = Implicit.columns(graph, columns), graph.weights(weights)
        return graph.program(graph.output(graph.conv(conv, pair)))

    assert error(problem, program(Implicit)) <= 1
    assert error(problem, program(Forgetful)) > 1
