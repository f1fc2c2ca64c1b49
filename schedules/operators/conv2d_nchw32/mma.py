"""int8 matrix cores: NVIDIA's `mma.sync` m16n8k32 (m8n8k16 on sm_75), AMD's MFMA and WMMA.

Fragments come by ldmatrix on NVIDIA, tiles by cp.async where the arch has it; else the next tile is loaded into
registers while the current one is multiplied, and stored into the other half of shared memory.
"""

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
TILES_OF_64 = ((128, 128, 2, 2), (128, 64, 2, 2), *TILES[2:])  # for waves of 64


def default(problem: Nchw32Problem, arch: Arch) -> MatrixConfig:
    if "cp_async" in arch.features:
        return fitting(problem, TILES, 4, arch.device)
    return fitting(problem, TILES_OF_64 if arch.wave == 64 else SYNCHRONOUS_TILES, 2, arch.device)


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
    summary="implicit GEMM on int8 matrix cores: mma.sync with ldmatrix and cp.async stages, MFMA or WMMA with two",
    kinds=("cuda", "rocm"),
    config=MatrixConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
