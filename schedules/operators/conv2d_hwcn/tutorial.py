"""The TVM tutorial's GPU schedule for HWCN convolution, every constant of it a field.

A block computes a tile of output channels x batch for one pixel.  Each step of the reduction brings `step` input
channels of both operands into shared memory, each thread copies its part of them into registers and adds outer products
to its accumulator.  Virtual threads interleave a thread's sub-tiles so that neighbouring threads read neighbouring
words of shared memory.  Source: the TVM tutorial "How to optimize convolution on GPU".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Pair
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.implicit import textbook
from schedules.definitions.program import program_of
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.steps.simt import VECTORS, TiledConfig
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, bind_grid, cooperative_fetch, inline_if_present, widest_vector


@dataclass(frozen=True)
class TutorialConfig(TiledConfig):
    """Pairs are (output channels, batch); `step` counts input channels.  The defaults are the tutorial's."""

    num_thread: Pair = (8, 8)  # threads of a block: (threadIdx.y, threadIdx.x)
    store: int = 1  # elements of one store of the output; on an H200 scalars leave the main loop 6% faster
    unroll: int = 0  # loops of up to this many iterations in all are unrolled; 0 leaves it to the compiler

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        if self.store not in VECTORS:
            return f"store={self.store} is not 1, 2 or 4 (128 bits are 4 float32)"
        if self.unroll < 0:
            return f"unroll={self.unroll} must not be negative"
        return self.check_tile(arch)


def graph(problem: HwcnProblem, config: TutorialConfig, arch: Arch) -> tirx.PrimFunc:
    """The definition with (co, n) in whole blocks and ci in whole steps.  Schedules inline ``padded`` and ``weights``
    into their fetch, so that only the first load and the last store are predicated."""
    (co, n), ci = config.block, config.step
    return program_of(textbook(problem, {"co": co, "n": n, "ci": ci}))


def schedule(problem: HwcnProblem, config: TutorialConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    sch = Schedule(graph(problem, config, arch))
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")

    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    data_shared, weight_shared = (sch.cache_read(conv, i, "shared") for i in (0, 1))
    data_local, weight_local = (sch.cache_read(conv, i, "local") for i in (0, 1))
    sch.set_scope(conv, 0, "local")
    inline_if_present(sch, "padded", "weights")  # after the reads are cached, so that their tests move into the fetch

    next_step(sch, "Blocks, virtual threads and threads: each thread its outputs, interleaved with its neighbours'")
    y, x, f, n, ry, rx, rc = sch.get_loops(conv)
    (tile_f, tile_n), (threads_f, threads_n), (vthread_f, vthread_n) = config.tile, config.num_thread, config.vthread
    pixel = sch.fuse(y, x)
    block_f, vf, tf, f = sch.split(f, [None, vthread_f, threads_f, tile_f // vthread_f])
    block_n, vn, tn, n = sch.split(n, [None, vthread_n, threads_n, tile_n // vthread_n])
    rco, rci = sch.split(rc, [None, config.step])
    sch.reorder(pixel, block_f, block_n, vf, vn, tf, tn, rco, ry, rx, rci, f, n)
    bind_grid(sch, pixel, block_f, block_n)
    bind(sch, (vf, "vthread.y"), (vn, "vthread.x"), (tf, "threadIdx.y"), (tn, "threadIdx.x"))
    if config.unroll:
        sch.annotate(tn, "pragma_auto_unroll_max_step", config.unroll)
        sch.annotate(tn, "pragma_unroll_explicit", 0)

    next_step(sch, "Where each stage lives: tiles in shared memory, a thread's part of them in registers")
    sch.reverse_compute_at(output, tn, preserve_unit_loops=True)
    for local in (data_local, weight_local):
        sch.compute_at(local, rci, preserve_unit_loops=True)
    for shared in (data_shared, weight_shared):
        sch.compute_at(shared, rx, preserve_unit_loops=True)

    next_step(sch, "All threads fetch both tiles, (ci, n) and (ci, co), in vectors; each stores its own outputs")
    for shared, row in ((data_shared, problem.n), (weight_shared, problem.co)):
        cooperative_fetch(sch, shared, 2, config.num_thread, widest_vector(row, config.vector))
    store = widest_vector(problem.n, widest_vector(tile_n // vthread_n, config.store))
    if store > 1:
        _, lane = sch.split(sch.get_loops(output)[-1], [None, store])
        sch.vectorize(lane)
    sch.decompose_reduction(conv, rco)
    return sch.mod


def default(problem: HwcnProblem, arch: Arch) -> TutorialConfig:
    """The tutorial's constants."""
    return TutorialConfig()


def space(problem: HwcnProblem, arch: Arch) -> Iterator[TutorialConfig]:
    for tile, num_thread, vthread, step, store, unroll in product(
        ((4, 4), (8, 4), (4, 8), (8, 8)),
        ((8, 8), (8, 16), (16, 8), (16, 16)),
        ((1, 1), (2, 2)),
        (4, 8, 16),
        (1, 4),
        (0, 64, 512),
    ):
        yield TutorialConfig(tile, num_thread, vthread, step, 4, store, unroll)


SCHEDULE = ScheduleSpec(
    name="tutorial",
    summary="the tutorial's tiled schedule: shared and local caches, virtual threads, vectorised fetch",
    kinds=("cuda", "rocm"),
    config=TutorialConfig,
    apply=schedule,
    default=default,
    space=space,
    channels_along_rows=True,
    graph=graph,
)
