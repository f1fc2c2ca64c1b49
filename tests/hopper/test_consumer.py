"""Consumers that take turns: the order of them, their places in the ring, and filters that stay."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.core.arch import parse_arch
from tests.conftest import caught, problem_of

IN_TURN: dict[str, Any] = dict(
    block_m=64, block_n=32, block_k=32, num_stages=5, consumers=2, cluster_m=1, cluster_n=1, grid=1, blocks_sm=1,
    split_k=1, ping_pong=True, stationary=True, row_pixels=1, tall=False, skip_padding=False,
)  # fmt: skip
MUTANTS = {
    "a turn not waited for": (r"tvm_builtin_cuda_mbarrier_wait\([^;]*turn_ptr[^;]*;", ""),
    "turns all alike": (r"turn_ptr\[0\] = \(turn_ptr\[0\] \^ 1\);", ""),
    "a turn not given on": (r"tvm_builtin_ptx_mbarrier_arrive_arrive_shared_b64\([^;]*\? 0 : [^;]*;", ""),
    "stages of others stay": (r"stage_ptr\[0\] = \(position % \d+\);", ""),
    "phases of others stay": (r"phase_ptr\[0\] = \(phase_ptr\[0\] \^ \(\(position / \d+\) & 1\)\);", ""),
    "filters loaded again": (r"if \(tile_ptr\[0\] < \d+\)", "if (tile_ptr[0] < 9999)"),
    "filters in one place": (r"rx_ptr\[0\] \* \d+", "rx_ptr[0] * 0"),
}


@pytest.fixture(scope="module")
def built(emulation: None) -> Built:
    problem = problem_of("conv2d_nchw32", n=4, h=8, w=8, ci=32, co=32, kh=3, kw=3, pad=1)
    return build(problem, parse_arch("sm_90a"), "tma_wgmma", IN_TURN, device_code=False)


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_mutants_are_caught(built: Built, name: str | None) -> None:
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    mutant, count = re.subn(*MUTANTS[name], source) if name else (source, 1)
    assert count == 1 and caught(built, mutant, arrays) == bool(name)


@pytest.mark.parametrize("words", [dict(cluster_m=2), dict(cluster_n=2), dict(cluster_m=2, split_k=2, grid=0)], ids=str)
def test_a_block_stays_until_no_other_writes_into_it(emulation: None, words: dict[str, Any]) -> None:
    """By waiting for its ring alone: consumers of other blocks say that they have read what it loaded for them."""
    problem = problem_of("conv2d_nhwc", n=4, h=8, w=8, ci=80, co=64, kh=1, kw=1, dtype="float16")
    plain = dict(block_m=64, block_n=32, block_k=16, num_stages=3, consumers=1, cluster_m=1, grid=4)
    built = build(problem, parse_arch("sm_90a"), "tma_wgmma", plain | words, device_code=False)
    source, arrays = str(built.sources["cu"]), built.operator.inputs(problem, np.random.default_rng(0))
    mutant, count = re.subn(
        r"for \(int v = 0; v < 3; \+\+v\) \{\n.*mbarrier_wait", r"for (;false;) {mbarrier_wait", source
    )
    assert "cluster_sync" not in source and count == 1
    assert not caught(built, source, arrays) and caught(built, mutant, arrays)
