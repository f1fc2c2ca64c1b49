"""Pooling on the CPU: a group's channels in vector lanes, a parallel task for some rows of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.program import program_of
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.pool2d.definition import PoolProblem, definition
from schedules.steps.story import next_step


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 32  # channels in a vector
    rows: int = 4  # of a task

    def check(self, problem: PoolProblem, arch: Arch) -> str | None:
        if self.vector not in (4, 8, 16, 32):
            return f"vector={self.vector} is not 4, 8, 16 or 32"
        if self.rows < 1:
            return f"rows={self.rows} must be at least 1"
        return None


def graph(problem: PoolProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    return program_of(definition(problem))


def schedule(problem: PoolProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, the epilogue's operands, output."""
    sch = Schedule(graph(problem, config, arch))
    pooled, tile, output = (sch.get_sblock(name) for name in ("pooled", "tile", "output"))
    next_step(sch, "The border tested where it is read; a parallel task for some rows of a group of channels")
    sch.compute_inline("fetched")
    sch.compute_inline(tile)
    sch.set_scope(pooled, 0, "local")
    n, g, y, x, lane = sch.get_loops(output)
    task, _ = sch.split(y, [None, min(config.rows, problem.out_h)])
    sch.parallel(sch.fuse(n, g, task))
    sch.compute_at(pooled, x, preserve_unit_loops=True)

    next_step(sch, "Channels in vector lanes, the window tap by tap")
    _, lane = sch.split(lane, [None, config.vector])
    sch.vectorize(lane)
    lane, ry, rx = sch.get_loops(pooled)[-3:]
    many, lane = sch.split(lane, [GROUP // config.vector, config.vector])
    sch.reorder(ry, rx, many, lane)
    sch.vectorize(lane)
    sch.unroll(many)
    start = sch.decompose_reduction(pooled, ry)
    sch.vectorize(sch.get_loops(start)[-1])
    return sch.mod


def default(problem: PoolProblem, arch: Arch) -> CpuConfig:
    return CpuConfig()


def space(problem: PoolProblem, arch: Arch) -> Iterator[CpuConfig]:
    for vector in (8, 16, 32):
        for rows in (1, 4, 16):
            yield CpuConfig(vector, rows)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="channels of a group in vector lanes, parallel over rows",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
