"""Convolution over NHWC data (channels contiguous)."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.conv2d_nhwc import (
    cpu,
    mma,
    mma_windows,
    simt,
    split,
    tf32,
    tma_tcgen05,
    tma_wgmma,
    wgmma,
    winograd,
    winograd_split,
)
from schedules.operators.conv2d_nhwc.definition import NhwcProblem, definition, inputs, reference
from schedules.steps.tensor_core import matrix_schedule
from schedules.windows.config import is_few
from schedules.winograd.rule import winograd_schedule


def choose(problem: NhwcProblem, arch: Arch) -> str:
    """The rule: windows for few input channels; else tensor memory, where there is some; else matrix cores for the
    dtypes that they take; else Winograd's tiles where they are estimated to pay; else plain products."""
    if is_few(problem) and mma_windows.SCHEDULE.serves(problem, arch):
        return mma_windows.SCHEDULE.name
    if tma_tcgen05.SCHEDULE.serves(problem, arch):
        return tma_tcgen05.SCHEDULE.name
    fewer = matrix_schedule(problem.dtype, arch) or winograd_schedule(problem, arch, cpu.estimated)
    return fewer or ("simt" if arch.is_gpu else "cpu")


OPERATOR = Operator(
    name="conv2d_nhwc",
    summary="2-D convolution, data NHWC, filter OHWI, output NHWC, epilogue fused",
    problem=NhwcProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(
        mma.SCHEDULE,
        mma.TF32,
        mma_windows.SCHEDULE,
        tma_wgmma.SCHEDULE,
        tma_tcgen05.SCHEDULE,
        wgmma.SCHEDULE,
        tf32.SCHEDULE,
        split.BF16X3,
        split.BF16X6,
        winograd_split.BF16X3,
        winograd_split.BF16X6,
        simt.SCHEDULE,
        winograd.SCHEDULE,
        cpu.SCHEDULE,
        winograd.CPU,
    ),
    choose=choose,
)
