"""NCHW32 convolution on the CPU: output channels of a group in vector lanes, pixels of a row in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.definitions.program import program_of
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem, definition
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.steps.story import next_step
from schedules.steps.tiles import inline_if_present

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 16  # output channels in a vector
    block_x: int = 4  # pixels of a row whose sums stay in registers

    def check(self, problem: Nchw32Problem, arch: Arch) -> str | None:
        if self.vector not in (4, 8, 16, 32):
            return f"vector={self.vector} is not 4, 8, 16 or 32"
        if not 1 <= self.block_x <= 32:
            return f"block_x={self.block_x} is not between 1 and 32"
        return None


def graph(problem: Nchw32Problem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    return program_of(definition(problem))


def schedule(problem: Nchw32Problem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program."""
    from tvm.s_tir import Schedule

    sch = Schedule(graph(problem, config, arch))
    next_step(sch, "The border tested where it is read; sums in registers")
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")
    inline_if_present(sch, "padded")
    sch.set_scope(conv, 0, "local")

    next_step(sch, "A parallel task for a row of pixels of one channel group, a few pixels in registers at a time")
    n, g, y, x, f = sch.get_loops(output)
    xo, _ = sch.split(x, [None, config.block_x])
    sch.compute_at(conv, xo, preserve_unit_loops=True)
    sch.parallel(sch.fuse(n, g, y))
    _, lane = sch.split(f, [None, config.vector])
    sch.vectorize(lane)

    next_step(sch, "Each input byte is broadcast against vectors of filters")
    x, f, *reduction = sch.get_loops(conv)[-6:]
    fo, lane = sch.split(f, [GROUP // config.vector, config.vector])
    sch.reorder(*reduction, x, fo, lane)
    sch.vectorize(lane)
    sch.unroll(fo)
    start = sch.decompose_reduction(conv, reduction[0])
    sch.vectorize(sch.get_loops(start)[-1])
    return sch.mod


def default(problem: Nchw32Problem, arch: Arch) -> CpuConfig:
    return CpuConfig(block_x=min(4, problem.out_w))


def space(problem: Nchw32Problem, arch: Arch) -> Iterator[CpuConfig]:
    for fields in product((8, 16, 32), (1, 2, 4, 7, 8)):
        yield CpuConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="output channels in vector lanes, pixels of a row in registers, parallel over rows",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
