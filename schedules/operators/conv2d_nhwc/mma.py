"""NHWC convolution as an implicit product on matrix cores: pixels x output channels.

The reduction runs over (kh, kw, chunk of ci) as a nest, so that a step needs no division; a row's pixel is taken apart
once, outside of it.  The instruction is `mma.sync`, MFMA or WMMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace
from schedules.operators.conv2d_nhwc.definition import NhwcProblem, matrix_product
from schedules.steps.tensor_core import Operand, TensorCoreConfig, default_tile, schedule_product, tiles
from schedules.steps.tf32 import tf32_schedule
from schedules.steps.tiles import widest, widest_vector

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

    from schedules.steps.warpgroup import WarpgroupConfig


def graph(problem: NhwcProblem, config: TensorCoreConfig | WarpgroupConfig, arch: Arch) -> tirx.PrimFunc:
    return matrix_product(problem, config.tile, tf32=config.tf32)


def schedule(problem: NhwcProblem, config: TensorCoreConfig | WarpgroupConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program, also that of `wgmma`, for data (n, h, w, ci), filter (co, kh, kw, ci), the epilogue's
    terms, output (n, out_h, out_w, co)."""
    from tvm.s_tir import Schedule

    sch = Schedule(graph(problem, config, arch))
    most = widest(problem.dtype)
    channels = Operand(0, widest_vector(problem.ci, most)), Operand(1, widest_vector(problem.ci, most))
    schedule_product(sch, config, arch, problem.dtype, *channels, widest_vector(problem.co, most))
    return config.finish(sch.mod)


def default(problem: NhwcProblem, arch: Arch) -> TensorCoreConfig:
    return TensorCoreConfig(**default_tile(problem.pixels, problem.co, 1, problem.dtype, arch))


def space(problem: NhwcProblem, arch: Arch) -> ProductSpace[TensorCoreConfig]:
    return ProductSpace(TensorCoreConfig, tiles(problem.dtype, arch))


SCHEDULE = ScheduleSpec(
    name="mma",
    summary="implicit GEMM on matrix cores: mma.sync with ldmatrix and cp.async stages, MFMA or WMMA with two",
    kinds=("cuda", "rocm"),
    config=TensorCoreConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
TF32 = tf32_schedule(SCHEDULE)
