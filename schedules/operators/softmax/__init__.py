"""Softmax, log-softmax and their gradients over rows, with scale, mask and dropout fused."""

from __future__ import annotations

from schedules.core.arch import KIB, Arch
from schedules.core.operator import Operator
from schedules.operators.softmax import (
    block_registers,
    block_shared,
    block_streaming,
    bulk,
    cluster,
    cpu,
    frames,
    rows,
    split,
    warp,
)
from schedules.operators.softmax.definition import SoftmaxProblem, definition, inputs, reference
from schedules.operators.softmax.packs import PACK

KEEPING = (warp.SCHEDULE, block_registers.SCHEDULE, block_shared.SCHEDULE)  # a row on its multiprocessor
GPU_SCHEDULES = (*KEEPING, block_streaming.SCHEDULE, split.SCHEDULE)
# bytes; an estimate, not measured: a second kernel costs as long as a block takes to bring in and write such a row
LONG_ROW = 64 * KIB
ONE_CLUSTER = 512 * KIB  # bytes of a row, which a cluster was measured to be faster with than blocks all over the GPU
WIDENED = KIB  # bytes of a bfloat16 row, past which its float32 in registers were measured to cost


def choose(problem: SoftmaxProblem, arch: Arch) -> str:
    """The rule: the first schedule, from the one nearest to the arithmetic to the farthest, whose default config is
    legal for a row of `cols`; `warp` only up to 1024 columns, past which a warp waits longer for its row than a block
    does.

    `frames` before them where rows are not whole packs of 16 bytes and fit its registers, or else `bulk`: the others
    have narrower accesses there, which on an H200 reached 76% of a copy at 1023 columns of float16, 20% at 50257 and
    79% at 100 (tuning_logs/nvidia-h200/softmax_defaults.json).  And for rows of bfloat16 longer than 1 KiB, which ptxas
    keeps as float32 where the schedule language holds them in registers, while `frames` says what is kept: on an H200,
    as shares of a copy, it had 102 and 104% where `block_registers` had 82% at 32768 columns of softmax and `warp` 85%
    at 1000 of its gradient (tuning_logs/nvidia-h200/softmax_by_schedule).

    `cluster` instead for long rows that are too few for a block each to keep the GPU busy, up to two rows for each
    multiprocessor, and for any number of rows that no block can keep, since it reads them once, `split` twice and
    `block_streaming` three times.  It was the fastest on an H200 with 1, 8 and 132 rows of 128 and 512 KiB
    (tuning_logs/nvidia-h200/softmax.jsonl).  `split` for longer rows so few that a cluster for each would leave most of
    the GPU idle, and where there is no cluster for them: up to a quarter of the multiprocessors where a block can keep
    its row; up to two rows for each where it cannot.  The bounds are estimates.  `split` too takes any number of rows,
    but with enough of them a block that keeps its row moves less.
    """
    if not arch.is_gpu:
        return "cpu"
    multiprocessors, row_bytes = arch.device.multiprocessors, problem.cols * rows.itemsize(problem)
    long = row_bytes > LONG_ROW
    splits = long and split.default(problem, arch).check(problem, arch) is None
    spread = problem.rows * max(cluster.CLUSTERS) >= multiprocessors or row_bytes <= ONE_CLUSTER
    clustered = long and spread and cluster.SCHEDULE.serves(problem, arch)
    if clustered and problem.rows <= 2 * multiprocessors:
        return "cluster"
    if splits and problem.rows <= multiprocessors // 4:
        return "split"
    ragged = row_bytes % PACK != 0
    widened = problem.dtype == "bfloat16" and row_bytes > WIDENED
    on_packs = (frames.SCHEDULE, bulk.SCHEDULE) if ragged else (frames.SCHEDULE,) if widened else ()
    for schedule in (*on_packs, *KEEPING):
        if schedule.name == "warp" and problem.cols > 1024:
            continue
        if schedule.serves(problem, arch):
            return schedule.name
    if clustered:
        return "cluster"
    return "split" if splits and problem.rows <= 2 * multiprocessors else "block_streaming"


OPERATOR = Operator(
    name="softmax",
    summary="softmax, log-softmax and their gradients over the last axis of (rows, cols)",
    problem=SoftmaxProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(*GPU_SCHEDULES, bulk.SCHEDULE, frames.SCHEDULE, cluster.SCHEDULE, cpu.SCHEDULE),
    choose=choose,
)
