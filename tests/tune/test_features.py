from __future__ import annotations

import math

import numpy as np

from schedules.core.arch import Arch
from schedules.core.registry import operator
from schedules.tune.features import features, matrix
from schedules.tune.strategy import Candidate
from tests.conftest import problem_of


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


def test_what_a_row_lacks() -> None:
    rows = [{"a": 1.0, "kind=x": 1.0}, {"b": 2.0, "kind=y": 1.0, "unheard of": 3.0}]
    table = matrix(rows, ["a", "b", "kind=x", "kind=y"])
    assert table[:, 2:].tolist() == [[1, 0], [0, 1]]  # a word that is not there is not missing: it is another word
    assert table[0, 0] == 1 and np.isnan(table[0, 1]) and np.isnan(table[1, 0]) and table[1, 1] == 2
