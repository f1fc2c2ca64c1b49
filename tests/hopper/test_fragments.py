"""Operand a by way of registers: every number of a tile is read once, by the thread whose row and k it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.core.arch import parse_arch
from schedules.hopper.shared import SharedTile
from tests.conftest import caught, problem_of

RAGGED: dict[str, Any] = dict(n=36, h=7, w=6, ci=13, co=43, kh=3, kw=2, pad=1, stride=2)
WORDS: dict[str, Any] = dict(
    block_m=64, block_n=16, block_k=32, num_stages=3, consumers=1, cluster_m=2, cluster_n=1, grid=2, blocks_sm=1,
    split_k=1,
)  # fmt: skip


def test_every_number_is_read_once() -> None:
    from tvm.script import tirx as T

    from schedules.hopper.fragments import GROUP, RUN, Tf32Fragments

    tile = SharedTile(128, 16, 4, RUN, transposed=True)
    fragments = Tf32Fragments(2, 2, tile)
    read = np.zeros(tile.nbytes, "int32")
    for warp, lane, step, m in np.ndindex(4, 32, fragments.steps, 2):
        for offset in fragments.offsets(T.int32(warp), T.int32(lane)):
            at = int(offset) + step * GROUP * tile.swizzle + m * tile.row_offset(64)
            assert at % 8 == 0
            read[at : at + 8] += 1
    assert (read == 1).all()
    assert [*fragments.of_set(0), *fragments.of_set(1)] == list(range(fragments.steps))


LINES: dict[str, Any] = dict(n=3, h=6, w=7, ci=40, co=20, kh=3, kw=3, pad=1, dtype="float16")
LINES_WORDS: dict[str, Any] = dict(
    block_m=64, block_n=32, block_k=32, num_stages=2, consumers=1, cluster_m=1, cluster_n=1, grid=1, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def lines_built(emulation: None) -> Built:
    problem = problem_of("conv2d_nchw", **LINES)
    return build(problem, parse_arch("sm_90a"), "tma_wgmma_lines", LINES_WORDS, device_code=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("u0, u1, upper_order", "u1, u0, upper_order"),  # channels exchanged
        ("l8, l9, lower_order", "l8, l9, upper_order"),  # zeros of another row
        ("(uint)12850", "(uint)21520"),  # padding as it lies
        ("(uint)16 : (uint)0", "(uint)16 : (uint)16"),  # no zeros beyond the last channel
        ("(uint)129)", "(uint)1)"),  # copies not waited for
        ("  tvm_builtin_ptx_cp_async_mbarrier_arrive_async_mbarrier_arrive_noinc_shared_b64(", "  (void)("),
    ],
)
def test_mutants_of_lines_are_caught(lines_built: Built, old: str, new: str) -> None:
    built = lines_built
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    assert old in source and caught(built, source.replace(old, new), arrays)


@pytest.fixture(scope="module")
def built(emulation: None) -> Built:
    return build(problem_of("conv2d_hwcn", **RAGGED), parse_arch("sm_90a"), "tf32", WORDS, device_code=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"=r"(a0), "=r"(a1) : "r"(even)', '"=r"(a1), "=r"(a0) : "r"(even)'),  # rows exchanged
        ('"=r"(a2), "=r"(a3) : "r"(odd)', '"=r"(a2), "=r"(a3) : "r"(even)'),  # a k twice
        ("make_float4(e, f, g, h)", "make_float4(f, e, g, h)"),  # operand b in another order
        ("  tvm_builtin_ptx_wgmma_fence_fence_sync_aligned();\n", "\n"),
        ("  tvm_builtin_ptx_wgmma_wait_group_wait_group_sync_aligned_1();\n", "\n"),  # read again too soon
    ],
)
def test_mutants_are_caught(built: Built, old: str, new: str) -> None:
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    assert old in source and caught(built, source.replace(old, new), arrays)
