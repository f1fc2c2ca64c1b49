"""Softmax with a row in the registers of a warp or a part of one.

`threads` threads share a row, `rows_per_group` rows follow one another in a group, `groups` groups make a block.  A row
is read once, its reductions are shuffles, and it is written from registers.  OneFlow's first implementation
(SoftmaxWarpImpl: thread_group_width, rows_per_access, pack_size, padding).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.lowering.annotations import STREAMING, default_streaming
from schedules.operators.softmax import rows
from schedules.operators.softmax.definition import SoftmaxProblem


@dataclass(frozen=True)
class WarpConfig(rows.InRegisters):
    threads: int = 32  # of a row: a power of two, at most a wave
    groups: int = 4  # thread groups of a block
    rows_per_group: int = 1  # rows that a group computes one after the other
    vector: int = 8  # elements of one access
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler
    in_flight: int = 1  # rows of a group that are loaded before the first is computed
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)
    numerators: bool = False  # of softmax: keep the exponentials of the sum, in float32, for the output

    @property
    def deal(self) -> rows.RegisterRows:
        return rows.RegisterRows(self.groups, self.rows_per_group, self.in_flight)

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.threads < 1 or self.threads & (self.threads - 1) or self.threads > arch.wave:
            return f"threads={self.threads} is not a power of two up to {arch} wave's {arch.wave}"
        return self.check_rows(problem, arch)


def default(problem: SoftmaxProblem, arch: Arch) -> WarpConfig:
    """Two packs or more to a thread, blocks of 64 threads, one row to a group.

    OneFlow gives a thread one pack and a group two rows while a row is shorter than a warp.  Two packs of one row
    reached 96, 102 and 106% of a copy at 32, 64 and 128 float16 columns of softmax on an H200
    (tuning_logs/nvidia-h200/softmax_by_schedule).
    """
    vector = rows.max_vector(problem)
    threads = 1
    while threads < 32 and threads * 4 * vector <= problem.cols:
        threads *= 2
    # of a gradient in bfloat16 ptxas spills two bytes, to come under 40 or 72 registers, unless it is told not to
    min_blocks = int(problem.dtype == "bfloat16" and problem.is_grad)
    return WarpConfig(threads, 64 // threads, 1, vector, min_blocks, streaming=default_streaming(arch))


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[WarpConfig]:
    widest = rows.max_vector(problem)
    vectors = [v for v in (widest, widest // 2) if v >= 1]
    streams = STREAMING if arch.kind == "cuda" else ("no",)
    deals = ((1, 1), (2, 1), (2, 2), (4, 4))  # rows_per_group, in_flight
    for threads, block, vector in product((1, 2, 4, 8, 16, 32), (64, 128, 256, 512), vectors):
        for (per_group, in_flight), streaming, numerators in product(deals, streams, (False, True)):
            if threads <= block:
                yield WarpConfig(threads, block // threads, per_group, vector, 0, in_flight, streaming, numerators)


SCHEDULE = ScheduleSpec(
    name="warp",
    summary="a row in the registers of a warp or part of one; reductions by shuffles",
    kinds=("cuda", "rocm"),
    config=WarpConfig,
    apply=rows.schedule_registers,
    default=default,
    space=space,
    graph=rows.register_graph,
)
