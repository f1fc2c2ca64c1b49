from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.operators.depthwise_conv2d.cpu import default
from tests.conftest import assert_correct, problem_of
from tests.operators.depthwise_conv2d.shapes import LAYERS, LAYOUTS, SHAPES


# each shape in both layouts, and in each of these in a dtype of its own
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        (shape, ("float32", "float16", "bfloat16")[(i + j) % 3], layout)
        for i, shape in enumerate(SHAPES)
        for j, layout in enumerate(LAYOUTS)
    ],
)
def test_it_is_correct(host: Arch, shape: str, dtype: str, layout: str) -> None:
    assert_correct(problem_of("depthwise_conv2d", **SHAPES[shape], dtype=dtype, layout=layout), host, "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [
        dict(vector=4, block_vectors=3, block_rows=5, task_rows=2, chunk=1),
        dict(vector=1, block_rows=1, task_rows=1, chunk=3),
        dict(vector=32, chunk=0, task_rows=100),
    ],
    ids=str,
)
def test_other_configs_are_correct(host: Arch, config: dict[str, Any], layout: str) -> None:
    for shape in ("ragged, stride 2", "7x7"):
        assert_correct(problem_of("depthwise_conv2d", **SHAPES[shape], layout=layout), host, "cpu", config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_core_has_a_task(host: Arch, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr("schedules.operators.depthwise_conv2d.cpu.physical_cores", lambda: 16)
    default.cache_clear()
    for fields in LAYERS:
        problem: Any = problem_of("depthwise_conv2d", **fields, n=1, layout=layout)
        config = default(problem, host)
        assert config.check(problem, host) is None
        channels = config.chunk * config.panel if problem.channels_last else config.chunk
        tasks = -(-problem.out_h // config.task_rows) * -(-problem.ci // channels)
        assert tasks >= 16, (problem, config)
    default.cache_clear()
