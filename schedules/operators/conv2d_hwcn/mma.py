"""HWCN convolution on matrix cores: for each pixel, output channels x batch.

Both operands have their reduction axis outside, so that the fragments are transposed on their way out of shared memory.
The instruction is `mma.sync`, MFMA or WMMA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, joined, pixel_product
from schedules.steps.tensor_core import Operand, TensorCoreConfig, default_tile, schedule_product, tiles
from schedules.steps.tf32 import tf32_schedule
from schedules.steps.tiles import widest, widest_vector

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


def graph(problem: HwcnProblem, config: TensorCoreConfig, arch: Arch) -> tirx.PrimFunc:
    return pixel_product(problem, config.tile, config.tf32)


def schedule(problem: HwcnProblem, config: TensorCoreConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    from tvm.s_tir import Schedule

    sch = Schedule(graph(problem, config, arch))
    most = widest(problem.dtype)
    filters = Operand(0, widest_vector(problem.co, most), transposed=True)
    batch = Operand(1, widest_vector(problem.n, most), transposed=True)
    schedule_product(sch, config, arch, problem.dtype, filters, batch, widest_vector(problem.n, most))
    return config.finish(sch.mod)


def default(problem: HwcnProblem, arch: Arch) -> TensorCoreConfig:
    return TensorCoreConfig(**default_tile(problem.co, problem.n, problem.out_h * problem.out_w, problem.dtype, arch))


def space(problem: HwcnProblem, arch: Arch) -> ProductSpace[TensorCoreConfig]:
    return ProductSpace(TensorCoreConfig, tiles(problem.dtype, arch))


SCHEDULE = ScheduleSpec(
    name="mma",
    summary="a product for each pixel on matrix cores: mma.sync with ldmatrix and cp.async stages, MFMA, WMMA",
    kinds=("cuda", "rocm"),
    config=TensorCoreConfig,
    apply=schedule,
    default=default,
    space=space,
    channels_along_rows=True,
    joined=joined,
    graph=graph,
)
TF32 = tf32_schedule(SCHEDULE)
