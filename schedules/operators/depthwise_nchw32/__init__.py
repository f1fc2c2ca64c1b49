"""Depthwise int8 convolution over channels in groups of 32."""

from __future__ import annotations

from schedules.core.operator import Operator, by_kind
from schedules.operators.depthwise_nchw32 import cpu, windows
from schedules.operators.depthwise_nchw32.definition import DepthwiseNchw32Problem, definition, inputs, reference

OPERATOR = Operator(
    name="depthwise_nchw32",
    summary="2-D int8 convolution of each channel with a filter of its own, data and output NCHW32, epilogue fused",
    problem=DepthwiseNchw32Problem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(windows.SCHEDULE, cpu.SCHEDULE),
    choose=by_kind("windows"),
)
