"""The kernel that every operator shares: a ring of stages, a producer that fills it, consumers that multiply."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.hopper.config import K_BYTES, REGISTERS, ROWS, WARPGROUP
from schedules.hopper.exchange import Exchange
from schedules.hopper.fragments import SETS, Fragments
from schedules.hopper.instructions import Multiply, column_mask, peer_of, row_mask
from schedules.hopper.shared import UNIT, Columns, Runs, SharedTile, TensorMap, aligned
from schedules.hopper.work import Load, Member, Operand, Work
from schedules.lowering.annotations import TIRX
from schedules.steps.story import inside_part, part
from schedules.tirx.values import kept, named

_LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"


def program(work: Work) -> tvm.IRModule:
    """The module with one function "main" that takes ``work.arguments``."""
    config, output = work.config, work.output
    a, b = work.a.tile, work.b.tile
    stage_bytes, loaded = work.stage_bytes, work.a.loaded + work.b.loaded
    ping_pong, stationary, b_bytes = config.ping_pong, config.stationary, aligned(work.b.nbytes)
    # of the products that a stage adds to the same sums, the first may begin them anew
    products = [
        (each, each.sums not in {other.sums for other in work.products[:i]}) for i, each in enumerate(work.products)
    ]
    stages, consumers, consumers_n = config.num_stages, config.consumers, config.consumers_n
    cluster_m, cluster_n, cluster = config.cluster_m, config.cluster_n, config.cluster
    cluster_mn, split_k = cluster_m * cluster_n, config.split_k
    split = split_k > 1
    grid = config.blocks(work.clusters * cluster)
    clusters = grid // cluster
    producer_registers, consumer_registers = REGISTERS[consumers, config.blocks_sm]
    redistribute = producer_registers > 0
    by_tma, staged = isinstance(output.target, TensorMap), output.staging.nbytes > 0
    sharing = cluster_m + cluster_n - 1  # blocks that write into a block's stages, itself among them
    steps = a.k * a.item // K_BYTES
    blocks_m = config.rows // ROWS
    by_registers = work.a.by_registers
    multiply = Multiply(work.dtype, config.columns, a.transposed, b.transposed, by_registers)
    each = multiply.registers
    fragments = Fragments(a, blocks_m)
    # the steps of a stage in parts, each of which is waited for while the next is multiplied
    parts = [fragments.of_set(number) for number in range(SETS)] if by_registers else [range(steps)]
    shapes = {argument.name: argument for argument in work.arguments}
    names = ("data", "filter", "bias", "residual")

    def matched(name: str, handle: Any) -> Any:
        if name not in shapes:
            return None
        buffer = T.match_buffer(handle, shapes[name].shape, shapes[name].dtype, align=16)
        IRBuilder.name(name, buffer)
        return buffer

    def with_workspace(tensors: dict[str, Any]) -> dict[str, Any]:
        """`tensors` and those of the workspace, after the kernel that fills them."""
        if not work.workspace:
            return tensors
        for argument in work.workspace:
            tensors[argument.name] = T.alloc_buffer(argument.shape, argument.dtype, scope="global")
            IRBuilder.name(argument.name, tensors[argument.name])
        title = "A kernel before: what the product takes in another layout is copied into workspace"
        with inside_part(title), T.attr({"tirx.device_entry": True}):
            work.prepare(tensors)
        return tensors

    def with_flat(tensors: dict[str, Any]) -> dict[str, Any]:
        """`tensors`, and the elements without a shape of those that the epilogue reads or writes one by one, as a
        problem with flattened pixels counts them."""
        flat = {}
        for name in ("residual", "output"):
            if tensors[name] is None or (name == "output" and by_tma):
                continue
            count = math.prod(shapes[name].shape)
            buffer = T.decl_buffer((count,), shapes[name].dtype, data=tensors[name].data)
            IRBuilder.name(f"flat_{name}", buffer)
            flat[f"flat {name}"] = buffer
        return {**tensors, **flat}

    def encode(name: str, tensor_map: TensorMap | Runs | Columns, tensors: dict[str, Any]) -> Any:
        """The variable `name` that holds the tensor map; None if there is none."""
        if not isinstance(tensor_map, TensorMap):
            return None
        variable = named(name, T.tvm_stack_alloca("tensormap", 1))
        data = tensors[tensor_map.tensor].data
        words = tensor_map.words()
        T.evaluate(
            T.call_packed("runtime.cuTensorMapEncodeTiled", variable, tensor_map.dtype, tensor_map.rank, data, *words)
        )
        return variable

    def fill(
        operand: Operand, tensor_map: Any, loads: Sequence[Load], ring: Any, base: Any, barrier: Any, mask: Any
    ) -> None:
        """Issue the loads of one stage; with a `mask`, into every block of the cluster that it names."""
        form = _LOAD.format(operand.source.rank) + (".multicast::cluster" if mask is not None else "")
        last = [] if mask is None else [mask]
        operand.check_loads(loads, cluster_n if operand is work.a else cluster_m)
        for load in loads:
            target = ring.ptr_to([base + load.offset])
            T.evaluate(T.ptx[form](target, T.address_of(tensor_map), *load.at, barrier, *last))

    def fill_b(
        tile: Any, tensor_map: Any, loads: Sequence[Load], memory: Any, stage: Any, at: Any, barrier: Any, mask: Any
    ) -> None:
        """Issue the loads of operand b for a stage; where it stays, with the block's first tile, to its place of the
        stage's number in the reduction, `at` being the (ry, rx, chunk) of it."""
        if not stationary:
            fill(work.b, tensor_map, loads, memory, stage * stage_bytes + work.b_start, barrier, mask)
            return
        ry, rx, chunk = at
        number = T.truncdiv((ry * work.kernel[1] + rx) * work.chunks + chunk, split_k)
        with T.If(tile < clusters), T.Then():
            fill(work.b, tensor_map, loads, memory, number * b_bytes, barrier, mask)

    def expected(tile: Any) -> Any:
        """Bytes that a stage gets."""
        return T.Select(tile < clusters, loaded, work.a.loaded) if stationary else loaded

    def multiply_part(some: range, sums: Any, of_a: Any, b_tile: Any, stage: Any, step: Any) -> None:
        """The products of some steps of a stage; `of_a` is a descriptor, or the memory of the fragments."""

        def units(offset: int, at: Any = stage, nbytes: int = stage_bytes) -> Any:
            return T.Cast("uint64", at * (nbytes // UNIT) + offset // UNIT)

        of_b = partial(units, at=step, nbytes=b_bytes) if stationary else units

        for k in some:
            for (product, first), m in itertools.product(products, range(blocks_m)):
                multiply.emit(
                    [sums[(product.sums * blocks_m + m) * each + i] for i in range(each)],
                    fragments.of(of_a, k, m)
                    if by_registers
                    else [of_a + units(product.a + a.k_offset(k) + a.row_offset(m * ROWS))],
                    b_tile + of_b(product.b + b.k_offset(k)),
                    step > 0 if k == 0 and first else T.bool(True),
                )

    def multiply_stage(
        sums: Any, operand: tuple[Any, Sequence[Any]], b_tile: Any, stage: Any, step: Any, freed: Callable[[], None]
    ) -> None:
        """Multiply a stage, with what `operand_a` gave, and call `freed` when the one before it has been read."""
        of_a, addresses = operand
        begin = named("begin", stage * stage_bytes) if by_registers else 0
        for number, some in enumerate(parts):
            if by_registers:
                fragments.read(of_a, [address + begin for address in addresses], some)
            T.evaluate(T.ptx.wgmma.fence.sync.aligned())
            multiply_part(some, sums, of_a, b_tile, stage, step)
            T.evaluate(T.ptx.wgmma.commit_group.sync.aligned())
            T.evaluate(T.ptx.wgmma.wait_group.sync.aligned(1))
            if number == 0:
                with T.If(step > 0), T.Then():
                    freed()

    def descriptor_of(name: str, tile: SharedTile, pointer: Any) -> Any:
        """The descriptor of the tile that `pointer` points to in the first stage."""
        cell = T.alloc_local((1,), "uint64")
        IRBuilder.name(name, cell)
        T.evaluate(T.cuda.wgmma.encode_matrix_descriptor(T.address_of(cell[0]), pointer, *tile.descriptor))
        return cell[0]

    def operand_a(pointer: Any, warp: Any, lane: Any) -> tuple[Any, Sequence[Any]]:
        """A consumer's rows of operand a, to which `pointer` points in the first stage: their descriptor, or the memory
        of their fragments and the addresses that these are read from."""
        if not by_registers:
            return descriptor_of("a_tile", a, pointer), ()
        memory = T.alloc_local((fragments.registers,), "uint32")
        IRBuilder.name("fragments", memory)
        first = T.Cast("int32", T.cuda.cvta_generic_to_shared(pointer))
        at = (first + offset for offset in fragments.offsets(warp, lane))
        return memory, [kept(name, address) for name, address in zip(("even", "odd"), at, strict=True)]

    def steps_of(place: Any, rank_k: Any) -> Any:
        """Stages of the tile at `place` that are this block's."""
        window = work.taps(place)
        count = (window[1] - window[0]) * (window[3] - window[2]) * work.chunks
        return T.truncdiv(count + (split_k - 1) - rank_k, split_k) if split else count

    def others(tile: Any, consumer: Any) -> Any:
        """Tiles of other consumers between the consumer's last, if any, and its next; `tile` follows the last."""
        return T.Select(tile < clusters, consumer, consumers - 1) if ping_pong else 0

    def release(empty: Any, stage: Any, thread: Any, peer: Any) -> None:
        """Tell every block that writes into `stage` that this consumer has read it."""
        with T.If(thread < sharing), T.Then():
            if sharing > 1:
                empty.arrive(stage, remote=peer)
            else:
                empty.arrive(stage)

    def fetch_maps(by: Any, *maps: Any) -> None:
        """Have the thread for which `by` is true fetch those tensor maps that there are."""
        with T.If(by), T.Then():
            for tensor_map in maps:
                if tensor_map is not None:
                    T.evaluate(T.ptx.prefetch.tensormap(T.address_of(tensor_map)))

    def wait_stored() -> None:
        """Wait for this thread's stores, of which the shared memory that they read has to outlive them."""
        wait = T.ptx.cp.async_.bulk.wait_group
        T.evaluate((wait.read if config.eager else wait)(0))

    # fmt: off
    @T.prim_func
    def main(data: T.handle, weight: T.handle, bias: T.handle, residual: T.handle, result: T.handle) -> None:
        part("Tensor maps: the host describes to TMA where tiles of the operands and of the output lie")
        tensors = T.meta_var({
            name: matched(name, handle)
            for name, handle in zip([*names, "output"], [data, weight, bias, residual, result], strict=True)
        })
        tensors = T.meta_var(with_workspace(tensors))
        a_map = T.meta_var(encode("a_map", work.a.source, tensors))
        b_map = T.meta_var(encode("b_map", work.b.source, tensors))
        output_map = T.meta_var(encode("output_map", output.target, tensors))

        T.device_entry()
        part("The launch: clusters of blocks, each with warpgroups that consume and one that produces")
        views = T.meta_var(with_flat(tensors))
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": config.blocks_sm})
        rank = T.cta_id_in_cluster([cluster])
        block = T.cta_id([grid])
        group = T.warpgroup_id([consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id_in_wg([WARPGROUP])
        if config.eager:
            fetch_maps(tirx.all(group == consumers, thread == 0), a_map, b_map, output_map)
        part("Shared memory: a ring of stages, room for the output, and barriers that say who may use a stage")
        pool = T.SMEMPool()
        ring = pool.alloc((stages * stage_bytes,), "uint8", align=1024)
        memory_b = T.meta_var(pool.alloc((work.stationary_bytes,), "uint8", align=1024) if stationary else ring)
        staging = T.meta_var(
            pool.alloc((consumers * output.staging.nbytes,), "uint8", align=1024) if staged else None)
        leader = T.meta_var(tirx.all(group == 0, thread == 0))
        full = TMABar(pool, stages, leader=leader)
        empty = MBarrier(pool, stages, leader=leader)
        exchange = T.meta_var(Exchange(work, multiply.accumulator, pool, leader) if split else None)
        issued = T.meta_var(MBarrier(pool, consumers, leader=leader) if ping_pong else None)
        pool.commit()
        full.init(1)
        empty.init(config.parts * sharing)
        if ping_pong:
            issued.init(WARPGROUP)
        if split:
            exchange.init()
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        if cluster > 1:
            T.cuda.cluster_sync()
        else:
            T.cuda.cta_sync()

        part("Which tiles are this block's, and where it stands in the ring")
        # ranks count along n first, then m, then the reduction
        rank_k = T.meta_var(named("rank_k", T.truncdiv(rank, cluster_mn)) if split_k > 1 else 0)
        rank_mn = T.meta_var(named("rank_mn", T.truncmod(rank, cluster_mn)) if split_k > 1 else rank)
        rank_m = T.meta_var(named("rank_m", T.truncdiv(rank_mn, cluster_n)) if cluster_m > 1 else 0)
        rank_n = T.meta_var(named("rank_n", T.truncmod(rank_mn, cluster_n)) if cluster_n > 1 else 0)
        first = T.meta_var(rank_k * cluster_mn)
        tile: T.int32
        tile = T.truncdiv(block, cluster)
        stage: T.int32
        stage = 0
        phase: T.int32
        phase = 0
        if group == consumers:
            part("The producer: one thread has TMA fill every stage that is free, tile after tile")
            if redistribute:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](producer_registers)
            if warp == 0:  # noqa: SIM102 (all lanes of the warp elect)
                if T.cuda.elect_sync():
                    while tile < work.clusters:
                        place = T.meta_var(work.place(tile, rank_m, rank_n))
                        window = T.meta_var(work.taps(place))
                        # blocks that share the reduction take every split_k-th of its stages, over all taps
                        chunk: T.int32
                        chunk = rank_k
                        # while: unrolled, the loops would need more registers than the producer keeps
                        ry: T.int32
                        ry = window[0]
                        while ry < window[1]:
                            rx: T.int32
                            rx = window[2]
                            while rx < window[3]:
                                while chunk < work.chunks:
                                    empty.wait(stage, phase ^ 1)
                                    full.arrive(stage, expected(tile))
                                    fill(work.a, a_map, work.loads_a(place, ry, rx, chunk, rank_n),
                                         ring, stage * stage_bytes, full.ptr_to([stage]),
                                         row_mask(cluster_n, first + rank_m * cluster_n))
                                    fill_b(tile, b_map, work.loads_b(place, ry, rx, chunk, rank_m),
                                           memory_b, stage, (ry, rx, chunk), full.ptr_to([stage]),
                                           column_mask(cluster_m, cluster_n, first + rank_n))
                                    stage = stage + 1
                                    if stage == stages:
                                        stage = 0
                                        phase = phase ^ 1
                                    chunk = chunk + split_k
                                chunk = chunk - work.chunks
                                rx = rx + 1
                            ry = ry + 1
                        tile = tile + clusters
        else:
            part("The consumers: wait for a stage, multiply it by wgmma into registers, and free it")
            if redistribute:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](consumer_registers)
            part_of = T.meta_var(0 if ping_pong else group)
            member_m = T.meta_var(T.truncdiv(group, consumers_n) if consumers_n > 1 else part_of)
            columns_before = T.meta_var(
                T.truncmod(group, consumers_n) * b.row_offset(config.columns) if consumers_n > 1 else 0)
            sums = T.alloc_local((work.sums * blocks_m * each,), multiply.accumulator)
            of_a = T.meta_var(operand_a(ring.ptr_to([member_m * a.row_offset(config.rows)]), warp, lane))
            b_start = T.meta_var((0 if stationary else work.b_start) + columns_before)
            b_tile = T.meta_var(descriptor_of("b_tile", b, memory_b.ptr_to([b_start])))
            # the block whose stage this thread says is free: each of the row and of the column
            peer = T.meta_var(named("peer", first + peer_of(thread, rank_m, rank_n, cluster_m, cluster_n)))
            turn: T.int32
            turn = 0
            while tile + others(tile, group) * clusters < work.clusters:
                if ping_pong:
                    part("The others' tiles: their stages go by")
                    passed = T.meta_var(named("passed", others(tile, group)))  # tile changes in the loop
                    for _ in T.serial(passed):
                        position = T.meta_var(
                            named("position", stage + steps_of(work.place(tile, rank_m, rank_n), rank_k)))
                        stage = T.truncmod(position, stages)
                        phase = phase ^ (T.truncdiv(position, stages) & 1)
                        tile = tile + clusters
                    part("This one's, when all stages before are full")
                    issued.wait(group, turn ^ T.Cast("int32", group == 0))
                place = T.meta_var(work.place(tile, rank_m, rank_n))
                count = T.meta_var(named("count", steps_of(place, rank_k)))
                before: T.int32
                before = 0
                for step in T.serial(count):
                    full.wait(stage, phase)
                    multiply_stage(sums, of_a, b_tile, stage, step, partial(release, empty, before, thread, peer))
                    before = stage
                    stage = stage + 1
                    if stage == stages:
                        stage = 0
                        phase = phase ^ 1
                if ping_pong:
                    issued.arrive(T.Select(group == consumers - 1, 0, group + 1))
                    turn = turn ^ 1
                T.ptx.wgmma.wait_group.sync.aligned(0)
                multiply.settle([sums[i] for i in range(work.sums * blocks_m * each)])
                release(empty, before, thread, peer)
                part("The way out: a tile's results leave the registers while the producer fetches the next")
                member = T.meta_var(Member(group, part_of, warp, lane, thread))
                if split:
                    if exchange.finishes(group, rank_k):
                        exchange.receive(sums, group, rank_k, rank_mn, thread, turn)
                        work.emit_results(views, output_map, place, sums, staging, member)
                    else:
                        exchange.send(sums, group, rank_k, rank_mn, thread, turn)
                    turn = turn ^ 1
                else:
                    work.emit_results(views, output_map, place, sums, staging, member)
                tile = tile + clusters
            if by_tma:  # noqa: SIM102 (of the two only the other is the kernel's)
                if thread == 0:
                    wait_stored()
        part("The end: no block leaves while others may write into its shared memory")
        T.cuda.warp_sync()
        if cluster > 1:
            T.cuda.cluster_sync()
    # fmt: on

    parameters = [parameter for parameter, name in zip(main.params, (*names, "output"), strict=True) if name in shapes]
    function = tirx.PrimFunc(parameters, main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})
