"""Sums of a tile that blocks share: who finishes whose, and where what others send waits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.hopper.config import SUM_BYTES, WARPGROUP
from tests.conftest import caught, problem_of
from tests.hopper.conftest import WorkOf, in_numbers

PROBLEM: dict[str, Any] = dict(
    n=2, h=16, w=16, ci=40, co=27, kh=3, kw=3, pad=1, bias=True, activation="relu", dtype="float16"
)
WORDS: dict[str, Any] = dict(
    block_m=64, block_n=32, block_k=64, num_stages=3, consumers=1, cluster_m=1, cluster_n=1, grid=4, blocks_sm=1,
    split_k=2, ping_pong=False, stationary=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("consumers", "columns", "split", "slices"),
    [(1, 32, 2, 2), (2, 16, 2, 1), (3, 32, 2, 2), (1, 64, 4, 4), (3, 32, 4, 2), (3, 16, 4, 1), (2, 64, 8, 4)],
)
def test_each_sender_has_a_place(work_of: WorkOf, consumers: int, columns: int, split: int, slices: int) -> None:
    from tvm.script import tirx as T

    from schedules.hopper.exchange import Exchange, _number_of

    words = WORDS | dict(block_m=64 * consumers, block_n=columns, block_k=16, consumers=consumers, split_k=split)
    work = work_of("conv2d_nhwc", "tma_wgmma", PROBLEM | dict(co=72), words | dict(grid=split))
    assert work.slices == slices
    exchange = object.__new__(Exchange)
    exchange.split, exchange.others, exchange.slices = split, split - 1, slices
    exchange.count, exchange.groups = work.config.accumulators, columns // 8 // slices
    of_sender = exchange.count // slices * WARPGROUP * SUM_BYTES
    places: dict[int, set[int]] = {owner: set() for owner in range(split)}
    for consumer in range(consumers):
        vectors: list[int] = []
        for number in range(slices):
            vectors += exchange._vectors(number)
            owner = int(in_numbers(exchange._owner(T.int32(consumer), number)))
            finished = [k for k in range(split) if in_numbers(exchange.slice(T.int32(consumer), T.int32(k))) == number]
            assert finished == [owner]
            for sender in set(range(split)) - {owner}:
                other = int(in_numbers(_number_of(T.int32(sender), T.int32(owner))))
                assert 0 <= other < split - 1
                place = int(in_numbers(exchange._slot(T.int32(consumer), T.int32(other))))
                assert place % of_sender == 0 and 0 <= place <= work.exchange_bytes - of_sender
                assert place not in places[owner]
                places[owner].add(place)
        assert sorted(vectors) == list(range(0, exchange.count, 4))


@pytest.mark.parametrize("call", ["tvm_builtin_cuda_mbarrier_wait_acquire_cluster", "hopper_arrive_in_cluster"])
def test_a_missing_step_is_noticed(emulation: None, sm_90a: Arch, call: str) -> None:
    built = build(problem_of("conv2d_nhwc", **PROBLEM), sm_90a, "tma_wgmma", WORDS, device_code=False)
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    without, count = re.subn(rf"^ +{call}\(.*;$", "", source, flags=re.M)
    assert count and not caught(built, source, arrays) and caught(built, without, arrays)
