from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.core.errors import ProblemError
from schedules.operators.conv2d_nchw32.definition import reference as of_all_channels
from schedules.operators.conv2d_nchw32.packing import GROUP, pack_depthwise, pack_filter
from schedules.operators.depthwise_nchw32.definition import inputs, reference
from tests.conftest import problem_of
from tests.operators.depthwise_nchw32.shapes import SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_that_of_filters_which_are_zero_for_other_channels(shape: str) -> None:
    p: Any = problem_of("depthwise_nchw32", **SHAPES[shape])
    same: Any = problem_of("conv2d_nchw32", **p.to_json(), co=p.ci)
    data, packed, *operands = inputs(p, np.random.default_rng(0))
    taps = packed.transpose(0, 2, 1, 3).reshape(-1, p.kh, packed.shape[-1])[: p.ci, :, : p.kw]
    square = np.zeros((p.ci, p.ci, p.kh, p.kw), np.int8)
    square[range(p.ci), range(p.ci)] = taps
    got = reference(p, [data, packed, *operands])[0]
    wanted = of_all_channels(same, [data, pack_filter(square), *operands])[0]
    np.testing.assert_array_equal(got.values, wanted.values)


def test_a_filter_is_packed_in_words_of_a_row() -> None:
    weight = np.arange(1, 1 + 40 * 2 * 5).reshape(40, 2, 5).astype(np.int8)
    packed = pack_depthwise(weight)
    assert packed.shape == (2, 2, GROUP, 8)
    for channel, y, x in ((0, 0, 0), (31, 1, 4), (39, 0, 2)):
        assert packed[channel // GROUP, y, channel % GROUP, x] == weight[channel, y, x]
    assert not packed[1, :, 8:].any() and not packed[..., 5:].any()


def test_a_problem_says_its_tensors() -> None:
    p: Any = problem_of("depthwise_nchw32", **SHAPES["5x5, stride 2"])
    shapes = {a.name: a.shape for a in p.arguments()}
    assert shapes["data"] == (1, 3, 14, 11, 32) and shapes["filter"] == (3, 5, 32, 8)
    assert shapes["output"] == shapes["residual"] == (1, 3, 7, 6, 32) and shapes["alpha"] == (96,)
    assert p.flops == 2 * 25 * 7 * 6 * 65 and p.co == 65


def test_what_is_no_problem_is_refused() -> None:
    shape = dict(n=1, h=4, w=4, ci=8, kh=3, kw=3)
    for wrong, message in (
        (dict(alpha=0.0), "alpha=0 is not a positive float32"),
        (dict(alpha="pixel"), "alpha=pixel is not a number"),
        (dict(dtype="float16"), "dtype=float16 is not one"),
        (dict(activation="silu"), "cannot be exact"),
        (dict(kh=400, kw=400, h=400, w=400), "which can exceed int32"),
    ):
        with pytest.raises(ProblemError, match=message):
            problem_of("depthwise_nchw32", **{**shape, **wrong})
