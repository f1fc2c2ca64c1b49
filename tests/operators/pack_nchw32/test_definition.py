from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.core.errors import ProblemError, UnknownNameError
from schedules.operators.pack_nchw32.definition import inputs, reference
from tests.conftest import problem_of
from tests.operators.pack_nchw32.shapes import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_rounds_to_even_and_saturates(layout: str) -> None:
    p: Any = problem_of("pack_nchw32", n=1, h=1, w=2, ci=3, layout=layout)
    rows = np.array([[0.5, 1.5], [-2.5, 300.0], [-300.0, 126.6]], "float32")  # channels by pixels
    data = rows.reshape(1, 3, 1, 2)
    scale = np.array([1.0], "float32")
    plain = np.ascontiguousarray(data.transpose(0, 2, 3, 1)) if layout == "nhwc" else data
    packed = reference(p, [plain, scale])[0].values
    assert packed.shape == (1, 1, 1, 2, 32) and not packed[..., 3:].any()
    assert packed[0, 0, 0, :, :3].T.tolist() == [[0, 2], [-2, 127], [-128, 127]]
    back: Any = problem_of("pack_nchw32", n=1, h=1, w=2, ci=3, layout=layout, unpack=True)
    unpacked = reference(back, [packed.astype(np.int8), scale * 2])[0].values
    assert np.array_equal(unpacked, 2 * np.rint(np.clip(plain, -128, 127)))


def test_the_way_back_is_within_half_a_step() -> None:
    fields = dict(n=2, h=3, w=4, ci=40)
    data, scale = inputs(problem_of("pack_nchw32", **fields), np.random.default_rng(0))
    packed = reference(problem_of("pack_nchw32", **fields), [data, scale])[0].values.astype(np.int8)
    found = reference(problem_of("pack_nchw32", **fields, unpack=True), [packed, 1 / scale])[0].values
    inside = np.abs(data * scale[0]) < 127
    assert 0.8 < inside.mean() < 1 and np.abs(found - data)[inside].max() <= 0.501 / scale[0]


def test_a_problem_says_its_tensors() -> None:
    p: Any = problem_of("pack_nchw32", n=2, h=4, w=6, ci=40, dtype="float16", layout="nhwc")
    shapes = [(2, 4, 6, 40), (1,), (2, 2, 4, 6, 32)]
    assert [(a.shape, a.dtype) for a in p.arguments()] == list(zip(shapes, ("float16", "float32", "int8"), strict=True))
    back: Any = type(p).parse({**p.to_json(), "unpack": True})
    assert [a.shape for a in back.arguments()] == shapes[::-1] and back.arguments()[-1].dtype == "float16"
    assert p.min_bytes == back.min_bytes == 2 * 24 * 40 * 2 + 2 * 24 * 64 + 4
    assert p.widened() == p and problem_of("pack_nchw32", n=3, h=4, w=6, ci=40).widened().n_from == 3  # type: ignore[attr-defined]


def test_what_is_no_problem_is_refused() -> None:
    with pytest.raises(ProblemError, match="layout=hwcn is not nchw or nhwc"):
        problem_of("pack_nchw32", n=1, h=1, w=1, ci=1, layout="hwcn")
    with pytest.raises(UnknownNameError, match="unknown problem field 'kh'"):
        problem_of("pack_nchw32", n=1, h=1, w=1, ci=1, kh=3)
