"""Convolution over HWCN data (batch contiguous), as in the TVM tutorial."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.conv2d_hwcn import (
    cpu,
    mma,
    mma_split,
    mma_windows,
    simt,
    split,
    tf32,
    tma_wgmma,
    tutorial,
    winograd,
    winograd_split,
)
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, definition, inputs, reference
from schedules.steps.tensor_core import matrix_schedule
from schedules.windows.config import is_few
from schedules.winograd.rule import winograd_schedule


def choose(problem: HwcnProblem, arch: Arch) -> str:
    """The rule: matrix cores for the dtypes that they take, with windows of the image for few channels of one image or
    two; else Winograd's tiles where they are estimated to pay, for
    float32; else `simt` for float32 where there is cp.async, and `tutorial` on every other GPU."""
    if is_few(problem) and mma_windows.SCHEDULE.serves(problem, arch):
        return "mma_windows"
    if fewer := matrix_schedule(problem.dtype, arch) or winograd_schedule(problem, arch, cpu.estimated):
        return fewer
    if not arch.is_gpu:
        return "cpu"
    return "simt" if problem.dtype == "float32" and "cp_async" in arch.features else "tutorial"


OPERATOR = Operator(
    name="conv2d_hwcn",
    summary="2-D convolution, data HWCN, filter HWIO, output HWCN, epilogue fused",
    problem=HwcnProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(
        tutorial.SCHEDULE,
        simt.SCHEDULE,
        mma.SCHEDULE,
        mma.TF32,
        mma_split.SCHEDULE,
        mma_windows.SCHEDULE,
        tma_wgmma.SCHEDULE,
        tf32.SCHEDULE,
        split.BF16X3,
        split.BF16X6,
        winograd.SCHEDULE,
        winograd_split.BF16X3,
        winograd_split.BF16X6,
        cpu.SCHEDULE,
        winograd.CPU,
    ),
    choose=choose,
)
