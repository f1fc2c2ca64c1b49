from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.operators.conv2d_nhwc.definition import inputs, reference
from tests.conftest import problem_of
from tests.operators.conv2d_nhwc.shapes import SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_a_correlation(shape: str) -> None:
    from scipy.signal import correlate  # which takes a second to import

    p: Any = problem_of("conv2d_nhwc", **SHAPES[shape])
    arrays = [array.astype(np.float64) for array in inputs(p, np.random.default_rng(1))]
    data, weight, *bias = arrays
    (top, left), (down, right), (dy, dx) = p.pad, p.stride, p.dilation
    spread = np.zeros((p.co, (p.kh - 1) * dy + 1, (p.kw - 1) * dx + 1, p.ci))
    spread[:, ::dy, ::dx] = weight
    padded = np.pad(data, [(0, 0), (top, top), (left, left), (0, 0)])
    wanted = np.stack(
        [np.stack([correlate(image, f, "valid")[::down, ::right, 0] for f in spread], -1) for image in padded]
    )
    wanted = wanted + (bias[0] if bias else 0)
    if p.activation == "relu":
        wanted = np.maximum(wanted, 0)
    np.testing.assert_allclose(reference(p, arrays)[0].values, wanted, atol=1e-10)


SIZES = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_folded_is_the_same_of_the_same_memory(data: st.DataObject) -> None:
    kh, kw = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    stride = data.draw(st.sampled_from([(kh, kw), (1, kw), (kh, 1)]))
    pad = (0, 0) if data.draw(st.booleans()) else (data.draw(st.integers(0, 1)), 0)
    h, w = (data.draw(SIZES) * k + data.draw(st.sampled_from([0, 0, k - 1])) for k in (kh, kw))
    words = dict(n=data.draw(SIZES), h=h, w=w, ci=data.draw(SIZES), co=2, kh=kh, kw=kw, dtype="float32")
    p: Any = problem_of("conv2d_nhwc", **words, stride=f"{stride[0]},{stride[1]}", pad=f"{pad[0]},{pad[1]}")
    image, weight = (array.astype(np.float64) for array in inputs(p, np.random.default_rng(1)))
    q = p.folded
    found = reference(q, [image.reshape(q.shapes()[0]), weight.reshape(q.shapes()[1])])[0].values
    np.testing.assert_allclose(found.ravel(), reference(p, [image, weight])[0].values.ravel(), atol=1e-10)
    assert q.folded == q
    if stride == (kh, kw) and pad == (0, 0) and h % kh == w % kw == 0:
        assert q.stride == (1, 1) and (q.ci, q.kh * q.kw) == (p.ci * kw, kh)
