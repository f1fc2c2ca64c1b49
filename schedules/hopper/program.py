"""The kernel that every operator shares: a ring of stages, a producer that fills it, consumers that multiply."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.hopper import epilogue
from schedules.hopper.config import K_BYTES, REGISTERS, ROWS, WARPGROUP
from schedules.hopper.instructions import Multiply, column_mask, peer_of, row_mask
from schedules.hopper.shared import UNIT, TensorMap
from schedules.hopper.work import Load, Operand, Work
from schedules.primitives.annotations import TIRX

_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"


def named(name: str, value: Any) -> Any:
    """`value` bound to a variable of that name."""
    if not isinstance(value, tvm.ir.Expr) or isinstance(value, tirx.IntImm):
        return value
    variable = T.Bind(value)
    IRBuilder.name(name, variable)
    return variable


_KEPT = """
__device__ __forceinline__ int hopper_kept(int value) {
  int r; asm volatile("mov.b32 %0, %1;" : "=r"(r) : "r"(value)); return r;
}
"""


def kept(name: str, value: Any) -> Any:
    """The int32 `value` computed here and now, bound to a variable: not earlier, and not again where it is used."""
    return named(name, T.cuda.func_call("hopper_kept", value, source_code=_KEPT, return_type="int32"))


def program(work: Work) -> tvm.IRModule:
    """The module with one function "main" that takes ``work.arguments``."""
    config, output = work.config, work.output
    a, b = work.a.tile, work.b.tile
    stage_bytes, loaded = work.stage_bytes, work.a.nbytes + work.b.nbytes
    stages, consumers = config.num_stages, config.consumers
    cluster_m, cluster_n, cluster = config.cluster_m, config.cluster_n, config.cluster
    grid = config.blocks(work.clusters * cluster)
    clusters = grid // cluster
    producer_registers, consumer_registers = REGISTERS[consumers, config.blocks_sm]
    redistribute = producer_registers > 0
    sharing = cluster_m + cluster_n - 1  # blocks that write into a block's stages, itself among them
    steps = a.k * a.item // K_BYTES
    blocks_m = config.rows // ROWS
    multiply = Multiply(work.dtype, config.block_n, a.transposed, b.transposed)
    each = multiply.registers
    shapes = {argument.name: argument for argument in work.arguments}
    names = ("data", "filter", "bias", "residual")

    def matched(name: str, handle: Any) -> Any:
        if name not in shapes:
            return None
        buffer = T.match_buffer(handle, shapes[name].shape, shapes[name].dtype, align=16)
        IRBuilder.name(name, buffer)
        return buffer

    def with_flat_residual(tensors: dict[str, Any]) -> dict[str, Any]:
        """`tensors`, and the residual's elements without a shape, as a problem with flattened pixels counts them."""
        residual = tensors["residual"]
        if residual is None:
            return tensors
        count = math.prod(shapes["residual"].shape)
        flat = T.decl_buffer((count,), shapes["residual"].dtype, data=residual.data)
        IRBuilder.name("flat_residual", flat)
        return {**tensors, "flat residual": flat}

    def encode(tensor_map: TensorMap, tensors: dict[str, Any], variable: Any) -> None:
        data = tensors[tensor_map.tensor].data
        words = tensor_map.words()
        T.evaluate(
            T.call_packed("runtime.cuTensorMapEncodeTiled", variable, tensor_map.dtype, tensor_map.rank, data, *words)
        )

    def fill(
        operand: Operand, tensor_map: Any, loads: Sequence[Load], ring: Any, base: Any, barrier: Any, mask: Any
    ) -> None:
        """Issue the loads of one stage; with a `mask`, into every block of the cluster that it names."""
        form = _LOAD.format(operand.source.rank) + (".multicast::cluster" if mask is not None else "")
        last = [] if mask is None else [mask]
        for load in loads:
            target = ring.ptr_to([base + load.offset])
            T.evaluate(T.ptx[form](target, T.address_of(tensor_map), *load.at, barrier, *last))

    def multiply_stage(sums: Any, a_tile: Any, b_tile: Any, stage: Any, step: Any) -> None:
        def units(offset: int) -> Any:
            return T.Cast("uint64", stage * (stage_bytes // UNIT) + offset // UNIT)

        taps = list(zip(work.a.taps, work.b.taps, strict=True))
        for tap, k, m in itertools.product(range(len(taps)), range(steps), range(blocks_m)):
            of_a, of_b = taps[tap]
            multiply.emit(
                [sums[m * each + i] for i in range(each)],
                a_tile + units(of_a + a.k_offset(k) + a.row_offset(m * ROWS)),
                b_tile + units(of_b + b.k_offset(k)),
                step > 0 if tap == k == 0 else T.bool(True),
            )

    def release(empty: Any, stage: Any, thread: Any, peer: Any) -> None:
        """Tell every block that writes into `stage` that this consumer has read it."""
        with T.If(thread < sharing), T.Then():
            if sharing > 1:
                empty.arrive(stage, remote=peer)
            else:
                empty.arrive(stage)

    # fmt: off
    @T.prim_func
    def main(data: T.handle, weight: T.handle, bias: T.handle, residual: T.handle, result: T.handle) -> None:
        tensors = T.meta_var({
            name: matched(name, handle)
            for name, handle in zip([*names, "output"], [data, weight, bias, residual, result], strict=True)
        })
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode(work.a.source, tensors, a_map)
        b_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode(work.b.source, tensors, b_map)
        output_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode(output.target, tensors, output_map)

        T.device_entry()
        views = T.meta_var(with_flat_residual(tensors))
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": config.blocks_sm})
        rank = T.cta_id_in_cluster([cluster])
        block = T.cta_id([grid])
        group = T.warpgroup_id([consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id_in_wg([WARPGROUP])
        pool = T.SMEMPool()
        ring = pool.alloc((stages * stage_bytes,), "uint8", align=1024)
        staging = pool.alloc((consumers * output.staging.nbytes,), "uint8", align=1024)
        leader = T.meta_var(tirx.all(group == 0, thread == 0))
        full = TMABar(pool, stages, leader=leader)
        empty = MBarrier(pool, stages, leader=leader)
        pool.commit()
        full.init(1)
        empty.init(consumers * sharing)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        if cluster > 1:
            T.cuda.cluster_sync()
        else:
            T.cuda.cta_sync()

        rank_m = T.meta_var(named("rank_m", T.truncdiv(rank, cluster_n) if cluster_n > 1 else rank))
        rank_n = T.meta_var(named("rank_n", T.truncmod(rank, cluster_n) if cluster_n > 1 else 0))
        tile: T.int32
        tile = T.truncdiv(block, cluster)
        stage: T.int32
        stage = 0
        phase: T.int32
        phase = 0
        if group == consumers:
            if redistribute:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](producer_registers)
            if warp == 0:  # noqa: SIM102 (all lanes of the warp elect)
                if T.cuda.elect_sync():
                    while tile < work.clusters:
                        place = T.meta_var(work.place(tile, rank_m, rank_n))
                        window = T.meta_var(work.taps(place))
                        # while: unrolled, the loops would need more registers than the producer keeps
                        ry: T.int32
                        ry = window[0]
                        while ry < window[1]:
                            rx: T.int32
                            rx = window[2]
                            while rx < window[3]:
                                chunk: T.int32
                                chunk = 0
                                while chunk < work.chunks:
                                    empty.wait(stage, phase ^ 1)
                                    full.arrive(stage, loaded)
                                    fill(work.a, a_map, work.loads_a(place, ry, rx, chunk, rank_n),
                                         ring, stage * stage_bytes, full.ptr_to([stage]),
                                         row_mask(cluster_m, cluster_n, rank_m))
                                    fill(work.b, b_map, work.loads_b(place, ry, rx, chunk, rank_m),
                                         ring, stage * stage_bytes + work.b_start, full.ptr_to([stage]),
                                         column_mask(cluster_m, cluster_n, rank_n))
                                    stage = stage + 1
                                    if stage == stages:
                                        stage = 0
                                        phase = phase ^ 1
                                    chunk = chunk + 1
                                rx = rx + 1
                            ry = ry + 1
                        tile = tile + clusters
        else:
            if redistribute:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](consumer_registers)
            sums = T.alloc_local((blocks_m * each,), multiply.accumulator)
            a_tile: T.uint64
            a_tile = T.uint64(0)
            b_tile: T.uint64
            b_tile = T.uint64(0)
            T.cuda.wgmma.encode_matrix_descriptor(
                T.address_of(a_tile), ring.ptr_to([group * a.row_offset(config.rows)]), *a.descriptor)
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(b_tile), ring.ptr_to([work.b_start]), *b.descriptor)
            # the block whose stage this thread says is free: each of the row and of the column
            peer = T.meta_var(named("peer", peer_of(thread, rank_m, rank_n, cluster_m, cluster_n)))
            while tile < work.clusters:
                place = T.meta_var(work.place(tile, rank_m, rank_n))
                window = T.meta_var(work.taps(place))
                count = T.meta_var(named("count",
                    (window[1] - window[0]) * (window[3] - window[2]) * work.chunks))
                before: T.int32
                before = 0
                for step in T.serial(count):
                    full.wait(stage, phase)
                    T.ptx.wgmma.fence.sync.aligned()
                    multiply_stage(sums, a_tile, b_tile, stage, step)
                    T.ptx.wgmma.commit_group.sync.aligned()
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    if step > 0:
                        release(empty, before, thread, peer)
                    before = stage
                    stage = stage + 1
                    if stage == stages:
                        stage = 0
                        phase = phase ^ 1
                T.ptx.wgmma.wait_group.sync.aligned(0)
                multiply.settle([sums[i] for i in range(blocks_m * each)])
                release(empty, before, thread, peer)
                epilogue.emit(work, views, output_map, place, sums, staging, group, warp, lane, thread)
                tile = tile + clusters
            if thread == 0:
                T.ptx.cp.async_.bulk.wait_group(0)
        T.cuda.warp_sync()
        if cluster > 1:
            T.cuda.cluster_sync()
    # fmt: on

    kept = [parameter for parameter, name in zip(main.params, (*names, "output"), strict=True) if name in shapes]
    function = tirx.PrimFunc(kept, main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})
