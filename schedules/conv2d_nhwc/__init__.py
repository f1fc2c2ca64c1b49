"""Convolution over NHWC data (channels contiguous)."""

from __future__ import annotations

from schedules.arch import Arch
from schedules.conv2d_nhwc import mma
from schedules.conv2d_nhwc.definition import NhwcProblem, definition, inputs, reference
from schedules.operator import Operator


def choose(problem: NhwcProblem, arch: Arch) -> str:
    return "mma"


OPERATOR = Operator(
    name="conv2d_nhwc",
    summary="2-D convolution, data NHWC, filter OHWI, output NHWC; bias and relu on request",
    problem=NhwcProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(mma.SCHEDULE,),
    choose=choose,
)
