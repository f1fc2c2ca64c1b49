from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from tests.conftest import assert_correct, problem_of
from tests.operators.pack_nchw32.shapes import LAYOUTS, SHAPES

DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "dtype"), [(shape, DTYPES[i % 3]) for i, shape in enumerate(SHAPES)])
def test_it_is_correct(host: Arch, shape: str, dtype: str, layout: str) -> None:
    for unpack in (False, True):
        fields = dict(**SHAPES[shape], dtype=dtype, layout=layout, unpack=unpack)
        assert_correct(problem_of("pack_nchw32", **fields), host, "cpu")


@pytest.mark.parametrize("config", [dict(pixels=4, tiles=1), dict(pixels=32, tiles=100)], ids=str)
def test_other_configs_are_correct(host: Arch, config: dict[str, Any]) -> None:
    for unpack in (False, True):
        assert_correct(problem_of("pack_nchw32", **SHAPES["ragged channels"], unpack=unpack), host, "cpu", config)
