"""Softmax that keeps nothing of a row: a block to a row, every stage reads it again.

For rows that no memory of a multiprocessor holds; the repeats mostly come from the caches, so large blocks (few rows at
once) are better.  OneFlow's third implementation (SoftmaxBlockUncachedImpl).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.tvm import tirx, tvm
from schedules.lowering.annotations import default_streaming
from schedules.operators.softmax import rows
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.steps.story import next_step


@dataclass(frozen=True)
class BlockStreamingConfig(Config):
    threads: int = 1024  # of a row and block, a multiple of the wave
    vector: int = 8  # elements of one access
    unroll: int = 1  # packs in flight for each thread
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)

    def packing(self, problem: SoftmaxProblem) -> rows.Packing:
        return rows.Packing(problem.cols, self.threads, self.vector, self.unroll)

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.threads < 1 or self.threads % arch.wave:
            return f"threads={self.threads} is not a multiple of the wave, {arch.wave} on {arch}"
        if self.unroll < 1 or self.unroll > 16:
            return f"unroll={self.unroll} is not between 1 and 16"
        return rows.check(problem, arch, self.packing(problem), self.threads, 0, rows_held=0, streaming=self.streaming)


def _stages(problem: SoftmaxProblem, config: BlockStreamingConfig) -> rows.Stages:
    return rows.row_stages(problem, config.packing(problem), again=True)


def graph(problem: SoftmaxProblem, config: BlockStreamingConfig, arch: Arch) -> tirx.PrimFunc:
    return rows.program(_stages(problem, config))


def schedule(problem: SoftmaxProblem, config: BlockStreamingConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for x or y, dy (rows, cols), run-time rows."""
    packing, stages = config.packing(problem), _stages(problem, config)
    sch = rows.new_schedule(stages)
    row, chunk = rows.tile_rows(sch, stages, packing, 1, 1)
    next_step(sch, "What the outputs are made of, into registers, all of a chunk's packs in flight")
    rows.place_loads(sch, stages.loads["value"], chunk)
    for name in reversed(stages.reductions):
        rows.place_reduction(sch, name, stages.loads[name], row, packing)
    return rows.finish(sch, stages, packing, streaming=config.streaming)


def default(problem: SoftmaxProblem, arch: Arch) -> BlockStreamingConfig:
    return BlockStreamingConfig(arch.max_threads, rows.max_vector(problem), streaming=default_streaming(arch))


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[BlockStreamingConfig]:
    streams = ("no", "evict_last") if arch.kind == "cuda" else ("no",)
    for threads, unroll, streaming in product((256, 512, 1024), (1, 2, 4), streams):
        yield BlockStreamingConfig(threads, rows.max_vector(problem), unroll, streaming)


SCHEDULE = ScheduleSpec(
    name="block_streaming",
    summary="a block to a row, the row read again by every stage",
    kinds=("cuda", "rocm"),
    config=BlockStreamingConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
