"""The barriers of a stage: whom they count, and that every other count is noticed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.hopper.config import HopperConfig
from schedules.hopper.ring import readers, writers
from tests.conftest import caught, problem_of

PROBLEM: dict[str, Any] = dict(n=4, h=8, w=8, ci=32, co=64, kh=3, kw=3, pad=1, dtype="float16")
WORDS: dict[str, Any] = dict(
    block_m=128, block_n=32, block_k=16, num_stages=3, consumers=2, cluster_m=2, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False,
)  # fmt: skip
INIT = r"(mbarrier_init_init_shared_b64\(.*, \(uint\))(\d+)(\);)"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (dict(consumers=2, cluster_m=1, cluster_n=1), (1, 2)),
        (dict(consumers=3, cluster_m=4, cluster_n=1), (4, 12)),  # a block's filters go to its column of four
        (dict(consumers=2, cluster_m=2, cluster_n=2), (3, 6)),  # not to the block across
        (dict(consumers=2, cluster_m=1, cluster_n=2, ping_pong=True), (2, 2)),  # one consumer reads a stage
        (dict(consumers=1, cluster_m=1, cluster_n=1, split_k=4), (1, 1)),  # other blocks read other stages
    ],
)
def test_who_writes_and_who_reads(words: dict[str, Any], expected: tuple[int, int]) -> None:
    config = HopperConfig(**words)
    assert (writers(config), readers(config)) == expected


@pytest.mark.parametrize(
    ("barrier", "change"), [(0, 1), (3, 1), (3, -1)], ids=["full too late", "empty too late", "empty too early"]
)
def test_another_count_is_noticed(emulation: None, sm_90a: Arch, barrier: int, change: int) -> None:
    """Barriers 0 to 2 are `full` of the three stages, 3 to 5 `empty`."""
    built = build(problem_of("conv2d_nhwc", **PROBLEM), sm_90a, "tma_wgmma", WORDS, device_code=False)
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    inits = list(re.finditer(INIT, source))
    assert [int(init[2]) for init in inits] == [1] * 3 + [4] * 3
    init = inits[barrier]
    mutant = source[: init.start(2)] + str(int(init[2]) + change) + source[init.end(2) :]
    assert not caught(built, source, arrays) and caught(built, mutant, arrays)
