from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.core.errors import ProblemError, UnknownNameError
from schedules.operators.depthwise_conv2d.definition import inputs, reference
from tests.conftest import problem_of
from tests.operators.depthwise_conv2d.shapes import LAYOUTS, SHAPES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_a_correlation_of_each_channel(shape: str, layout: str) -> None:
    from scipy.signal import correlate  # which takes a second to import

    plain = {**SHAPES[shape], "bias": False, "residual": False, "activation": "none"}
    p: Any = problem_of("depthwise_conv2d", **plain, layout=layout)
    data, weight = (array.astype(np.float64) for array in inputs(p, np.random.default_rng(1)))
    planes = data.transpose(0, 3, 1, 2) if layout == "nhwc" else data
    (top, left), (down, right), (dy, dx) = p.pad, p.stride, p.dilation
    spread = np.zeros((p.ci, (p.kh - 1) * dy + 1, (p.kw - 1) * dx + 1))
    spread[:, ::dy, ::dx] = weight
    padded = np.pad(planes, [(0, 0), (0, 0), (top, top), (left, left)])
    planes = [[correlate(plane, f, "valid") for plane, f in zip(image, spread, strict=True)] for image in padded]
    wanted = np.array(planes)[:, :, ::down, ::right]
    if layout == "nhwc":
        wanted = wanted.transpose(0, 2, 3, 1)
    np.testing.assert_allclose(reference(p, [data, weight])[0].values, wanted, atol=1e-10)


def test_a_problem_says_its_tensors_and_work() -> None:
    p: Any = problem_of("depthwise_conv2d", n=2, h=8, w=6, ci=5, kh=3, kw=3, pad=1, stride=2, bias=True, residual=True)
    assert [a.shape for a in p.arguments()] == [(2, 5, 8, 6), (5, 3, 3), (5,), (2, 5, 4, 3), (2, 5, 4, 3)]
    assert p.flops == 2 * 9 * 2 * 5 * 4 * 3 and p.co == 5
    last: Any = type(p).parse({**p.to_json(), "layout": "nhwc"})
    assert [a.shape for a in last.arguments()] == [(2, 8, 6, 5), (5, 3, 3), (5,), (2, 4, 3, 5), (2, 4, 3, 5)]
    assert type(p).parse(last.to_json()) == last != p
    assert all(smaller.co == smaller.ci for smaller in (*p.smaller(), *p.odd()))


def test_what_is_no_problem_is_refused() -> None:
    with pytest.raises(ProblemError, match="layout=hwcn is not nchw or nhwc"):
        problem_of("depthwise_conv2d", **SHAPES["7x7"], layout="hwcn")
    with pytest.raises(UnknownNameError, match="unknown problem field 'co'"):
        problem_of("depthwise_conv2d", **SHAPES["7x7"], co=6)
