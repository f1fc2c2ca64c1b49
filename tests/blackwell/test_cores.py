"""Tensor memory between the thread that multiplies and the warps that finish: what is left out is noticed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.core.arch import parse_arch
from tests.conftest import caught, problem_of

PROBLEM: dict[str, Any] = dict(n=17, h=8, w=8, ci=32, co=32, kh=1, kw=1, dtype="float16")
ALONE: dict[str, Any] = dict(
    block_m=128, block_n=16, block_k=16, num_stages=6, consumers=1, cluster_m=1, cluster_n=1, grid=1, blocks_sm=1,
    split_k=1, ping_pong=False, stationary=False, halo=False, cta_group=1,
)  # fmt: skip
PAIR = ALONE | dict(block_n=32, cluster_m=2, cta_group=2, grid=2)
_WAIT, _FENCE = r"tvm_builtin_cuda_mbarrier_wait\(", r"tvm_builtin_ptx_tcgen05_fence_fence__{}_thread_sync\(\);"
_AFTER = _FENCE.format("after")
_COMMIT = r"tvm_builtin_ptx_tcgen05_commit\w*\([^;]*{}[^;]*;"
# patterns of the kernel's body
MUTANTS = {
    "products not waited for": (_WAIT + r"[^;]*\(turn_ptr_1\[0\] \^ 0\)\);", ""),
    "buffers not waited for": (_WAIT + r"[^;]*\(turn_ptr\[0\] \^ 1\)[^;]*\);", ""),
    "stages not waited for": (_WAIT + r"[^;]*\(phase_ptr\[0\] \^ 0\)\);", ""),
    "turns of products swapped": (r"\(turn_ptr_1\[0\] \^ 0\)", "(turn_ptr_1[0] ^ 1)"),
    "turns of buffers swapped": (r"\(turn_ptr\[0\] \^ 1\) \^ 0", "(turn_ptr[0] ^ 0)"),
    "stages not freed": (_COMMIT.format(r"stage_ptr\[0\]"), ""),
    "a tile not given on": (_COMMIT.format(r"buffer_ptr\[0\]"), ""),
    "one buffer for all": (r"sums_at = \(tensor_memory \+ [^;]*;", "sums_at = tensor_memory;"),
    "sums not begun anew": (r"\(int\)\(0 < step\)", "1"),
    "lanes of another warp": (r"\(\(warp_id_in_cta & 3\) \* 32\) << 16", "0"),
    "no fence before loads": (_AFTER + r"(\s*uint sums_at)", r"\1"),
    "no fence after loads": (_FENCE.format("before") + r"(\s*tvm_builtin_cuda_warp_sync)", r"\1"),
    "the end not waited for": (r"tvm_builtin_ptx_bar_sync_count_sync\([^;]*;(\s*" + _AFTER + r"\s*if \(warp)", r"\1"),
    "no dealloc": (r"tvm_builtin_ptx_tcgen05_dealloc\w*\([^;]*;", ""),
    "stages freed after the end": (r"for \(int v\w* = 0; \w+ < 6; ", "for (int v = 6; v < 6; "),
}
# of two blocks together
_FIRST = r"\(\(int\)tvm_builtin_cluster_ctaid_x\(\)\) == 0"
OF_TWO = {
    "allocated before both are there": (r"tvm_builtin_cuda_cluster_sync\(\);(\s*if[^;]*tcgen05_alloc)", r"\1"),
    "buffers freed in each block": (r"(mapa\w*\([^;]*\(buffer_ptr[^;]*), \(uint\)0\);", r"\1, (uint)rank);"),
    "loads arrive in each block": (r"(mapa\w*\([^;]*\(stage_ptr[^;]*), \(uint\)0\);", r"\1, (uint)rank);"),
    "both expect what is loaded": (rf"{_FIRST}(\) \{{\s*tvm_builtin_ptx_mbarrier_arrive_expect)", r"true\1"),
    "both multiply": (rf"(== 1\) && \(){_FIRST}", r"\1true"),
    "stages freed in one block": (r"(tcgen05_commit\w*\([^;]*\(stage_ptr[^;]*), \(ushort\)3\);", r"\1, (ushort)1);"),
    "a tile given on in one block": (
        r"(tcgen05_commit\w*\([^;]*\(buffer_ptr[^;]*), \(ushort\)3\);",
        r"\1, (ushort)1);",
    ),
}


CASES = [("alone", name) for name in (None, *MUTANTS)] + [("two together", name) for name in (None, *OF_TWO)]


@pytest.fixture(scope="module")
def kernels(emulation: None) -> dict[str, Built]:
    problem, arch = problem_of("conv2d_nhwc", **PROBLEM), parse_arch("sm_100a")
    words = {"alone": ALONE, "two together": PAIR}
    return {name: build(problem, arch, "tma_tcgen05", words[name], device_code=False) for name in words}


@pytest.mark.parametrize("blocks, name", CASES)
def test_mutants_are_caught(kernels: dict[str, Built], blocks: str, name: str | None) -> None:
    built = kernels[blocks]
    source, arrays = str(built.sources["cu"]), built.operator.inputs(built.problem, np.random.default_rng(0))
    begin, count = source.rindex("main_kernel("), 1
    body = source[begin:]
    if name:
        body, count = re.subn(*(MUTANTS | OF_TWO)[name], body)
    assert count and caught(built, source[:begin] + body, arrays) == bool(name)
