"""Pooling of int8 over channels in groups of 32, and addition."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.pool2d import cpu, direct
from schedules.operators.pool2d.definition import PoolProblem, definition, inputs, reference


def choose(problem: PoolProblem, arch: Arch) -> str:
    """The rule: there is one schedule for GPUs and one for CPUs."""
    return "direct" if arch.is_gpu else "cpu"


OPERATOR = Operator(
    name="pool2d",
    summary="int8 pooling, data and output NCHW32, by maximum or average; averages add a residual and an activation",
    problem=PoolProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(direct.SCHEDULE, cpu.SCHEDULE),
    choose=choose,
)
