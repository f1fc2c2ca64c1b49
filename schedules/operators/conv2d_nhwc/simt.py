"""NHWC convolution on CUDA cores: an implicit product of pixels x output channels.

A block computes a tile of pixels x channels.  Each step brings `step` input channels of one tap into shared memory,
turned so that k lies outside: a thread then reads its pixels and its channels as vectors.  Borders and the ends of the
problem are dealt with in that copy.  Source: the TVM tutorial "How to optimize convolution on GPU", on the matrices of
implicit GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.operators.conv2d_nhwc.definition import NhwcProblem, matrix_product
from schedules.steps.simt import TiledConfig
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, cooperative_fetch, widest_vector

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

PAD = 4  # elements that a row of shared memory is lengthened by: what one load scatters falls on different banks


@dataclass(frozen=True)
class SimtConfig(TiledConfig):
    """Pairs are (pixels, output channels); `step` counts input channels."""

    @property
    def shared_bytes(self) -> int:
        return sum(-(-side // 32) * 32 + PAD for side in self.block) * self.step * 4

    def check(self, problem: NhwcProblem, arch: Arch) -> str | None:
        reason = self.check_tile(arch)
        load = widest_vector(problem.ci, self.vector)
        if reason is None and self.step % load:
            return f"step={self.step} is not a multiple of the {load} channels that a load brings"
        return reason


def graph(problem: NhwcProblem, config: SimtConfig, arch: Arch) -> tirx.PrimFunc:
    return matrix_product(problem, (*config.block, config.step), staged=False)


def schedule(problem: NhwcProblem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, h, w, ci), filter (co, kh, kw, ci), the epilogue's terms, output (n, out_h,
    out_w, co)."""
    from tvm.s_tir import Schedule

    sch = Schedule(graph(problem, config, arch))
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")
    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    operands = [sch.get_sblock(name) for name in ("columns", "weights")]
    for shared in operands:
        sch.set_scope(shared, 0, "shared")
    local = [sch.cache_read(conv, i, "local") for i in (0, 1)]
    sch.set_scope(conv, 0, "local")

    next_step(sch, "Blocks, virtual threads and threads: each thread its outputs, interleaved with its neighbours'")
    pixel, f, ry, rx, rc = sch.get_loops(conv)
    (tile_p, tile_f), (threads_p, threads_f), (vthread_p, vthread_f) = config.tile, config.num_thread, config.vthread
    block_p, vp, tp, pixel = sch.split(pixel, [None, vthread_p, threads_p, tile_p // vthread_p])
    block_f, vf, tf, f = sch.split(f, [None, vthread_f, threads_f, tile_f // vthread_f])
    rco, rci = sch.split(rc, [None, config.step])
    sch.reorder(block_p, block_f, vp, vf, tp, tf, ry, rx, rco, rci, pixel, f)
    bind(sch, (sch.fuse(block_p, block_f), "blockIdx.x"))
    bind(sch, (vp, "vthread.y"), (vf, "vthread.x"), (tp, "threadIdx.y"), (tf, "threadIdx.x"))

    next_step(sch, "Where each stage lives: tiles in shared memory, a thread's part of them in registers")
    sch.reverse_compute_at(output, tf, preserve_unit_loops=True)
    for stage in local:
        sch.compute_at(stage, rci, preserve_unit_loops=True)
    for shared in operands:
        sch.compute_at(shared, rco, preserve_unit_loops=True)

    next_step(sch, "All threads fetch both tiles in vectors along the channels, and store them with k outside")
    for shared in operands:
        sch.transform_layout(shared, ("write", 0), lambda ry, rx, row, c: [ry, rx, c, row])
        sch.storage_align(shared, 0, -2, 32, PAD)
        cooperative_fetch(sch, shared, 2, config.num_thread, widest_vector(problem.ci, config.vector))
    store = widest_vector(problem.co, widest_vector(tile_f // vthread_f, config.vector))
    if store > 1:
        _, lane = sch.split(sch.get_loops(output)[-1], [None, store])
        sch.vectorize(lane)
    sch.decompose_reduction(conv, ry)
    return sch.mod


def default(problem: NhwcProblem, arch: Arch) -> SimtConfig:
    """Tiles of 128 x 128; narrower for few channels, lower where they would leave multiprocessors idle."""
    rows, columns = 128, 128
    while columns > 16 and columns // 2 >= problem.co:
        columns //= 2
    while rows > 32 and -(-problem.pixels // rows) * -(-problem.co // columns) < 128:
        rows //= 2
    tile = (rows // 16, columns // 16)
    return SimtConfig(tile=tile, vthread=(max(1, tile[0] // 4), max(1, tile[1] // 4)))


def space(problem: NhwcProblem, arch: Arch) -> Iterator[SimtConfig]:
    for tile, num_thread, split, step, vector in product(
        ((4, 1), (4, 2), (4, 4), (4, 8), (8, 4), (8, 8)),
        ((8, 8), (8, 16), (8, 32), (16, 8), (16, 16), (32, 8)),
        (False, True),
        (4, 8, 16),
        (1, 4),
    ):
        vthread = (max(1, tile[0] // 4), max(1, tile[1] // 4)) if split else (1, 1)
        if not split or vthread != (1, 1):
            yield SimtConfig(tile, num_thread, vthread, step, vector)


SCHEDULE = ScheduleSpec(
    name="simt",
    summary="implicit GEMM on CUDA cores: pixels x channels, zero fill on fetch, virtual threads",
    kinds=("cuda", "rocm"),
    config=SimtConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
