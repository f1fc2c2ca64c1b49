"""What a Hopper kernel is launched with: its tensors and their maps, a block's shared memory and its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from schedules.hopper.config import WARPGROUP, HopperConfig
from schedules.hopper.exchange import Exchange
from schedules.hopper.geometry import ClusterPlace, Operand, Work
from schedules.hopper.images import Images
from schedules.hopper.lines import Lines
from schedules.hopper.residual import Arrivals
from schedules.hopper.ring import FILLS, readers, writers
from schedules.hopper.shared import UNIT, Columns, Runs, Slots, TensorMap
from schedules.hopper.spans import Spans
from schedules.hopper.turning import Turned
from schedules.steps.story import inside_part
from schedules.tirx.arguments import flattened, matched
from schedules.tirx.cluster import say_begun, wait_until_begun
from schedules.tirx.types import Buffer, Expr, Handle, Tensors, Variable
from schedules.tirx.values import named

_CLEAR = """
__device__ __forceinline__ void hopper_clear(void* at) { *(uint4*)at = make_uint4(0, 0, 0, 0); }
"""
_BLOCK = 0  # named barrier of a whole block
NAMES = ("data", "filter", "bias", "residual", "alpha", "beta", "gamma", "output")  # of the arguments, in their order


def tensors_of(work: Work, handles: Mapping[str, Handle]) -> Tensors:
    """The buffers of the work's arguments, which have `handles` by name."""
    return matched(work.arguments, [handles[argument.name] for argument in work.arguments])


def with_workspace(work: Work, tensors: Tensors, prepare: Callable[[Tensors], None] | None) -> Tensors:
    """`tensors` and those of the function's own, after the kernel that fills them, whose body is `prepare`."""
    if not work.workspace:
        return tensors
    assert prepare is not None
    own = {}
    for argument in work.workspace:
        own[argument.name] = T.alloc_buffer(argument.shape, argument.dtype, scope="global")
        IRBuilder.name(argument.name, own[argument.name])
    tensors = {**tensors, **own}
    title = "A kernel before: what the product takes in another layout is copied into workspace"
    with inside_part(title), T.attr({"tirx.device_entry": True}):
        T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())  # the product, which waits for what it loads
        prepare(tensors)
    return tensors


def with_flat(work: Work, tensors: Tensors) -> Tensors:
    """`tensors`, and as "flat ..." the elements without a shape of those that the epilogue reads or writes one by one,
    as a problem with flattened pixels counts them."""
    names = [] if work.added else [term.name for term in work.epilogue.of_axis("element")]
    if isinstance(work.a.source, Lines | Spans | Images):
        names.append(work.a.source.tensor)
    if not isinstance(work.output.target, TensorMap):
        names.append("output")
    arguments = [argument for argument in work.arguments if argument.name in names]
    return {**tensors, **{f"flat {name}": view for name, view in flattened(arguments, tensors).items()}}


@dataclass(frozen=True)
class Maps:
    """The tensor maps of the operands and of the residual that TMA brings, and of the output if it leaves by TMA."""

    a: Variable | None
    b: Variable
    residual: Variable | None
    output: Variable | None

    @classmethod
    def encoded(cls, work: Work, tensors: Tensors) -> Maps:
        """As the host encodes them."""
        return cls(
            _encode("a_map", work.a.tensor_map, tensors),
            _encode("b_map", work.b.tensor_map, tensors),
            _encode("residual_map", work.added.source, tensors) if work.added else None,
            _encode("output_map", work.output.target, tensors),
        )

    def fetch(self, by: Expr) -> None:
        """Have the thread for which `by` is true fetch them."""
        with T.If(by), T.Then():
            for tensor_map in (self.a, self.b, self.residual, self.output):
                if tensor_map is not None:
                    T.evaluate(T.ptx.prefetch.tensormap(T.address_of(tensor_map)))


def _encode(name: str, target: TensorMap | Runs | Slots | Columns | None, tensors: Tensors) -> Variable | None:
    if not isinstance(target, TensorMap):
        return None
    variable = named(name, T.tvm_stack_alloca("tensormap", 1))
    data = tensors[target.tensor].data
    call = "runtime.cuTensorMapEncodeTiled"
    T.evaluate(T.call_packed(call, variable, target.dtype, target.rank, data, *target.words()))
    return variable


