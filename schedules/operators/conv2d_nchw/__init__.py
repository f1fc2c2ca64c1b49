"""Convolution over NCHW data (width contiguous), with bias and activation."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.conv2d_nchw import (
    cpu,
    direct,
    mma,
    mma_channels_last,
    mma_windows,
    simt,
    split,
    tma_wgmma,
    tma_wgmma_boxes,
    tma_wgmma_few,
    tma_wgmma_images,
    tma_wgmma_lines,
    tma_wgmma_runs,
    tma_wgmma_slabs,
    tma_wgmma_spans,
    tma_wgmma_turned,
    winograd,
    winograd_split,
)
from schedules.operators.conv2d_nchw.definition import NchwProblem, definition, inputs, pixel_vector, reference
from schedules.steps.tensor_core import matrix_schedule
from schedules.windows.config import is_few
from schedules.winograd.rule import winograd_schedule

FEW_CHANNELS = 16
FEW_PIXELS = 2**16  # below, tiles of the image are too few to occupy a GPU


def choose(problem: NchwProblem, arch: Arch) -> str:
    """The rule: windows for few input channels; else `direct` for float32 where a kernel larger than 1x1 has few
    channels and a large image, so that a thread keeps all filters and fetches each pixel once.

    Else matrix cores for the dtypes that they take: `mma`, except on CUDA where pixels do not come by vectors as they
    lie: `mma_channels_last`.  Else `direct` for such images, `winograd` where it is estimated to pay, and `simt`.
    """
    if not arch.is_gpu:
        return winograd_schedule(problem, arch, cpu.estimated) or "cpu"
    p = problem
    if is_few(p) and mma_windows.SCHEDULE.serves(p, arch):
        return mma_windows.SCHEDULE.name
    few = max(p.ci, p.co) <= FEW_CHANNELS and p.pixels >= FEW_PIXELS and p.kh * p.kw > 1
    few = few and direct.SCHEDULE.serves(p, arch)
    matrix = None if few and p.dtype == "float32" else matrix_schedule(p.dtype, arch)
    if matrix and arch.kind == "cuda" and pixel_vector(p, 8) == 1:
        return "mma_channels_last"
    if matrix:
        return matrix
    return "direct" if few else winograd_schedule(p, arch, cpu.estimated) or "simt"


OPERATOR = Operator(
    name="conv2d_nchw",
    summary="2-D convolution, data NCHW, filter OIHW or packed, output NCHW, epilogue fused",
    problem=NchwProblem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(
        mma.SCHEDULE,
        mma.TF32,
        mma_channels_last.SCHEDULE,
        mma_windows.SCHEDULE,
        tma_wgmma.SCHEDULE,
        tma_wgmma_boxes.SCHEDULE,
        tma_wgmma_few.SCHEDULE,
        tma_wgmma_images.SCHEDULE,
        tma_wgmma_lines.SCHEDULE,
        tma_wgmma_runs.SCHEDULE,
        tma_wgmma_slabs.SCHEDULE,
        tma_wgmma_spans.SCHEDULE,
        tma_wgmma_turned.SCHEDULE,
        split.BF16X3,
        split.BF16X6,
        winograd_split.BF16X3,
        winograd_split.BF16X6,
        direct.SCHEDULE,
        simt.SCHEDULE,
        winograd.SCHEDULE,
        cpu.SCHEDULE,
        winograd.CPU,
    ),
    choose=choose,
)
