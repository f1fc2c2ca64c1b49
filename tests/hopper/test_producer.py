"""The producer's loads: what a stage does not expect is noticed when the program is made."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.error import DiagnosticError

from schedules.core.arch import Arch
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.few_tiles import FewWork
from tests.conftest import problem_of

WORK: dict[str, Any] = dict(
    n=16, h=64, w=64, ci=128, co=27, kh=3, kw=3, pad=1, dtype="float16", filter_layout="hwoi"
)  # fmt: skip
WORDS: dict[str, Any] = dict(block_m=256, block_n=96, block_k=32, consumers=2, num_stages=4, cluster_m=1)


def test_loads_beyond_a_stage_are_noticed(sm_90a: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    loads_b = FewWork.loads_b
    monkeypatch.setattr(FewWork, "loads_b", lambda *given: [*loads_b(*given), *loads_b(*given)])
    problem, spec = problem_of("conv2d_nchw", **WORK), operator("conv2d_nchw").schedule("tma_wgmma_few")
    with pytest.raises(DiagnosticError, match="1 x 2 boxes of filter bring 36864 bytes of a stage's 18432"):
        spec.apply(problem, spec.config_for(problem, sm_90a, WORDS), sm_90a)
