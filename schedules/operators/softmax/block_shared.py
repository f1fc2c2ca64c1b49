"""Softmax with a row in shared memory, a block to a row.

The row is brought in once; each stage copies its part into registers a pack at a time.  Two layouts are free of bank
conflicts: [packs][vector], where a thread moves 16 bytes and eight neighbours fill a 128-byte wavefront, and OneFlow's
[vector][packs] (`transposed`), where neighbours read neighbouring words; the first needs `vector` times fewer
instructions and is the default.  OneFlow's second implementation (SoftmaxBlockSMemImpl).
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

_STAGING = 256  # bytes of shared memory that the cross-warp reductions take, at most


@dataclass(frozen=True)
class BlockSharedConfig(Config):
    threads: int = 256  # of a row and block, a multiple of the wave
    vector: int = 8  # elements of one access
    transposed: bool = False  # the row lies as [vector][packs]
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)

    def packing(self, problem: SoftmaxProblem) -> rows.Packing:
        return rows.Packing(problem.cols, self.threads, self.vector)

    def shared_bytes(self, problem: SoftmaxProblem) -> int:
        packing = self.packing(problem)
        width = sum(rows.itemsize_of(argument.dtype) for argument in problem.of_columns)
        return packing.elements * packing.threads * width

    def scope(self, problem: SoftmaxProblem, arch: Arch) -> str:
        """Static shared memory while it suffices; what lies beyond must be dynamic."""
        return "shared" if self.shared_bytes(problem) + _STAGING <= arch.shared_static else "shared.dyn"

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.threads < 1 or self.threads % arch.wave:
            return f"threads={self.threads} is not a multiple of the wave, {arch.wave} on {arch}"
        reason = rows.check(
            problem, arch, self.packing(problem), self.threads, self.min_blocks, rows_held=0, streaming=self.streaming
        )
        if reason:
            return reason
        needed = self.shared_bytes(problem) + _STAGING
        if needed > arch.shared_block:
            return f"cols={problem.cols} needs {needed} bytes of shared memory, {arch} has {arch.shared_block} a block"
        return None


def _stages(problem: SoftmaxProblem, config: BlockSharedConfig) -> rows.Stages:
    return rows.row_stages(problem, config.packing(problem), "shared", config.transposed)


def graph(problem: SoftmaxProblem, config: BlockSharedConfig, arch: Arch) -> tirx.PrimFunc:
    return rows.program(_stages(problem, config))


def schedule(problem: SoftmaxProblem, config: BlockSharedConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for x or y, dy (rows, cols), run-time rows."""
    packing, stages = config.packing(problem), _stages(problem, config)
    sch = rows.new_schedule(stages)
    row, chunk = rows.tile_rows(sch, stages, packing, 1, 1)
    next_step(sch, "What the outputs are made of, into registers, all of a chunk's packs in flight")
    rows.place_loads(sch, stages.loads["value"], chunk, vectorize=not config.transposed)
    for name in reversed(stages.reductions):
        rows.place_reduction(sch, name, stages.loads[name], row, packing, vectorize=not config.transposed)
    for name in reversed(stages.stored):
        rows.place_stored(sch, name, row, config.scope(problem, arch), config.transposed)
    return rows.finish(sch, stages, packing, config.min_blocks, config.streaming)


def default(problem: SoftmaxProblem, arch: Arch) -> BlockSharedConfig:
    """Threads for 4 packs each: enough loads in flight, and several blocks on a multiprocessor."""
    vector = rows.max_vector(problem)
    threads = max(128, arch.wave)
    while threads < arch.max_threads and threads * vector * 4 < problem.cols:
        threads *= 2
    return BlockSharedConfig(threads, vector, streaming=default_streaming(arch))


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[BlockSharedConfig]:
    streams = ("no", "evict_last") if arch.kind == "cuda" else ("no",)
    for threads, transposed, min_blocks, streaming in product((128, 256, 512, 1024), (False, True), (0, 2, 4), streams):
        yield BlockSharedConfig(threads, rows.max_vector(problem), transposed, min_blocks, streaming)


SCHEDULE = ScheduleSpec(
    name="block_shared",
    summary="a block to a row, the row in shared memory without bank conflicts",
    kinds=("cuda", "rocm"),
    config=BlockSharedConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
