"""AMD's int8 matrix cores: `v_mfma_i32_16x16x16i8` (gfx90a), `v_mfma_i32_16x16x32_i8` (gfx942), through LDS.

The next tile is loaded into registers while the current one is multiplied, and stored into the other half of LDS.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.matrix import MatrixConfig, fitting, graph, schedule

TILES = ((128, 128, 2, 2), (128, 64, 2, 2), (64, 64, 2, 2), (64, 32, 2, 1), (32, 32, 2, 1))


def default(problem: Nchw32Problem, arch: Arch) -> MatrixConfig:
    return fitting(problem, TILES, 2, arch.device)


def space(problem: Nchw32Problem, arch: Arch) -> Iterator[MatrixConfig]:
    for fields in product((32, 64, 128, 256), (32, 64, 128, 256), (64, 128), (1, 2, 4), (1, 2, 4)):
        yield MatrixConfig(*fields, stages=2)


SCHEDULE = ScheduleSpec(
    name="mfma",
    summary="implicit GEMM on int8 matrix cores: v_mfma, double-buffered and swizzled LDS",
    kinds=("rocm",),
    config=MatrixConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
