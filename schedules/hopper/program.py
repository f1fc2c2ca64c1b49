"""The kernel that every operator shares: clusters of blocks, each with a producer and its consumers around a ring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm import tirx
from tvm.script import tirx as T

from schedules.hopper.config import WARPGROUP
from schedules.hopper.consumer import Cores
from schedules.hopper.epilogue import Results
from schedules.hopper.geometry import Member, Work
from schedules.hopper.launch import (
    NAMES,
    Maps,
    SharedMemory,
    after_loads,
    before_loads,
    before_products,
    cluster_place,
    tensors_of,
    with_flat,
    with_workspace,
)
from schedules.hopper.producer import Producer
from schedules.hopper.products import multiply_of
from schedules.hopper.turning import FIRST_TURNER, LOADER, turner_of
from schedules.hopper.warm import warm
from schedules.lowering.annotations import TIRX
from schedules.steps.story import part
from schedules.tirx.types import Tensors
from schedules.tirx.values import named

RESIDUAL_WARP = 1  # of the producer's, whose first loads the operands


def program(
    work: Work,
    way_out: Callable[..., Results] = Results,
    prepare: Callable[[Tensors], None] | None = None,
    multiplied_by: Callable[..., Cores] = Cores,
) -> tvm.IRModule:
    """The module with one function "main" that takes ``work.arguments``; tiles are `multiplied_by` and leave by
    `way_out`.

    `prepare` is the body of a kernel before, which fills ``work.workspace``.
    """
    config, fixed = work.config, work
    consumers, cluster = config.consumers, config.cluster
    copied = work.a.copied  # by all of the producer's threads
    added = work.added is not None
    assert config.shares  # the config is legal
    producer_registers, consumer_registers = config.shares
    accumulator = multiply_of(work).accumulator
    stored_by_tma = work.output.by_tma
    turned = work.a.turned is not None
    filled = {argument.name for argument in work.workspace}  # by the kernel before; what that one reads was there
    dependent = bool(filled)

    # fmt: off
    @T.prim_func
    def main(
        data: T.handle, weight: T.handle, bias: T.handle, residual: T.handle,
        alpha: T.handle, beta: T.handle, gamma: T.handle, result: T.handle,
    ) -> None:
        part("Tensor maps: the host describes to TMA where tiles of the operands and of the output lie")
        n = T.int32()  # images, where the problem leaves them open
        work = T.meta_var(fixed.at_run_time(n))
        clusters = T.meta_var(config.launched(work.clusters))
        handles = T.meta_var(dict(zip(NAMES, (data, weight, bias, residual, alpha, beta, gamma, result), strict=True)))
        tensors = T.meta_var(with_workspace(work, tensors_of(work, handles), prepare))
        maps = T.meta_var(Maps.encoded(work, tensors))

        T.device_entry()
        part("The launch: clusters of blocks, each with warpgroups that consume and one that produces")
        views = T.meta_var(with_flat(work, tensors))
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": config.blocks_sm})
        rank = T.cta_id_in_cluster([cluster])
        block = T.cta_id([clusters * cluster])
        group = T.warpgroup_id([consumers + config.beside])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        thread = T.thread_id_in_wg([WARPGROUP])
        part("Shared memory: a ring of stages, room for the output, and barriers that say who may use a stage")
        pool = T.SMEMPool()
        first = T.meta_var(tirx.all(group == consumers, thread == 0))
        memory = T.meta_var(SharedMemory.allocated(work, accumulator, pool, first))
        cores = T.meta_var(multiplied_by(work, pool, first))
        pool.commit()
        cores.begin(group, warp)
        memory.initialise(work, maps, group * WARPGROUP + thread, first)
        T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())  # which set themselves up, and wait
        at = T.meta_var(cluster_place(config, rank))
        if group < consumers:
            part("The consumers: what the first stages need comes into L2 while TMA waits for its maps")
            warm(work, fixed.arguments, tensors, at, T.truncdiv(block, cluster), group * WARPGROUP + thread)
        if not dependent:  # on a kernel of its own, which waits for those before that
            T.evaluate(T.ptx["griddepcontrol.wait"]())

        part("Which tiles are this block's, and where it stands in the ring")
        tile: T.int32
        tile = T.truncdiv(block, cluster)
        stage: T.int32
        stage = 0
        phase: T.int32
        phase = 0
        ring = T.meta_var(cores.ring(memory, at, stage, phase))
        if group >= consumers:
            part("The producer: a warp has TMA fill every stage that is free, tile after tile")
            if producer_registers > 0:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](producer_registers)
            # of the warps that do not multiply
            number = T.meta_var(warp if config.beside == 1 else named("number", (group - consumers) * 4 + warp))
            before_loads(work, number)
            producer = T.meta_var(Producer(work, maps, memory, ring, at, clusters, thread, views))
            if copied:
                if dependent:  # noqa: SIM102 (of the two only the other is the kernel's)
                    if thread == 0:  # what threads copy was there before the kernel before began
                        T.evaluate(T.ptx["griddepcontrol.wait"]())
                producer.run(tile)
            elif number == 0:
                T.cuda.warp_sync()  # its first thread set the barriers up
                if dependent:
                    T.evaluate(T.ptx["griddepcontrol.wait"]())
                producer.run(tile)
                cores.drain(ring)
            if turned:
                part("Pairs of warps turn operand a, of which another has TMA bring boxes of the data as they lie")
                turner = T.meta_var(turner_of(work, memory.turned, maps.a, at, clusters))
                if number == LOADER:
                    if work.a.source.tensor in filled:
                        T.evaluate(T.ptx["griddepcontrol.wait"]())
                    turner.load(tile, partial(work.loads_a, ry=0, rx=0, part=0))
                if number >= FIRST_TURNER:
                    turner.turn(tile, number - FIRST_TURNER, lane)
            if added:
                part("A warp of its own has TMA bring residuals, which wait for nothing but room")
                if number == RESIDUAL_WARP:
                    producer.run_residuals(tile)
            cores.beside_producer(ring, memory, at, clusters, number, tile)
            after_loads(work)
        else:
            part(cores.consumers)
            if producer_registers > 0:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](consumer_registers)
            before_products(config)
            member = T.meta_var(Member(group, 0 if config.ping_pong else group, warp, lane, thread))
            finish = T.meta_var(partial(way_out, work, views, maps.output))
            consumer = T.meta_var(cores.consumer(ring, memory, at, clusters, member, finish))
            consumer.run(tile)
            if stored_by_tma:  # noqa: SIM102 (of the two only the other is the kernel's)
                if thread == 0:
                    T.ptx.cp.async_.bulk.wait_group.read(0)
        part("The end: no block leaves while others may write into its shared memory")
        T.cuda.warp_sync()
        cores.end(group, warp)
    # fmt: on

    taken = {argument.name for argument in fixed.arguments}
    parameters = [parameter for parameter, name in zip(main.params, NAMES, strict=True) if name in taken]
    function = tirx.PrimFunc(parameters, main.body, main.ret_type, main.attrs)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr(TIRX, 1)})
