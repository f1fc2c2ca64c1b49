"""Convolution over HWCN data (batch contiguous), as in the TVM tutorial."""

from __future__ import annotations

from schedules.arch import Arch
from schedules.conv2d_hwcn import cpu, mma, sampled, simt
from schedules.conv2d_hwcn.definition import HwcnProblem, definition, inputs, reference
from schedules.operator import Operator
from schedules.primitives.tensor_core import matrix_schedule


def choose(problem: HwcnProblem, arch: Arch) -> str:
    return matrix_schedule(problem.dtype, arch) or ("simt" if arch.is_gpu else "cpu")


OPERATOR = Operator(
    name="conv2d_hwcn",
    summary="2-D convolution, data HWCN, filter HWIO, output HWCN",
    problem=HwcnProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(simt.SCHEDULE, mma.SCHEDULE, mma.MFMA, cpu.SCHEDULE),
    choose=choose,
    sampled=sampled.SAMPLED,
)
