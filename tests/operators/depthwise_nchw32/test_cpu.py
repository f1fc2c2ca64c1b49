from __future__ import annotations

from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError
from schedules.operators.depthwise_conv2d.cpu import EXACT, CpuConfig, default, graph
from tests.conftest import assert_correct, problem_of
from tests.operators.depthwise_nchw32.shapes import SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_correct(host: Arch, shape: str) -> None:
    assert_correct(problem_of("depthwise_nchw32", **SHAPES[shape]), host, "cpu")


@pytest.mark.parametrize(
    "config",
    [
        dict(vector=4, block_vectors=2, block_rows=5, task_rows=2, chunk=1),
        dict(vector=1, block_vectors=1, block_rows=1, task_rows=1, chunk=3),
        dict(vector=32, block_vectors=1, chunk=0, task_rows=100),
    ],
    ids=str,
)
def test_other_configs_are_correct(host: Arch, config: dict[str, Any]) -> None:
    for shape in ("ragged, stride 2", "5x5, stride 2"):
        assert_correct(problem_of("depthwise_nchw32", **SHAPES[shape]), host, "cpu", config)


def test_a_vector_is_part_of_a_group(host: Arch) -> None:
    problem: Any = problem_of("depthwise_nchw32", **SHAPES["a layer"])
    with pytest.raises(ConfigError, match="vector=16 x block_vectors=3 are no part of 32"):
        CpuConfig(vector=16, block_vectors=3).require(problem, host)


def test_sums_are_in_floats_as_long_as_these_are_exact(host: Arch) -> None:
    """The largest sum of products of a kernel with more taps is beside the whole numbers of float32."""
    for taps, dtype in ((EXACT, "float32"), (EXACT + 1, "int32")):
        fields = dict(n=1, h=1, w=taps, ci=1, kh=1, kw=taps, out_dtype="int32", alpha=1.0)
        problem: Any = problem_of("depthwise_nchw32", **fields)
        conv = next(
            b for b in graph(problem, default(problem, host), host).body.block.alloc_buffers if b.name == "conv"
        )
        assert str(conv.dtype) == dtype
