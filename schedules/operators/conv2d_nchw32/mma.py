"""NVIDIA's int8 tensor cores: `mma.sync` m16n8k32 (m8n8k16 on sm_75), ldmatrix, cp.async where the arch has it."""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace, axis
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.matrix import MatrixConfig, fitting, graph, schedule

# pixels, channels, warps of each
TILES = ((128, 128, 2, 2), (128, 64, 2, 1), (64, 64, 2, 2), (64, 32, 2, 1), (32, 32, 2, 1))
# without cp.async, the next tile passes through registers: half a warp's tile
SYNCHRONOUS_TILES = ((128, 128, 4, 2), (128, 64, 4, 1), *TILES[2:])


def default(problem: Nchw32Problem, arch: Arch) -> MatrixConfig:
    if "cp_async" in arch.features:
        return fitting(problem, TILES, 4, arch.device)
    return fitting(problem, SYNCHRONOUS_TILES, 2, arch.device)


def space(problem: Nchw32Problem, arch: Arch) -> ProductSpace[MatrixConfig]:
    values = {
        **dict.fromkeys(("block_m", "block_n"), (32, 64, 128, 256)),
        "block_k": (64, 128),
        **dict.fromkeys(("warps_m", "warps_n"), (1, 2, 4)),
        "stages": (2, 3, 4, 5, 6),
        "min_blocks": (0, 1, 2, 3),
    }
    return ProductSpace(MatrixConfig, *(axis(name, values) for name, values in values.items()))


SCHEDULE = ScheduleSpec(
    name="mma",
    summary="implicit GEMM on int8 tensor cores: mma.sync, ldmatrix, cp.async stages, swizzled shared memory",
    kinds=("cuda",),
    config=MatrixConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
