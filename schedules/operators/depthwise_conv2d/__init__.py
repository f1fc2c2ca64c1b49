"""Depthwise convolution: a filter for each channel, by itself."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.depthwise_conv2d import cpu, windows
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem, definition, inputs, reference


def choose(problem: DepthwiseProblem, arch: Arch) -> str:
    """The rule: there is one schedule for GPUs and one for CPUs."""
    return "windows" if arch.is_gpu else "cpu"


OPERATOR = Operator(
    name="depthwise_conv2d",
    summary="2-D convolution of each channel with a filter of its own, NCHW or NHWC, epilogue fused",
    problem=DepthwiseProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(windows.SCHEDULE, cpu.SCHEDULE),
    choose=choose,
)
