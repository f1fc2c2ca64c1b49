"""Implicit matrix products on CUDA cores, shared by the `simt` of NCHW and NHWC data, and their config.

A block computes a tile of channels x pixels.  Each step brings `step` values of the reduction of both operands into
shared memory, where the images' borders, the ends of the problem and the conversion to float32 are dealt with; the loop
over the tile is then plain multiply-adds.  Virtual threads split a thread's tile so that neighbouring threads read
neighbouring words of shared memory.  A step is channels of one tap, all taps of these channels one after the other; of
few channels it is values of (ci, kh, kw) as one.  Sources: the TVM tutorial "How to optimize convolution on GPU";
Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, for the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from schedules.core.arch import Arch
from schedules.core.problem import Config, Conv2dProblem, Pair
from schedules.core.space import ProductSpace, Words
from schedules.core.space import axis as values_of
from schedules.core.tvm import Schedule, tvm
from schedules.lowering.annotations import AHEAD, ASYNC, PIPELINE, SWIZZLE, TILE_SUMS
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, bind_grid, cooperative_fetch, widest_vector

BANK_BYTES = 128  # over which rows in shared memory are staggered
VECTORS = (1, 2, 4)  # elements of one access
STEPS = (4, 8, 16)  # that are tried
MOST_PARTS = 32  # of a reduction
SMALL, BUSY = 32, 4  # a tile's side, and how many such of a multiprocessor need no parts


@dataclass(frozen=True)
class TiledConfig(Config):
    """A block's tile of the output as threads x outputs of a thread.  Pairs are (rows, columns) of the tile; what these
    are is the operator's to say."""

    tile: Pair = (8, 8)  # outputs of a thread
    num_thread: Pair = (16, 16)  # threads of a block: (threadIdx.y, threadIdx.x)
    vthread: Pair = (2, 2)  # sub-tiles a thread's outputs are split into
    step: int = 8  # values of the reduction in shared memory at a time
    vector: int = 4  # elements of one global load, where the layout allows it

    @property
    def block(self) -> Pair:
        return self.tile[0] * self.num_thread[0], self.tile[1] * self.num_thread[1]

    @property
    def threads(self) -> int:
        return self.num_thread[0] * self.num_thread[1]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of both operands' tiles, in float32."""
        return sum(self.block) * self.step * 4

    def registers(self) -> int:
        """An estimate for each thread: accumulator, both operands, and addressing."""
        return self.tile[0] * self.tile[1] + sum(self.tile) + 40

    def check_tile(self, arch: Arch) -> str | None:
        """Why the tile is illegal on `arch`, whatever the problem."""
        for name in ("tile", "num_thread", "vthread"):
            if min(getattr(self, name)) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        for axis in (0, 1):
            if self.tile[axis] % self.vthread[axis]:
                return f"tile={self.tile[axis]} is not a multiple of vthread={self.vthread[axis]}"
        if self.step < 1:
            return f"step={self.step} must be at least 1"
        if self.vector not in VECTORS:
            return f"vector={self.vector} is not 1, 2 or 4 (128 bits are 4 float32)"
        if self.threads > arch.max_threads:
            return f"num_thread={self.num_thread} makes blocks of {self.threads}, {arch} allows {arch.max_threads}"
        if self.shared_bytes > arch.shared_static:
            return f"step={self.step} needs {self.shared_bytes} bytes of shared memory, {arch} has {arch.shared_static}"
        if self.registers() > arch.registers_thread:
            return f"tile={self.tile} needs about {self.registers()} registers, {arch} has {arch.registers_thread}"
        return None


