"""Problems of more than 2^31 elements on a device: needs PyTorch, 20 GB of the device's memory and 10 of the host's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import judge, outputs_of
from schedules.core.arch import Arch
from schedules.core.problem import numpy_dtype
from tests.conftest import problem_of

PERIOD = 3  # images, or rows, that come again and again: an index that lost its upper bits meets another one
MORE = 2**31
CONV = dict(h=256, w=256, ci=64, co=64, kh=3, kw=3, pad=1)
CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("softmax", None, dict(rows=2**17 + 3, cols=2**14 + 16, dtype="float16")),
    ("softmax", None, dict(rows=2**11 + 1, cols=2**20 + 8, dtype="float16")),
    ("conv2d_hwcn", None, CONV | dict(n=520, kh=1, kw=1, pad=0, dtype="float16")),
    ("conv2d_nhwc", None, CONV | dict(n=520, dtype="float16")),
    ("conv2d_nhwc", "mma", CONV | dict(n=520, kh=1, kw=1, pad=0, dtype="bfloat16")),
    ("conv2d_nchw", None, CONV | dict(n=520, dtype="float16")),
    ("conv2d_nchw", None, CONV | dict(n=513, ci=3, dtype="float32")),
    ("conv2d_nchw32", None, CONV | dict(n=520, dtype="int8")),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "fields"), CASES, ids=lambda value: value if type(value) is str else "")
def test_more_elements_than_an_int_counts(gpu: Arch, name: str, schedule: str | None, fields: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    problem = problem_of(name, **fields)
    batch = "rows" if name == "softmax" else "n"
    count = fields[batch]
    assert max(np.prod(argument.shape, dtype=np.int64) for argument in problem.arguments()) > MORE
    built = build(problem, gpu, schedule)
    few = replace(problem, **{batch: PERIOD})
    arrays = list(built.operator.inputs(few, np.random.default_rng(0)))
    axes = [argument.shape.index(count) if count in argument.shape else None for argument in problem.arguments()]
    inputs = []
    for array, axis in zip(arrays, axes, strict=False):
        bits = np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}")
        tensor = torch.from_numpy(bits).cuda().view(getattr(torch, array.dtype.name))
        again = torch.arange(count, device="cuda") % PERIOD
        inputs.append(tensor if axis is None else tensor.index_select(axis, again))
    outputs = []
    for argument in outputs_of(problem):
        unwritten = 77 if "int" in argument.dtype else float("nan")
        outputs.append(torch.full(argument.shape, unwritten, dtype=getattr(torch, argument.dtype), device="cuda"))
    built(*inputs, *outputs)
    torch.cuda.synchronize()
    del inputs
    first = []
    for output, axis, argument in zip(outputs, axes[len(arrays) :], outputs_of(problem), strict=True):
        images = output.movedim(axis, 0)
        for number in range(PERIOD):
            assert torch.equal(images[number::PERIOD], images[number].expand_as(images[number::PERIOD])), number
        bits = output.narrow(axis, 0, PERIOD).contiguous().view(getattr(torch, f"int{8 * output.element_size()}"))
        first.append(bits.cpu().numpy().view(numpy_dtype(argument.dtype)))
    found = judge(few, arrays, first, arithmetic=built.schedule.arithmetic)
    assert found.passed, found
