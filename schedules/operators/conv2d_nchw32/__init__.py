"""int8 convolution over channels in groups of 32, as in MegEngine's tensor-core kernels."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import Operator
from schedules.operators.conv2d_nchw32 import cpu, mma, mma_windows, simt, tma_tcgen05, tma_wgmma
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem, definition, inputs, reference
from schedules.steps.tensor_core import matrix_schedule
from schedules.windows.config import is_few


def choose(problem: Nchw32Problem, arch: Arch) -> str:
    """The rule: windows for few input channels; else tensor memory, where there is some; else matrix cores, if data are
    whole groups; else four-byte dot products."""
    if is_few(problem) and mma_windows.SCHEDULE.serves(problem, arch):
        return mma_windows.SCHEDULE.name
    if tma_tcgen05.SCHEDULE.serves(problem, arch):
        return tma_tcgen05.SCHEDULE.name
    matrix = None if problem.not_groups else matrix_schedule(problem.dtype, arch)
    return matrix or ("simt" if arch.is_gpu else "cpu")


OPERATOR = Operator(
    name="conv2d_nchw32",
    summary="2-D int8 convolution, data and output NCHW32, filter prepacked, epilogue fused",
    problem=Nchw32Problem,
    definition=definition,
    reference=reference,
    inputs=inputs,
    schedules=(
        mma.SCHEDULE,
        mma_windows.SCHEDULE,
        tma_wgmma.SCHEDULE,
        tma_tcgen05.SCHEDULE,
        simt.SCHEDULE,
        cpu.SCHEDULE,
    ),
    choose=choose,
)
