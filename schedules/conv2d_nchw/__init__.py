"""Convolution over NCHW data (width contiguous), with bias and activation."""

from __future__ import annotations

from schedules.arch import Arch
from schedules.conv2d_nchw import cpu, direct, simt
from schedules.conv2d_nchw.definition import NchwProblem, definition, inputs, reference
from schedules.operator import Operator

FEW_CHANNELS = 16


def choose(problem: NchwProblem, arch: Arch) -> str:
    """The rule: `direct` where a kernel larger than 1x1 has few output channels, so that a thread keeps all of them and
    fetches each pixel once; else `simt`."""
    if not arch.is_gpu:
        return "cpu"
    p = problem
    if p.co <= FEW_CHANNELS and p.kh * p.kw > 1 and direct.default(p, arch).check(p, arch) is None:
        return "direct"
    return "simt"


OPERATOR = Operator(
    name="conv2d_nchw",
    summary="2-D convolution, data NCHW, filter OIHW, output NCHW, bias and activation fused",
    problem=NchwProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(direct.SCHEDULE, simt.SCHEDULE, cpu.SCHEDULE),
    choose=choose,
)
