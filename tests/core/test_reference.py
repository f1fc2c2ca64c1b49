from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.core import reference
from schedules.core.problem import Conv2dProblem
from schedules.core.reference import convolve

SHAPES: list[dict[str, Any]] = [
    dict(n=7, h=9, w=5, ci=3, co=5, kh=3, kw=2, pad=(2, 0), stride=(2, 1), dilation=(1, 2)),
    dict(n=5, h=4, w=6, ci=3, co=5, kh=1, kw=1),
    dict(n=5, h=4, w=6, ci=3, co=5, kh=1, kw=1, stride=2),
    dict(n=3, h=4, w=6, ci=2, co=1, kh=1, kw=1, pad=1),
    dict(n=2, h=5, w=4, ci=2, co=3, kh=2, kw=2, stride=3),
    dict(n=1, h=4, w=6, ci=1, co=1, kh=4, kw=6),
]


def by_definition(p: Conv2dProblem, data: Any, weight: Any) -> Any:
    out = np.zeros((p.n, p.co, p.out_h, p.out_w))
    padded = np.pad(data, [(0, 0), (0, 0), (p.pad[0],) * 2, (p.pad[1],) * 2])
    for y in range(p.out_h):
        for x in range(p.out_w):
            for ry in range(p.kh):
                for rx in range(p.kw):
                    row, col = y * p.stride[0] + ry * p.dilation[0], x * p.stride[1] + rx * p.dilation[1]
                    out[:, :, y, x] += padded[:, :, row, col] @ weight[:, :, ry, rx].T
    return out


@pytest.mark.parametrize("fields", SHAPES, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize("room", [1, 400, 2**24])  # an image at a time, a few and a rest, all at once
def test_batches_of_images_are_the_convolution(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], room: int
) -> None:
    monkeypatch.setattr(reference, "COLUMNS", room)
    p, random = Conv2dProblem(**fields), np.random.default_rng(0)
    data = random.integers(-9, 9, (p.n, p.ci, p.h, p.w)).astype(np.float16)
    weight = random.integers(-9, 9, (p.co, p.ci, p.kh, p.kw)).astype(np.float16)
    values, magnitude = convolve(p, data, weight)
    wide, filters = data.astype(np.float64), weight.astype(np.float64)
    assert np.array_equal(values, by_definition(p, wide, filters))  # whole numbers: exact in any order
    assert np.array_equal(magnitude, by_definition(p, np.abs(wide), np.abs(filters)))
    assert values.dtype == np.float64 and data.min() < 0  # the inputs are left as they were