@dataclass(frozen=True)
class SimtConfig(TiledConfig):
    """Of an implicit matrix product whose operands lie in shared memory with the reduction outside."""

    stages: int = 1  # tiles in shared memory at once: with 2 the next one is on its way through registers
    ahead: bool = False  # with 2 stages, operands are loaded into registers before those in use are multiplied
    unroll: int = 0  # loops of up to this many iterations in all are unrolled; 0 leaves it to the compiler
    split_k: int = 1  # blocks of a tile, each of a part of the channels; if several, another kernel adds their sums up

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes * self.stages

    def registers(self) -> int:
        fetched = -(-sum(self.block) * self.step // self.threads) if self.stages > 1 else 0
        return super().registers() + fetched + (sum(self.tile) if self.ahead else 0)

    def check(self, problem: Conv2dProblem, arch: Arch) -> str | None:
        if self.unroll < 0:
            return f"unroll={self.unroll} must not be negative"
        if self.stages not in (1, 2):
            return f"stages={self.stages} is not 1, or 2 with the next tile in registers"
        if self.ahead and (self.stages == 1 or self.step % 2):
            return f"ahead=true needs stages=2 and an even step, not stages={self.stages} and step={self.step}"
        return self.check_tile(arch) or self._check_parts(problem)

    def _check_parts(self, problem: Conv2dProblem) -> str | None:
        channels = problem.ci if self.by_taps(problem) else problem.ci * problem.kh * problem.kw
        if self.split_k != 1 and not 1 < self.split_k <= min(MOST_PARTS, -(-channels // self.step)):
            return f"split_k={self.split_k} is not 1 to {MOST_PARTS}, each of step={self.step} or more of {channels}"
        if self.split_k > 1 and problem.n_from:
            return f"split_k={self.split_k} keeps sums of a batch that is known, not n_from={problem.n_from}; give 1"
        return None

    def by_taps(self, problem: Conv2dProblem) -> bool:
        """Whether a step is channels of one tap, not values of (ci, kh, kw) as one: not if much of it would be idle."""
        return not joined(problem, self.step)

    def product(self, problem: Conv2dProblem, conv: str) -> dict[str, Any]:
        """What `definitions.implicit.product` takes for ``conv`` over these axes, "pixel co" or "co pixel"."""
        reduced = "kh kw ci" if self.by_taps(problem) else "k"
        tile = {**dict(zip(conv.split(), self.block, strict=True)), reduced.split()[-1]: self.step}
        forms = dict(columns=f"{reduced} pixel", weights=f"{reduced} co", conv=conv)
        if self.split_k > 1:
            forms = {name: f"part {axes}" for name, axes in forms.items()}
        return dict(forms, tile=tile, wide=True, staged=False, parts=self.split_k)


def joined(problem: Conv2dProblem, step: Any) -> Any:
    """Whether a step of `step` is of values of (ci, kh, kw) as one: where much of one tap's would be idle."""
    return -(-problem.ci // step) * step > 1.25 * problem.ci


def schedule_tiles(
    sch: Schedule,
    config: SimtConfig,
    along: Mapping[str, tuple[bool, int]],
    store: int,
    output: str = "output",
    batch: int = 0,
    part: int = 0,
) -> tvm.IRModule:
    """Schedule the product that `SimtConfig.product` describes, or `batch` axes of products, whose sums leave by
    `output`; with `part`, so many steps are summed apart, and then added to the sums.

    `along` says of ``columns`` and ``weights``, that with the rows first, whether neighbouring threads fetch neighbours
    along the reduction, and of how many elements a load is; `store` of how many a store may be.
    """
    if config.split_k > 1:
        next_step(sch, "A kernel after the product adds up the sums of all parts and finishes them")
        sch.compute_inline(sch.get_sblock("summed"))
        last = sch.get_sblock(output)
        lanes = widest_vector(store, config.vector)
        block, y, x, lane = sch.split(sch.fuse(*sch.get_loops(last)), [None, *config.num_thread, lanes])
        bind(sch, (block, "blockIdx.x"), (y, "threadIdx.y"), (x, "threadIdx.x"))
        sch.vectorize(lane)
        output, store, batch = "partial", config.block[1], batch + 1
    conv, out = sch.get_sblock("conv"), sch.get_sblock(output)
    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    shared = {name: sch.get_sblock(name) for name in along}
    for block in shared.values():
        sch.set_scope(block, 0, "shared")
    local = [sch.cache_read(conv, i, "local") for i in (0, 1)]
    sch.set_scope(conv, 0, "local")

    next_step(sch, "Blocks, virtual threads and threads: each thread its outputs, interleaved with its neighbours'")
    batches, loops = sch.get_loops(conv)[:batch], sch.get_loops(conv)[batch:]
    sides = [
        sch.split(loop, [None, vthread, threads, tile // vthread])
        for loop, tile, threads, vthread in zip(loops, config.tile, config.num_thread, config.vthread, strict=False)
    ]
    *taps, k = loops[2:]
    ko, ki = sch.split(k, [None, config.step])
    sch.reorder(*(side[part] for part in range(3) for side in sides), ko, *taps, ki, *(side[3] for side in sides))
    bind_grid(sch, *([sch.fuse(*batches)] if batch else []), *(side[0] for side in sides))
    bind(
        sch,
        *(
            (side[part], f"{kind}.{axis}")
            for part, kind in ((1, "vthread"), (2, "threadIdx"))
            for side, axis in zip(sides, "yx", strict=True)
        ),
    )
    thread = sides[1][2]
    if config.unroll:
        sch.annotate(thread, "pragma_auto_unroll_max_step", config.unroll)
        sch.annotate(thread, "pragma_unroll_explicit", 0)

    next_step(sch, "Where each stage lives: tiles in shared memory, a thread's part of them in registers")
    sch.reverse_compute_at(out, thread, preserve_unit_loops=True)
    for block in local:
        sch.compute_at(block, ki, preserve_unit_loops=True)
    for block in shared.values():
        sch.compute_at(block, [ko, *taps][-1], preserve_unit_loops=True)

    next_step(sch, "All threads fetch both tiles as they lie in memory, and each stores its own outputs")
    for block, (along_k, vector), side in zip(shared.values(), along.values(), config.block, strict=True):
        if along_k:
            sch.reorder(*reversed(sch.get_loops(block)[-2:]))
            if side % VECTORS[-1] == 0:  # rows are whole 128-bit vectors
                sch.annotate(block, SWIZZLE, BANK_BYTES)
        cooperative_fetch(sch, block, 2, config.num_thread, vector)
    store = widest_vector(store, widest_vector(config.tile[1] // config.vthread[1], config.vector))
    if store > 1:
        _, lane = sch.split(sch.get_loops(out)[-1], [None, store])
        sch.vectorize(lane)
    sch.decompose_reduction(conv, ko)
    if config.stages > 1:
        next_step(sch, "Pipeline: the next tiles are on their way through registers while these are multiplied")
        settings = ((PIPELINE, config.stages), (ASYNC, 0), (AHEAD, int(config.ahead)), (TILE_SUMS, part))
        for annotation, value in settings:
            sch.annotate(ko, annotation, value)
    return sch.mod


# a thread's tile and a block's threads, in the order of preference
SHAPES: tuple[tuple[Pair, Pair], ...] = (
    ((8, 8), (16, 16)),
    ((8, 8), (16, 8)),
    ((8, 8), (8, 16)),
    ((8, 4), (8, 16)),
    ((4, 8), (16, 8)),
    ((8, 8), (8, 8)),
    ((4, 4), (16, 16)),
    ((4, 4), (8, 16)),
    ((4, 4), (16, 8)),
    ((4, 4), (8, 8)),
    ((8, 2), (16, 8)),
    ((2, 8), (8, 16)),
    ((2, 4), (4, 32)),
    ((4, 2), (32, 4)),
)
# of the estimate below, fitted to 64 trials of eight convolutions of NHWC data in float32 on an H200: its choice is 5%
# slower than the best of some 50 configs on average, 14% at most; on 26 others of both layouts 8%, 41% at most
WARPS = 12.0  # of a multiprocessor that hide most of each other's waiting
WAITING = 0.3  # the exponent by which fewer do
LOADED = 0.25  # what an operand of a thread costs, in multiply-adds
FETCHED = 16.0  # and an element that a thread fetches
REST = 24.0  # and what else it does for each value of the reduction


# microseconds until the kernel that adds parts starts, and bytes of them that are written or read in a nanosecond
STARTED, COPIED = 2.0, 2500.0
LANES = 128  # multiply-adds of a multiprocessor in a clock
CLOCK = 1700.0  # clocks of a microsecond


def default(problem: Conv2dProblem, arch: Arch, sides: Pair, batch: int = 1) -> SimtConfig:
    """For a `batch` of products of `sides`: the tile, and of one product the parts, with the least estimated time on
    the busiest multiprocessor."""
    step = 16 if SimtConfig(step=16).by_taps(problem) else 8
    stages = 2 if arch.kind == "cuda" else 1  # LLVM leaves what is on its way to registers in scratch on gfx1100
    summed = problem.ci * (1 if batch > 1 else problem.kh * problem.kw)
    configs = [_shaped(tile, threads, step, stages) for tile, threads in SHAPES]
    if batch == 1:
        more = [replace(config, split_k=parts) for parts in splits(problem, arch) for config in configs if parts > 1]
        configs += [config for config in more if config.check(problem, arch) is None]
    return min(configs, key=lambda config: microseconds(config, arch, sides, batch, summed))


def microseconds(config: SimtConfig, arch: Arch, sides: Pair, batch: int, summed: int) -> float:
    """About how long a `batch` of products of `sides` takes, each a sum of `summed`: as long as the busiest
    multiprocessor."""
    blocks = math.prod(-(-side // block) for side, block in zip(sides, config.block, strict=True))
    busiest = -(-blocks * batch * config.split_k // arch.device.multiprocessors)
    room = min(arch.registers_sm // config.registers(), arch.threads_sm) // config.threads
    warps = min(busiest, max(1, room)) * config.threads / arch.wave
    each = math.prod(config.tile) + overhead(config)
    clocks = busiest * config.threads * each / min(1, warps / WARPS) ** WAITING / LANES
    adding = STARTED + 8 * config.split_k * math.prod(sides) / COPIED / 1000 if config.split_k > 1 else 0.0
    return clocks * summed / config.split_k / CLOCK + adding


def overhead(config: TiledConfig) -> float:
    """What a thread does for each value of the reduction beside its multiply-adds, in those."""
    return LOADED * sum(config.tile) + FETCHED * sum(config.block) / config.threads + REST


def splits(problem: Conv2dProblem, arch: Arch) -> tuple[int, ...]:
    """Parts of the reduction that are worth trying: several where small tiles leave multiprocessors idle."""
    p = problem
    tiles = -(-p.pixels // SMALL) * -(-p.co // SMALL)
    if p.n_from or tiles >= BUSY * arch.device.multiprocessors:
        return (1,)
    steps = -(-p.ci // STEPS[-1]) if SimtConfig(step=STEPS[-1]).by_taps(p) else -(-p.ci * p.kh * p.kw // STEPS[-1])
    return tuple(2**i for i in range(min(MOST_PARTS, steps).bit_length()))


def _shaped(tile: Pair, num_thread: Pair, step: int, stages: int) -> SimtConfig:
    vthread = (max(1, tile[0] // 4), max(1, tile[1] // 4))
    return SimtConfig(tile, num_thread, vthread, step, stages=stages)


@lru_cache
def _tiles(arch: Arch) -> tuple[Words, ...]:
    """Fields of every tile and way through the reduction that is legal on `arch`."""
    found: list[dict[str, Any]] = []
    tiles = ((1, 4), (4, 1), (2, 4), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8))
    threads = ((2, 64), (4, 32), (4, 64), (8, 8), (8, 16), (8, 32), (16, 8), (16, 16), (32, 8))
    ways = (dict(stages=1), dict(stages=2), dict(stages=2, ahead=True))
    for tile, num_thread, step, way in product(tiles, threads, STEPS, ways):
        for vthread in dict.fromkeys(((1, 1), (max(1, tile[0] // 4), max(1, tile[1] // 4)))):
            found.append(dict(tile=tile, num_thread=num_thread, vthread=vthread, step=step, **way))
    return tuple(words for words in found if SimtConfig(**words).check_tile(arch) is None)


def space(problem: Conv2dProblem, arch: Arch, vectors: Sequence[int] = (1, 4)) -> ProductSpace[SimtConfig]:
    """What a search tries."""
    return ProductSpace(
        SimtConfig,
        _tiles(arch),
        values_of("vector", vectors),
        values_of("unroll", (0, 64)),
        values_of("split_k", splits(problem, arch)),
    )
