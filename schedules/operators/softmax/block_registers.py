"""Softmax with a row in the registers of a block.

As `warp`, with up to a whole block on a row: reductions are shuffles, then a little shared memory and two barriers.
Not one of OneFlow's three: registers hold the rows that its second brings into shared memory, which they would only
pass through.  Where it was timed on an H200 it was within 2% of the fastest from 1000 to 32768 columns
(tuning_logs/nvidia-h200/softmax.jsonl).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.lowering.annotations import STREAMING, default_streaming
from schedules.operators.softmax import rows
from schedules.operators.softmax.definition import SoftmaxProblem


@dataclass(frozen=True)
class BlockRegistersConfig(rows.InRegisters):
    threads: int = 256  # of a row, a multiple of the wave
    vector: int = 8  # elements of one access
    min_blocks: int = 0  # blocks a multiprocessor should hold (caps registers); 0 leaves it to the compiler
    rows_per_block: int = 1  # rows that a block computes one after the other
    in_flight: int = 1  # rows of a block that are loaded before the first is computed
    streaming: str = "no"  # what the caches keep: no, stores, both, evict_last (see `accesses`)
    numerators: bool = False  # of softmax: keep the exponentials of the sum, in float32, for the output

    @property
    def deal(self) -> rows.RegisterRows:
        return rows.RegisterRows(1, self.rows_per_block, self.in_flight)

    def check(self, problem: SoftmaxProblem, arch: Arch) -> str | None:
        if self.threads < 1 or self.threads % arch.wave:
            return f"threads={self.threads} is not a multiple of the wave, {arch.wave} on {arch}"
        return self.check_rows(problem, arch)


def default(problem: SoftmaxProblem, arch: Arch) -> BlockRegistersConfig:
    """Two packs to a thread up to 256 threads, then up to eight packs, then up to 512 threads.

    bfloat16 takes four packs up to 1024 threads: 1024 threads on a multiprocessor either way, and no spills.
    With eight packs or more, registers are capped for 1024 threads on a multiprocessor where that is legal.  On an
    H200 100.7% of a copy or more for softmax of 1000 to 32768 float16 columns, but for bfloat16 82% at 32768
    (tuning_logs/nvidia-h200/softmax_by_schedule).
    """
    vector = rows.max_vector(problem)
    threads = max(64, arch.wave)
    while threads < min(256, arch.max_threads) and threads * vector * 2 < problem.cols:
        threads *= 2
    most, packs = (1024, 4) if problem.dtype == "bfloat16" else (512, 8)
    while threads < min(most, arch.max_threads) and threads * vector * packs < problem.cols:
        threads *= 2
    config = BlockRegistersConfig(threads, vector, streaming=default_streaming(arch))
    if config.packing(problem).rounds < 8:
        return config
    capped = replace(config, min_blocks=1024 // threads)
    return config if capped.check(problem, arch) else capped


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[BlockRegistersConfig]:
    streams = STREAMING if arch.kind == "cuda" else ("no",)
    deals = ((1, 1), (2, 2), (4, 2))  # rows_per_block, in_flight
    widest = rows.max_vector(problem)
    vectors = [v for v in (widest, widest // 2) if v >= 1]
    for threads, vector, min_blocks in product((64, 128, 256, 512, 1024), vectors, (0, 2, 4, 8)):
        for (per_block, in_flight), streaming, numerators in product(deals, streams, (False, True)):
            yield BlockRegistersConfig(threads, vector, min_blocks, per_block, in_flight, streaming, numerators)


SCHEDULE = ScheduleSpec(
    name="block_registers",
    summary="a row in the registers of a block; reductions by shuffles and two barriers",
    kinds=("cuda", "rocm"),
    config=BlockRegistersConfig,
    apply=rows.schedule_registers,
    default=default,
    space=space,
    graph=rows.register_graph,
)
