"""Implicit GEMM on CUDA cores: rows are output channels, columns the pixels of all images, k is (ci, kh, kw).

A block computes a tile of rows x columns.  Each step brings `step` values of k of both operands into shared memory,
where a channel's border, the ends of the problem and the conversion to float32 are dealt with; the loop over the tile
is then plain multiply-adds.  Virtual threads split a thread's tile so that neighbouring threads read neighbouring words
of shared memory.  Source: the TVM tutorial "How to optimize convolution on GPU", on the matrices of implicit GEMM
(Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.definitions.implicit import product as matrix_product
from schedules.operators.conv2d_nchw.definition import NchwProblem, pixel_vector
from schedules.steps.simt import TiledConfig
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, bind_grid, cooperative_fetch, widest_vector

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

PAD = 4  # floats that a row of the filter's tile is lengthened by: a column of it then falls on different banks


@dataclass(frozen=True)
class SimtConfig(TiledConfig):
    """Pairs are (output channels, pixels); `step` counts values of k."""

    unroll: int = 0  # loops of up to this many iterations in all are unrolled; 0 leaves it to the compiler

    @property
    def shared_bytes(self) -> int:
        rows, columns = self.block
        return (-(-rows // 32) * 32 + PAD + columns) * self.step * 4

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        if self.unroll < 0:
            return f"unroll={self.unroll} must not be negative"
        return self.check_tile(arch)


def graph(problem: NchwProblem, config: SimtConfig, arch: Arch) -> tirx.PrimFunc:
    tile = dict(zip(("co", "pixel", "k"), (*config.block, config.step), strict=True))
    return matrix_product(problem, "k pixel", "k co", "co pixel", tile, wide=True, staged=False)


def schedule(problem: NchwProblem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), output (n, co, out_h, out_w)."""
    from tvm.s_tir import Schedule

    p = problem
    sch = Schedule(graph(p, config, arch))
    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")
    weights, columns = (sch.get_sblock(name) for name in ("weights", "columns"))
    for shared in (weights, columns):
        sch.set_scope(shared, 0, "shared")
    weights_local, columns_local = (sch.cache_read(conv, i, "local") for i in (0, 1))
    sch.set_scope(conv, 0, "local")

    next_step(sch, "Blocks, virtual threads and threads: each thread its outputs, interleaved with its neighbours'")
    f, pixel, k = sch.get_loops(conv)
    (tile_f, tile_p), (threads_f, threads_p), (vthread_f, vthread_p) = config.tile, config.num_thread, config.vthread
    block_f, vf, tf, f = sch.split(f, [None, vthread_f, threads_f, tile_f // vthread_f])
    block_p, vp, tp, pixel = sch.split(pixel, [None, vthread_p, threads_p, tile_p // vthread_p])
    ko, ki = sch.split(k, [None, config.step])
    sch.reorder(block_f, block_p, vf, vp, tf, tp, ko, ki, f, pixel)
    bind_grid(sch, block_f, block_p)
    bind(sch, (vf, "vthread.y"), (vp, "vthread.x"), (tf, "threadIdx.y"), (tp, "threadIdx.x"))
    if config.unroll:
        sch.annotate(tp, "pragma_auto_unroll_max_step", config.unroll)
        sch.annotate(tp, "pragma_unroll_explicit", 0)

    next_step(sch, "Where each stage lives: tiles in shared memory, a thread's part of them in registers")
    sch.reverse_compute_at(output, tp, preserve_unit_loops=True)
    for local in (weights_local, columns_local):
        sch.compute_at(local, ki, preserve_unit_loops=True)
    for shared in (weights, columns):
        sch.compute_at(shared, ko, preserve_unit_loops=True)

    # pixels along x, filters along k, which is how each lies in memory
    next_step(sch, "All threads fetch both tiles as they lie in memory, and each stores its own outputs")
    cooperative_fetch(sch, columns, 2, config.num_thread, pixel_vector(p, config.vector))
    sch.reorder(*reversed(sch.get_loops(weights)[-2:]))
    sch.storage_align(weights, 0, 0, 32, PAD)
    cooperative_fetch(sch, weights, 2, config.num_thread, 1)
    store = widest_vector(p.out_w, min(config.vector, widest_vector(tile_p // vthread_p, 4)))
    if store > 1:
        _, lane = sch.split(sch.get_loops(output)[-1], [None, store])
        sch.vectorize(lane)
    sch.decompose_reduction(conv, ko)
    return sch.mod


def default(problem: NchwProblem, arch: Arch) -> SimtConfig:
    """Tiles of 128 x 128; lower ones for few channels, narrower ones where 128 would leave multiprocessors idle."""
    rows, columns = 128, 128
    while rows > 8 and rows // 2 >= problem.co:
        rows //= 2
    blocks = -(-problem.co // rows) * -(-problem.pixels // columns)
    if rows > 64 and blocks < 256:
        rows = 64
    if blocks < 128 and rows <= 64:
        columns = 64
    tile = (min(8, rows // 4), 8 if rows >= 64 else 4)
    return SimtConfig(
        tile=tile,
        num_thread=(rows // tile[0], columns // tile[1]),
        vthread=(max(1, tile[0] // 4), tile[1] // 4),
    )


def space(problem: NchwProblem, arch: Arch) -> Iterator[SimtConfig]:
    for tile, num_thread, split, step, vector, unroll in product(
        ((1, 4), (2, 4), (4, 4), (4, 8), (8, 4), (8, 8)),
        ((2, 64), (4, 32), (4, 64), (8, 8), (8, 16), (8, 32), (16, 8), (16, 16)),
        (False, True),
        (4, 8, 16),
        (1, 4),
        (0, 64, 512),
    ):
        vthread = (max(1, tile[0] // 4), max(1, tile[1] // 4)) if split else (1, 1)
        if split and vthread == (1, 1):
            continue
        if vector > 1 and pixel_vector(problem, vector) == 1:
            continue
        yield SimtConfig(tile, num_thread, vthread, step, vector, unroll)


SCHEDULE = ScheduleSpec(
    name="simt",
    summary="implicit GEMM on CUDA cores: channels x pixels, zero fill on fetch, virtual threads",
    kinds=("cuda", "rocm"),
    config=SimtConfig,
    apply=schedule,
    default=default,
    space=space,
    channels_along_rows=True,
    graph=graph,
)
