"""Pooling on a GPU: a thread reads the window under one pixel of some channels, by vectors, and keeps what comes of it
in registers.

Neighbouring threads have neighbouring channels of a group, then neighbouring pixels, whose windows overlap in the
first-level cache.  Nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.space import ProductSpace, axis
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.program import program_of
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.pool2d.definition import PoolProblem, definition
from schedules.steps.story import next_step
from schedules.steps.tiles import bind

MOST_UNROLLED = 16  # taps
WORD = 4  # bytes, of whose maxima CUDA makes a few instructions (`lowering`)


@dataclass(frozen=True)
class DirectConfig(Config):
    lanes: int = 16  # channels of a thread
    threads: int = 128  # of a block

    def check(self, problem: PoolProblem, arch: Arch) -> str | None:
        if self.lanes not in (4, 8, 16):
            return f"lanes={self.lanes} is not 4, 8 or 16"
        if not 1 <= self.threads <= arch.max_threads:
            return f"threads={self.threads} is not 1 to {arch.max_threads}, the most of a block of {arch}"
        return None


def graph(problem: PoolProblem, config: DirectConfig, arch: Arch) -> tirx.PrimFunc:
    return program_of(definition(problem))


def schedule(problem: PoolProblem, config: DirectConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, the epilogue's operands, output."""
    sch = Schedule(graph(problem, config, arch))
    fetched, pooled, tile, output = (sch.get_sblock(name) for name in ("fetched", "pooled", "tile", "output"))
    next_step(sch, "A thread for some channels of one pixel; what it reads and what it makes of it in registers")
    for block in (fetched, pooled, tile):
        sch.set_scope(block, 0, "local")
    *outer, lane, ry, rx = sch.get_loops(pooled)
    lo, lane = sch.split(lane, [None, config.lanes])
    sch.reorder(*outer, lo, ry, rx, lane)
    # of a loop of one, TVM 0.27 forgets at the way out that other threads have no pixel
    every = problem.pixels * problem.extents["go"] * GROUP // config.lanes
    block, thread = sch.split(sch.fuse(*outer, lo), [None, min(config.threads, every)])
    bind(sch, (block, "blockIdx.x"), (thread, "threadIdx.x"))

    next_step(sch, "The window, tap by tap, and the way out: a vector for each")
    sch.compute_at(fetched, rx, preserve_unit_loops=True)
    sch.reverse_compute_at(tile, thread, preserve_unit_loops=True)
    sch.reverse_compute_at(output, thread, preserve_unit_loops=True)
    vectors = [fetched, output]
    if problem.residual:
        residual = sch.cache_read(tile, 1, "local")
        sch.compute_at(residual, thread, preserve_unit_loops=True)
        vectors.append(residual)
    for stage in vectors:
        sch.vectorize(sch.get_loops(stage)[-1])
    if problem.kind == "max":
        lane, word = sch.split(lane, [None, WORD])
        sch.vectorize(word)
    start = sch.decompose_reduction(pooled, ry)
    sch.unroll(rx)
    if problem.kh * problem.kw <= MOST_UNROLLED:
        sch.unroll(ry)
    for loop in (lane, sch.get_loops(start)[-1], sch.get_loops(tile)[-1]):
        sch.unroll(loop)
    return sch.mod


def default(problem: PoolProblem, arch: Arch) -> DirectConfig:
    """Whole vectors, or narrower ones where there are too few for the device's threads."""
    threads = problem.pixels * problem.extents["go"] * GROUP // 16
    few = threads < arch.device.multiprocessors * 512
    return DirectConfig(4 if few else 16)


def space(problem: PoolProblem, arch: Arch) -> ProductSpace[DirectConfig]:
    return ProductSpace(DirectConfig, axis("lanes", (4, 8, 16)), axis("threads", (64, 128, 256)))


SCHEDULE = ScheduleSpec(
    name="direct",
    summary="a thread reads the window under one pixel of some channels by vectors; no shared memory",
    kinds=("cuda", "rocm"),
    config=DirectConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
