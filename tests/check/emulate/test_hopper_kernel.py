"""A whole kernel of TIRx in the emulator: copies by a producer, wgmma by a consumer, multicast in a cluster."""

# ruff: noqa: F821, SIM102 - in TIRx an annotation declares a variable, and conditions have no `and`
from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError
from tests.check.emulate.conftest import Built
from tests.check.emulate.hopper import EARLY, LATE, MODES

M, N, K, STAGES, TILE_K, CLUSTER = 256, 64, 512, 3, 64, 2


def gemm(tvm: Any) -> Any:
    """out[m, n] = sum of a[m, k] * b[n, k] in fp16: one block for 64 rows, two of a cluster share the columns."""
    from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
    from tvm.script import tirx as T

    a_size, b_size = 64 * TILE_K, N * TILE_K
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    pack = """
__device__ __forceinline__ unsigned int pack_halves(float a, float b) {
  unsigned int r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r;
}
"""

    # fmt: off
    @T.prim_func
    def main(a_ptr: T.handle, b_ptr: T.handle, out_ptr: T.handle):
        T.func_attr({"global_symbol": "main"})
        a = T.match_buffer(a_ptr, (M, K), "float16", align=16)
        b = T.match_buffer(b_ptr, (N, K), "float16", align=16)
        out = T.match_buffer(out_ptr, (M, N), "float16", align=16)
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", a_map, "float16", 2, a.data, K, M, K * 2, TILE_K, 64, 1, 1,
                      0, 3, 2, 0)
        b_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", b_map, "float16", 2, b.data, K, N, K * 2, TILE_K, N // CLUSTER,
                      1, 1, 0, 3, 2, 0)
        out_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", out_map, "float16", 2, out.data, N, M, N * 2, N, 64, 1, 1,
                      0, 3, 0, 0)
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        rank = T.cta_id_in_cluster([CLUSTER])
        bx = T.cta_id([M // 64])
        wg_id = T.warpgroup_id([2])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])
        tid = T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        tiles = pool.alloc((STAGES * (a_size + b_size),), "float16", align=1024)
        result = pool.alloc((64 * N,), "float16", align=1024)
        full = TMABar(pool, STAGES)
        empty = MBarrier(pool, STAGES)
        pool.commit()
        full.init(1)
        empty.init(CLUSTER)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cluster_sync()
        stage: T.int32
        stage = 0
        phase: T.int32
        phase = 0
        if wg_id == 1:
            T.ptx["setmaxnreg.dec.sync.aligned.u32"](40)
            if warp_id == 0:
                if T.cuda.elect_sync():
                    for k in T.serial(K // TILE_K):
                        empty.wait(stage, phase ^ 1)
                        full.arrive(stage, (a_size + b_size) * 2)
                        T.ptx[load](tiles.ptr_to([stage * (a_size + b_size)]), T.address_of(a_map), k * TILE_K, bx * 64,
                                    full.ptr_to([stage]))
                        T.ptx[load + ".multicast::cluster"](
                            tiles.ptr_to([stage * (a_size + b_size) + a_size + rank * (b_size // CLUSTER)]),
                            T.address_of(b_map), k * TILE_K, rank * (N // CLUSTER), full.ptr_to([stage]), T.uint16(3))
                        stage = stage + 1
                        if stage == STAGES:
                            stage = 0
                            phase = phase ^ 1
        else:
            T.ptx["setmaxnreg.inc.sync.aligned.u32"](232)
            acc = T.alloc_local((N // 2,), "float32")
            a_desc: T.uint64
            b_desc: T.uint64
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(a_desc), tiles.ptr_to([0]), 1, 64, 3)
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(b_desc), tiles.ptr_to([a_size]), 1, 64, 3)
            previous: T.int32
            previous = 0
            for k in T.serial(K // TILE_K):
                full.wait(stage, phase)
                T.ptx.wgmma.fence.sync.aligned()
                for step in T.unroll(TILE_K // 16):
                    offset = T.Cast("uint64", stage * ((a_size + b_size) // 8) + step * 2)
                    T.ptx[f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.f16.f16"](
                        *[acc[i] for i in range(N // 2)], a_desc + offset, b_desc + offset,
                        tvm.tirx.any(k > 0, step > 0), 1, 1, 0, 0)
                T.ptx.wgmma.commit_group.sync.aligned()
                T.ptx.wgmma.wait_group.sync.aligned(1)
                if k > 0:
                    if tid < CLUSTER:
                        empty.arrive(previous, remote=tid)
                previous = stage
                stage = stage + 1
                if stage == STAGES:
                    stage = 0
                    phase = phase ^ 1
            T.ptx.wgmma.wait_group.sync.aligned(0)
            for g in T.unroll(N // 16):
                T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](
                    result.ptr_to([(warp_id * 16 + lane_id % 16) * 64
                                   + T.bitwise_xor(2 * g + lane_id // 16, lane_id % 8) * 8]),
                    *[T.cuda.func_call("pack_halves", acc[g * 8 + q * 2], acc[g * 8 + q * 2 + 1], source_code=pack,
                                       return_type="uint32") for q in range(4)])
            T.ptx.fence.proxy.async_.shared__cta()
            T.ptx.bar.sync(T.uint32(1), T.uint32(128))
            if tid == 0:
                T.ptx["cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"](
                    T.address_of(out_map), 0, bx * 64, result.ptr_to([0]))
                T.ptx.cp.async_.bulk.commit_group()
                T.ptx.cp.async_.bulk.wait_group(0)
        T.cuda.warp_sync()
        T.cuda.cluster_sync()
    # fmt: on
    return main


@pytest.fixture(scope="module")
def built(tvm: Any, tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("tvm.backend.cuda.lang.pipeline")
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
    with target:
        module = tvm.compile(tvm.IRModule({"main": gemm(tvm)}), target=target, tir_pipeline="tirx")
    library = tmp_path_factory.mktemp("library") / "gemm.so"
    module.export_library(str(library))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, K)).astype("float16") for rows in (M, N))
    return Built(library, module.mod.imports[0].inspect_source(), [a, b], a.astype("float64") @ b.astype("float64").T)


def correct(built: Built, emulator: Emulator, mode: EmulationMode) -> bool:
    output = np.full((M, N), np.nan, "float16")
    (result,) = emulator.run(built.library, built.source, [*built.inputs, output], [2], mode=mode, timeout_s=20)
    return bool(np.abs(result.astype("float64") - built.reference).max() < 0.05)


@pytest.mark.parametrize("mode", MODES)
def test_a_gemm_is_correct_in_every_mode(mode: EmulationMode, built: Built, emulator: Emulator) -> None:
    assert correct(built, emulator, mode)


# What to replace in the generated CUDA source, and a part of the message if the emulator has a word for the mistake.
EMPTY, FULL = 7171, 7168  # indices of the first barrier of each kind
MUTANTS = {
    "data not waited for": (rf"tvm_builtin_cuda_mbarrier_wait\([^;]*{FULL}\)[^;]*;", "", None),
    "stage not waited for": (rf"tvm_builtin_cuda_mbarrier_wait\([^;]*{EMPTY}\)[^;]*;", "", None),
    "parity of the data": (rf"({FULL}\)\]\)\), \()phase_ptr\[0\]", r"\1(phase_ptr[0] ^ 1)", None),
    "parity of the stage": (rf"({EMPTY}\)\]\)\), \(\()phase_ptr\[0\] \^ 1", r"\1phase_ptr[0]", "deadlock"),
    "phase never turned": (r"phase_ptr\[0\] = \(phase_ptr\[0\] \^ 1\);", "", None),
    "one stage": (r"stage_ptr\[0\] == 3", "stage_ptr[0] == 1", "deadlock"),
    "stage given back too early": (r"if \(0 < k_1\)(.*?)previous_ptr\[0\] \+", r"if (0 <= k_1)\1stage_ptr[0] +",
                                   "changed before a wgmma.wait_group"),
    "stage given back to one block": (r"threadIdx\.x\) & 127\) < 2", "threadIdx.x) & 127) < 1", "deadlock"),
    "too few bytes expected": (r"\(uint\)16384", "(uint)8192", None),
    "barriers not fenced": (r"tvm_builtin_ptx_fence_mbarrier_init\w+\(\);", "", "no fence.mbarrier_init"),
    "cluster not synchronised": (r"tvm_builtin_cuda_cluster_sync\(\);\n  align", "align", "no initialised mbarrier"),
    "exits too early": (r"tvm_builtin_cuda_cluster_sync\(\);\n}", "}", "has exited"),
    "no wgmma.fence": (r"tvm_builtin_ptx_wgmma_fence_\w+\(\);", "", "without a wgmma.fence"),
    "no wgmma.commit_group": (r"tvm_builtin_ptx_wgmma_commit_\w+\(\);", "", "exits before its wgmma"),
    "last wgmma not waited for": (r"tvm_builtin_ptx_wgmma_wait_group_\w+_0\(\);", "", "exits before its wgmma"),
    "no proxy fence": (r"tvm_builtin_ptx_fence_proxy_\w+\(\);", "", "without a fence.proxy.async"),
    "no barrier before the store": (r"tvm_builtin_ptx_bar_sync_count\w+\([^;]*;", "", None),
    "store not waited for": (r"tvm_builtin_ptx_cp_async_bulk_wait_\w+\(\);", "", "exits before its bulk store"),
    "coordinate not aligned": (r"\(k \* 64\), \(\(\(int\)block", "(k * 64) + 1, (((int)block", "illegal instruction"),
    "swizzle of the descriptor": (r"(ptx_wgmma_encode_matrix_descriptor\(.*, )3\);", r"\g<1>2);", None),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name: str, built: Built, emulator: Emulator) -> None:
    pattern, replacement, message = MUTANTS[name]
    body = built.source.index("main_kernel(", built.source.index("main_kernel(") + 1)
    kernel, count = re.subn(pattern, replacement, built.source[body:], flags=re.DOTALL)
    assert count, "the generated source has changed"
    mutant, errors, wrong = replace(built, source=built.source[:body] + kernel), [], False
    for mode in (LATE, EARLY, EmulationMode("late", "reverse")):
        try:
            wrong |= not correct(mutant, emulator, mode)
        except EmulationError as error:
            errors.append(str(error))
    assert wrong or errors
    assert message is None or any(message in error for error in errors)
    assert not any("still running" in error or "\n" in error for error in errors)
