"""Columns of a space are those of its configs, and a space with the least stages is a part of it."""

from __future__ import annotations

import pytest

from schedules.core.arch import parse_arch
from schedules.core.presets import resolve
from schedules.core.space import ProductSpace
from schedules.predict.configs import FILLED, MOST, columns_of, columns_of_space

ARCH = parse_arch("cuda:sm_90a")
LAYER = {"n": "3", "h": "14", "w": "16", "ci": "48", "co": "40", "kh": "3", "kw": "3", "pad": "1"}


@pytest.mark.parametrize("name", ["conv2d_nhwc", "conv2d_nchw", "conv2d_hwcn"])
def test_each_row_is_a_config(name: str) -> None:
    operator, problem = resolve(name, {**LAYER, "dtype": "float16"})
    for spec in operator.offered(ARCH):
        if not spec.serves(problem, ARCH):
            continue
        space, columns = spec.numbered_space(problem, ARCH), columns_of_space(spec, problem, ARCH)
        rows = range(0, columns.count, max(1, columns.count // 5))
        made = [columns.make(row) for row in rows]
        told = columns_of(made).fields
        for field, values in columns.take(list(rows)).fields.items():
            assert list(values) == list(told[field]), (spec.name, field)
        if not isinstance(space, ProductSpace):
            assert columns.count == min(len(space), MOST)
        elif FILLED in columns.fields:
            least = min(getattr(config, FILLED) for config in space)
            assert set(columns.fields[FILLED]) == {least}
            assert columns.count == sum(getattr(config, FILLED) == least for config in space)
