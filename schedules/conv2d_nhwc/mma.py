"""NHWC convolution as an implicit product on NVIDIA's tensor cores: pixels x output channels.

The reduction runs over (kh, kw, chunk of ci) as a nest, so that a step needs no division; a row's pixel is taken apart
once, outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.arch import Arch
from schedules.conv2d_nhwc.definition import NhwcProblem, gemm_definition, unflatten_output
from schedules.operator import ScheduleSpec
from schedules.primitives.tensor_core import Operand, TensorCoreConfig, schedule_product
from schedules.primitives.tiles import widest_vector

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class MmaConfig(TensorCoreConfig):
    """Tiles of (pixels, output channels, input channels)."""

    def check(self, problem: NhwcProblem, arch: Arch) -> str | None:
        return self.check_tile(problem.dtype, arch)


def schedule(problem: NhwcProblem, config: MmaConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, h, w, ci), filter (co, kh, kw, ci), bias (co,) if any, output (n, out_h,
    out_w, co)."""
    from tvm import te
    from tvm.s_tir import Schedule

    sch = Schedule(te.create_prim_func(gemm_definition(problem, config.tile)))
    channels = Operand(0, widest_vector(problem.ci, 8)), Operand(1, widest_vector(problem.ci, 8))
    schedule_product(sch, config, arch, problem.dtype, *channels, widest_vector(problem.co, 8))
    unflatten_output(sch, problem)
    return config.finish(sch.mod)


def default(problem: NhwcProblem, arch: Arch) -> MmaConfig:
    return MmaConfig(stages=4 if "cp_async" in arch.features else 2)


def space(problem: NhwcProblem, arch: Arch) -> Iterator[MmaConfig]:
    for (block_m, block_n, warps_m, warps_n), block_k, stages, min_blocks in product(
        ((128, 128, 2, 2), (128, 64, 2, 2)), (32, 64), (2, 3, 4), (0, 2)
    ):
        yield MmaConfig(block_m, block_n, block_k, warps_m, warps_n, stages, min_blocks)


SCHEDULE = ScheduleSpec(
    name="mma",
    summary="implicit GEMM on tensor cores: ldmatrix, mma.sync, multi-stage cp.async",
    kinds=("cuda",),
    config=MmaConfig,
    apply=schedule,
    default=default,
    space=space,
)