@dataclass(frozen=True)
class SharedMemory:
    """The shared memory of a block, in this order; what a kernel does not need is None.

    `filters` is where operand b comes to: the stages, or memory of its own if it stays.  `turns` are mbarriers of
    consumers that take turns: whether all stages before a consumer's tile have been multiplied.
    """

    stages: Buffer
    filters: Buffer
    staging: Buffer | None
    full: TMABar
    empty: MBarrier
    exchange: Exchange | None
    turns: MBarrier | None
    residual: Arrivals | None
    turned: Turned | None

    @classmethod
    def allocated(cls, work: Work, accumulator: str, pool: T.SMEMPool, leader: Expr) -> SharedMemory:
        """The memory for `work` from `pool`; sums are `accumulator`, `leader` is true for the thread that
        initialises barriers."""
        config = work.config

        def tiles(name: str, nbytes: int) -> Buffer:
            memory = pool.alloc((nbytes,), "uint8", align=1024)
            IRBuilder.name(name, memory)
            return memory

        stages = tiles("stages", config.num_stages * work.stage_bytes)
        filters = tiles("filters", work.stationary_bytes) if config.stationary else stages
        turned = work.a.turned
        boxes = tiles("boxes", turned.arriving_slots * turned.arriving_bytes) if turned else None
        rows = tiles("turned", turned.slots * turned.slot_bytes) if turned else None
        staging = work.output.staging.nbytes
        results = tiles("staging", config.consumers * staging) if staging else None
        added = tiles("residuals", config.consumers * work.added.nbytes) if work.added else None
        memory = cls(
            stages,
            filters,
            results,
            TMABar(pool, config.num_stages, leader=leader),
            MBarrier(pool, config.num_stages, leader=leader),
            Exchange(work, accumulator, pool, leader) if config.split_k > 1 else None,
            MBarrier(pool, config.consumers, leader=leader) if config.ping_pong else None,
            Arrivals(work.added, added, config.consumers, pool, leader) if work.added and added is not None else None,
            Turned(turned, boxes, rows, config.parts, pool, leader) if turned else None,
        )
        return memory

    def initialise(self, work: Work, maps: Maps, thread: Expr, by: Expr) -> None:
        """Have the thread for which `by` is true fetch the tensor maps and set the barriers up, for this block's
        threads, of which this is number `thread`, for TMA and for the blocks of its cluster, which `before_loads` and
        `before_products` wait for; and write zeros where no load brings any."""
        config = work.config
        maps.fetch(by)
        for operand, start in ((work.a, 0), (work.b, work.b_start)):
            if operand.spare_k:
                self._clear(work, operand, start, thread)
        self.full.init(FILLS + (work.a.source.arrivals if isinstance(work.a.source, Lines | Spans) else 0))
        self.empty.init(readers(config))
        if self.turns:
            self.turns.init(WARPGROUP)
        if self.exchange:
            self.exchange.init()
        if self.residual:
            self.residual.init()
        if self.turned:
            self.turned.init()
        T.evaluate(T.ptx.fence.mbarrier_init.release.cluster())
        T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
        if config.cluster > 1:
            say_begun()

    def _clear(self, work: Work, operand: Operand, start: int, thread: Expr) -> None:
        """Write the zeros behind the reduction of an operand `start` bytes into every stage."""
        config, tile = work.config, operand.tile
        each = operand.spare_k * tile.swizzle // UNIT  # of a slab
        of_stage = tile.nbytes // tile.slab * each
        with T.serial(-(-config.num_stages * of_stage // config.threads)) as turn:
            at = named("at", turn * config.threads + thread)
            with T.If(at < config.num_stages * of_stage), T.Then():
                stage, slab = T.truncdiv(at, of_stage), T.truncdiv(T.truncmod(at, of_stage), each)
                begin = stage * work.stage_bytes + slab * tile.slab + T.truncmod(at, each) * UNIT
                target = self.stages.ptr_to([begin + (start + tile.slab - operand.spare_k * tile.swizzle)])
                T.evaluate(T.cuda.func_call("hopper_clear", target, source_code=_CLEAR))


def before_loads(work: Work, warp: Expr) -> None:
    """The wait of the producer's `warp` before its first load: for the blocks that it writes into, if there are others;
    the first, which issues TMA's loads, has set this block up, and does not wait for itself, but others that copy
    lines, multiply or have residuals loaded do.
    """
    config = work.config
    if _all_wait(work):
        before_products(config)
    elif config.cluster > 1:
        if writers(config) > 1:
            wait_until_begun()
    elif work.added:
        with T.If(warp == 0):
            with T.Then():
                arrive_for_block(config)
            with T.Else():
                wait_for_block(config)
    else:
        arrive_for_block(config)


def after_loads(work: Work) -> None:
    """The same behind its last load, where only others wrote into other blocks."""
    config = work.config
    T.evaluate(T.cuda.warp_sync())
    if config.cluster > 1 and writers(config) == 1 and not _all_wait(work):
        wait_until_begun()


def _all_wait(work: Work) -> bool:
    """Whether all warps of the producer wait for the block, and for those of its cluster, before its first load."""
    config = work.config
    alone = config.cluster > 1 and writers(config) == 1  # in a cluster, but not writing into its other blocks
    by_threads = work.a.copied or work.a.turned is not None
    return by_threads or config.multiplies_apart or (work.added is not None and alone)


def before_products(config: HopperConfig) -> None:
    """The consumers' wait for the barriers of their block, and of the others of their cluster; and for what another
    warp of the block wrote, if one multiplies for them."""
    if config.cluster > 1:
        wait_until_begun()
    if config.cluster == 1 or config.multiplies_apart:
        wait_for_block(config)


def arrive_for_block(config: HopperConfig) -> None:
    """Let those who wait for all threads of the block not wait for this one."""
    T.evaluate(T.ptx.bar.arrive(T.uint32(_BLOCK), T.uint32(config.threads)))


def wait_for_block(config: HopperConfig) -> None:
    """Wait for all threads of the block."""
    T.evaluate(T.ptx.bar.sync(T.uint32(_BLOCK), T.uint32(config.threads)))


def cluster_place(config: HopperConfig, rank: Expr) -> ClusterPlace:
    """The place of block number `rank` of its cluster."""
    each, n = config.cluster_m * config.cluster_n, config.cluster_n
    split = config.split_k > 1
    rank_k = named("rank_k", T.truncdiv(rank, each)) if split else 0
    rank_mn = named("rank_mn", T.truncmod(rank, each)) if split else rank
    rank_m = named("rank_m", T.truncdiv(rank_mn, n)) if config.cluster_m > 1 else 0
    rank_n = named("rank_n", T.truncmod(rank_mn, n)) if n > 1 else 0
    return ClusterPlace(rank_m, rank_n, rank_k, rank_mn, rank_k * each)
