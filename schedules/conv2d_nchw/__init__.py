"""Convolution over NCHW data (width contiguous), with bias and activation."""

from __future__ import annotations

from schedules.arch import Arch
from schedules.conv2d_nchw import direct, simt
from schedules.conv2d_nchw.definition import NchwProblem, definition, inputs, reference
from schedules.operator import Operator


def choose(problem: NchwProblem, arch: Arch) -> str:
    return "simt"


OPERATOR = Operator(
    name="conv2d_nchw",
    summary="2-D convolution, data NCHW, filter OIHW, output NCHW, bias and activation fused",
    problem=NchwProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(simt.SCHEDULE, direct.SCHEDULE),
    choose=choose,
)
