"""Softmax, log-softmax, cross-entropy and their gradients over rows: scale, temperature, mask and dropout fused."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.softmax import (
    block_registers,
    block_streaming,
    cluster,
    cpu,
    frames,
    parts,
    split,
    tiles,
    warp,
)
from schedules.operators.softmax.cost import microseconds
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.graph import definition
from schedules.operators.softmax.reference import inputs, reference

# What the rule chooses from: on CUDA programs in TIRx, of which `frames` was within 1.2% of the fastest in TE on an
# H200 (tuning_logs/nvidia-h200/softmax_by_schedule), and which take rows of any width; else schedules in TE.
ON_CUDA = (tiles.SCHEDULE, frames.SCHEDULE, cluster.SCHEDULE, parts.SCHEDULE)
IN_TE = (
    warp.SCHEDULE,
    block_registers.SCHEDULE,
    block_streaming.SCHEDULE,
    split.SCHEDULE,
)


def candidates(problem: SoftmaxProblem, arch: Arch) -> list[tuple[float, str]]:
    """What the default config of each schedule that may be chosen costs, in microseconds, and its name; least first."""
    found = []
    for schedule in ON_CUDA if arch.kind == "cuda" else IN_TE:
        config = schedule.default(problem, arch)
        if schedule.takes_range(problem) and config.check(problem, arch) is None:
            found.append((microseconds(problem, schedule.name, config, arch), schedule.name))
    return sorted(found)


def choose(problem: SoftmaxProblem, arch: Arch) -> str:
    """The rule: the schedule whose default config costs least (`cost`)."""
    if not arch.is_gpu:
        return "cpu"
    found = candidates(problem, arch)
    return found[0][1] if found else "block_streaming"


OPERATOR = Operator(
    name="softmax",
    summary="softmax, log-softmax, cross-entropy and their gradients over the last axis of (rows, cols)",
    problem=SoftmaxProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(*IN_TE, *ON_CUDA, cpu.SCHEDULE),
    choose=choose,
)
