from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import judge
from schedules.core.arch import Arch
from schedules.core.registry import operator_of
from schedules.operators.softmax.definition import FUNCTIONS
from tests.conftest import assert_correct, problem_of

STREAMED = dict(vector=16, rows_per_task=2, streaming="stores")


def at(array: np.ndarray, beyond: int) -> np.ndarray:
    """A copy of `array` that begins `beyond` bytes after a multiple of 64."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + beyond
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("cols", "dtype"), [(100, "float32"), (1000, "bfloat16"), (40, "float16")])
def test_any_type_is_correct(host: Arch, function: str, cols: int, dtype: str) -> None:
    assert_correct(problem_of("softmax", rows=7, cols=cols, dtype=dtype, function=function), host, "cpu", STREAMED)


@pytest.mark.parametrize("beyond", [0, 4, 16])
def test_any_alignment_is_correct(host: Arch, beyond: int) -> None:
    problem = problem_of("softmax", rows=5, cols=1000, dtype="float32")
    operator = operator_of(problem)
    inputs = operator.inputs(problem, np.random.default_rng(0))
    outputs = [at(np.full((5, 1000), np.nan, np.float32), beyond)]
    built = build(problem, host, "cpu", STREAMED)
    built.module["main"](*(at(array, beyond) for array in inputs), outputs[0])
    expected = operator.reference(problem, inputs)
    assert judge(problem, inputs, outputs, expected, built.schedule.arithmetic).passed


@pytest.mark.parametrize(("cols", "alignments"), [(1024, {64}), (1000, {32}), (100, {16})])
def test_stores_are_as_aligned_as_rows(host: Arch, cols: int, alignments: set[int]) -> None:
    """And only those of the output, within a branch that is taken if it is aligned."""

    def stores(config: dict[str, Any]) -> set[int]:
        text = str(build(problem_of("softmax", rows=4, cols=cols, dtype="float32"), host, "cpu", config).sources["ll"])
        lines = [line for line in text.splitlines() if "store" in line and "!nontemporal" in line]
        return {int(n) for line in lines for n in re.findall(r"align (\d+)", line)}

    assert stores(STREAMED) == alignments
    assert not stores({**STREAMED, "streaming": "no"})


def test_tasks_end_with_a_fence(host: Arch) -> None:
    problem = problem_of("softmax", rows=4, cols=1024, dtype="float32")
    sources = [build(problem, host, "cpu", {**STREAMED, "streaming": way}).sources["ll"] for way in ("no", "stores")]
    assert ["fence seq_cst" in str(source) for source in sources] == [False, True]
