"""Pooling of int8 over channels in groups of 32, and addition."""

from __future__ import annotations

from schedules.core.operator import Operator, by_kind
from schedules.operators.pool2d import cpu, direct
from schedules.operators.pool2d.definition import PoolProblem, definition, inputs, reference

OPERATOR = Operator(
    name="pool2d",
    summary="int8 pooling, data and output NCHW32, by maximum or average; averages add a residual and an activation",
    problem=PoolProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(direct.SCHEDULE, cpu.SCHEDULE),
    choose=by_kind("direct"),
)
