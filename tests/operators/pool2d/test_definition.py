from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.core.errors import ProblemError
from schedules.operators.conv2d_nchw32.packing import pack_data, unpack_output
from schedules.operators.pool2d.definition import inputs, reference
from tests.conftest import problem_of


def test_the_reference_by_hand() -> None:
    data = np.arange(-8, 8, dtype=np.int8).reshape(1, 1, 4, 4)
    shape = dict(n=1, h=4, w=4, ci=1, kh=3, kw=3, stride=2, pad=1)

    def result(arrays: list[Any], **fields: Any) -> Any:
        values = reference(problem_of("pool2d", **shape, **fields), arrays)[0].values
        return unpack_output(values, 1)[0, 0].tolist()

    assert result([pack_data(data)]) == [[-3, -1], [5, 7]]
    above, below = (
        (-8 - 7 - 4 - 3, -7 - 6 - 5 - 3 - 2 - 1),
        (-4 - 3 + 0 + 1 + 4 + 5, -3 - 2 - 1 + 1 + 2 + 3 + 5 + 6 + 7),
    )
    sums = np.array([above, below])
    half = np.array([0.5], "float32")
    assert result([pack_data(data), half], kind="average") == np.rint(sums / 2).tolist()
    residual = pack_data(np.array([[[[100, -100], [3, 4]]]], "int8"))
    added = np.clip(np.rint(sums / 2 + 2 * np.array([[100, -100], [3, 4]])), 0, 127).tolist()
    given = [pack_data(data), residual, half, np.array([2.0], "float32")]
    assert result(given, kind="average", residual=True, activation="relu") == added


def test_a_problem_says_its_tensors() -> None:
    p: Any = problem_of("pool2d", n=2, h=8, w=6, ci=40, kh=3, kw=3, stride=2, pad=1)
    assert [a.shape for a in p.arguments()] == [(2, 2, 8, 6, 32), (2, 2, 4, 3, 32)]
    average: Any = type(p).parse({**p.to_json(), "kind": "average", "residual": True})
    assert [a.name for a in average.arguments()] == ["data", "residual", "alpha", "gamma", "output"]
    assert len(inputs(average, np.random.default_rng(0))) == 4 and p.flops == 9 * 2 * 4 * 3 * 40


def test_what_is_no_problem_is_refused() -> None:
    shape = dict(n=1, h=4, w=4, ci=1, kh=3, kw=3)
    with pytest.raises(ProblemError, match="kind=median is not max or average"):
        problem_of("pool2d", **shape, kind="median")
    with pytest.raises(ProblemError, match="kind=max takes no residual and no activation"):
        problem_of("pool2d", **shape, residual=True)
    with pytest.raises(ProblemError, match="cannot be exact"):
        problem_of("pool2d", **shape, kind="average", activation="gelu")
