"""What is compared, and that it is judged rightly: kernels themselves need a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import compare_depthwise
from benchmarks.compare_depthwise import HOW, candidates, in_bytes, in_floats, layers
from schedules.core.registry import operator_of
from tests.conftest import problem_of

LAYER: dict[str, Any] = dict(n=2, h=9, w=8, ci=40, kh=3, kw=3, pad=1)


@pytest.mark.parametrize("name", HOW)
def test_layers_and_what_is_tried(name: str) -> None:
    every = list(layers(name))
    assert len({problem for _, problem in every}) > 50
    assert all(operator_of(problem).name == name for _, problem in every)
    assert {problem.kh for _, problem in every} >= {3, 5} and {problem.n for _, problem in every} >= {1, 32, 128}
    problem = every[0][1]
    found = candidates(problem, 0)
    assert len(found) == len(set(found)) > 4 and found == candidates(problem, 0)


@pytest.mark.parametrize("name", HOW)
def test_a_result_is_held_to_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch", reason="the judge is PyTorch's convolution")
    monkeypatch.setattr(compare_depthwise, "DEVICE", "cpu")
    make: Any = in_floats if name == "depthwise_conv2d" else in_bytes
    for how in HOW[name]:
        problem = problem_of(name, **LAYER, **how)
        case = make(problem, 2, torch.Generator().manual_seed(0))
        *arrays, output = case.given[0]
        assert [tuple(tensor.shape) for tensor in case.given[0]] == [a.shape for a in problem.arguments()]
        wanted = operator_of(problem).reference(problem, [array.numpy() for array in arrays])[0].values
        output.copy_(torch.from_numpy(np.ascontiguousarray(wanted)))
        assert case.error() <= 1
        output.view(-1)[77] += 1
        assert case.error() > 1
        assert len(case.given) == len(case.peers) == 2 and case.peers[0]().shape == (2, 40, 9, 8)
