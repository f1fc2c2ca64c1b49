"""NVIDIA's int8 tensor cores: `mma.sync` m16n8k32 (m8n8k16 on sm_75), ldmatrix, cp.async where the arch has it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from schedules.arch import Arch
from schedules.conv2d_nchw32.definition import Nchw32Problem
from schedules.conv2d_nchw32.matrix import MatrixConfig, schedule
from schedules.operator import ScheduleSpec


def default(problem: Nchw32Problem, arch: Arch) -> MatrixConfig:
    """The largest tile that still gives every multiprocessor a block."""
    return MatrixConfig(stages=4 if "cp_async" in arch.features else 2)


def space(problem: Nchw32Problem, arch: Arch) -> Iterator[MatrixConfig]:
    tiles = product((32, 64, 128, 256), (32, 64, 128, 256), (64, 128), (1, 2, 4), (1, 2, 4), (2, 3, 4, 5), (0, 2))
    for fields in tiles:
        yield MatrixConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="mma",
    summary="implicit GEMM on int8 tensor cores: mma.sync, ldmatrix, cp.async stages, swizzled shared memory",
    kinds=("cuda",),
    config=MatrixConfig,
    apply=schedule,
    default=default,
    space=space,
)
