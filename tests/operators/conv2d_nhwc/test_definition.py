from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
