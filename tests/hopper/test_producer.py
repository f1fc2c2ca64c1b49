"""The producer's loads: what a stage does not expect is noticed when the program is made; a warp waits as one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tvm.error import DiagnosticError

from schedules.build.builder import build
from schedules.core.arch import Arch, parse_arch
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw.few_tiles import FewWork
from tests.conftest import problem_of
from tests.hopper.works import WORKS

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


def of_one_thread(source: str) -> Iterator[str]:
    """What one elected thread of a warp does, of each place where one is elected."""
    for begin in re.finditer(r"if \(tvm_builtin_elect_one_sync_op\(\)\) \{", source):
        depth, end = 1, begin.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        yield source[begin.end() : end]


@pytest.mark.parametrize(
    ("arch", "name", "residual"),
    [
        ("sm_90a", "pixels, clusters", False),
        ("sm_90a", "pixels, consumers in turn", True),
        ("sm_90a", "boxes that are turned", False),
        ("sm_100a", "pixels, clusters", False),
    ],
)
def test_a_warp_waits_as_one(arch: str, name: str, residual: bool) -> None:
    """Lanes that need not wait would go on, and write uniform registers that loads on their way still read."""
    operator_name, schedule, fields, words = WORKS[name]
    blackwell = arch == "sm_100a"
    if blackwell:
        schedule, words = "tma_tcgen05", words | dict(block_n=64, block_k=64, num_stages=2, cta_group=1)
    problem = problem_of(operator_name, **fields | dict(residual=residual))
    built = build(problem, parse_arch(arch), schedule, words, device_code=False)
    source = str(built.sources["cu"]).rsplit("main_kernel(", 1)[1]
    parts = list(of_one_thread(source))
    loads = r"ptx_cp_async_bulk_tensor_g2s_cluster"
    assert sum(len(re.findall(loads, part)) for part in parts) == len(re.findall(loads, source)) > 0
    assert not any(re.search(r"mbarrier_(try_)?wait", part) for part in parts)
    assert len(parts) == (3 if blackwell else 2 if residual or "turned" in name else 1)
