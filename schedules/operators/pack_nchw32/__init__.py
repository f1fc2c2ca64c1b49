"""Tensors into groups of 32 channels of int8, and back."""

from __future__ import annotations

from schedules.core.operator import Operator, by_kind
from schedules.operators.pack_nchw32 import cpu, tiles
from schedules.operators.pack_nchw32.definition import PackProblem, definition, inputs, reference

OPERATOR = Operator(
    name="pack_nchw32",
    summary="NCHW or NHWC in floating point to NCHW32 in int8, by a scale given at each call, and back",
    problem=PackProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(tiles.SCHEDULE, cpu.SCHEDULE),
    choose=by_kind("tiles"),
)
