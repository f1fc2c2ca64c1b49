from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules.core.arch import ARCHES, Arch
from schedules.core.operator import Operator
from schedules.core.registry import operator, operators
from schedules.tune.features import features, matrix
from schedules.tune.strategy import Candidate
from tests.conftest import of_problem, problem_of


def test_fields_become_numbers(sm_90a: Arch, host: Arch) -> None:
    problem = problem_of("conv2d_hwcn", n=32, h=6, w=5, ci=16, co=32, kh=3, kw=3, pad=1)
    op = operator("conv2d_hwcn")
    gpu = features(problem, Candidate("tutorial", op.schedule("tutorial").default(problem, sm_90a)))
    assert gpu["schedule=tutorial"] == 1.0
    assert gpu["problem.n"] == 32 and gpu["problem.pad.0"] == 1 and gpu["problem.dtype=float32"] == 1
    assert gpu["problem.flops"] == math.log2(problem.flops)
    # pairs, their product, and what the config derives from its fields
    assert (gpu["config.tile.0"], gpu["config.tile.product"]) == (8, 64)
    assert gpu["config.threads"] == 64 and gpu["config.shared_bytes"] == (64 + 64) * 8 * 4
    cpu = features(problem, Candidate("cpu", op.schedule("cpu").default(problem, host)))
    assert cpu["config.lanes=n"] == 1.0 and cpu["config.packed"] == 1.0 and "config.tile.0" not in cpu


def hostile_values(value: Any) -> list[Any]:
    """In place of a config's whole number or pair."""
    numbers = [0, -1, 3, 2**31 - 1, -(2**31)]
    return numbers if type(value) is int else [(n, m) for n in numbers for m in (0, 1)] if type(value) is tuple else []


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.name)
def test_any_numbers_of_a_config(op: Operator) -> None:
    """Of a journal: `check` says whether it is legal, and what an illegal one lacks is left out."""
    words = dict(rows=64, cols=1024) if op.name == "softmax" else dict(n=32, h=6, w=6, ci=32, co=32, kh=3, kw=3, pad=1)
    refused = tried = 0
    for spec, kind in [(each, kind) for each in op.schedules for kind in each.kinds]:
        arch = ARCHES[{"llvm": "llvm", "cuda": "cuda:sm_90a", "rocm": "rocm:gfx942"}[kind]]
        for problem in (of_problem(op.name, {**words, "dtype": dtype}) for dtype in op.problem.dtypes):
            config = spec.default(problem, arch)
            for name, value in config.to_json().items():
                for other in hostile_values(value):
                    changed = replace(config, **{name: other})
                    refused += isinstance(changed.check(problem, arch), str)
                    features(problem, Candidate(spec.name, changed))
    assert refused > min(100, tried / 4)


def test_what_a_row_lacks() -> None:
    rows = [{"a": 1.0, "kind=x": 1.0}, {"b": 2.0, "kind=y": 1.0, "unheard of": 3.0}]
    table = matrix(rows, ["a", "b", "kind=x", "kind=y"])
    assert table[:, 2:].tolist() == [[1, 0], [0, 1]]  # a word that is not there is not missing: it is another word
    assert table[0, 0] == 1 and np.isnan(table[0, 1]) and np.isnan(table[1, 0]) and table[1, 1] == 2
