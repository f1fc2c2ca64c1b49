"""Softmax, log-softmax and their gradients over rows, with scale, mask and dropout fused."""

from __future__ import annotations

from schedules.arch import Arch
from schedules.operator import Operator
from schedules.softmax import block_registers, block_shared, block_streaming, cpu, warp
from schedules.softmax.definition import SoftmaxProblem, definition, inputs, reference

GPU_SCHEDULES = (warp.SCHEDULE, block_registers.SCHEDULE, block_shared.SCHEDULE, block_streaming.SCHEDULE)


def choose(problem: SoftmaxProblem, arch: Arch) -> str:
    """The rule: the first schedule, from the one nearest to the arithmetic to the farthest, whose default config is
    legal for a row of `cols`; `warp` only up to 1024 columns, past which a warp waits longer for its row than a block
    does."""
    if not arch.is_gpu:
        return "cpu"
    for schedule in GPU_SCHEDULES:
        if schedule.name == "warp" and problem.cols > 1024:
            continue
        if schedule.default(problem, arch).check(problem, arch) is None:
            return schedule.name
    return "block_streaming"


OPERATOR = Operator(
    name="softmax",
    summary="softmax, log-softmax and their gradients over the last axis of (rows, cols)",
    problem=SoftmaxProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(*GPU_SCHEDULES, cpu.SCHEDULE),
    choose=choose,
)
