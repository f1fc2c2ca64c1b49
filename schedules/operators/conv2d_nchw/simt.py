"""NCHW convolution on CUDA cores: an implicit product of output channels x the pixels of all images; see `steps.simt`.

Pixels are fetched along the images' rows, filters along the reduction, which is how each lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.implicit import product
from schedules.operators.conv2d_nchw.definition import NchwProblem, pixel_vector
from schedules.steps import simt
from schedules.steps.simt import SimtConfig, joined


def graph(problem: NchwProblem, config: SimtConfig, arch: Arch) -> tirx.PrimFunc:
    return product(problem, **config.product(problem, "co pixel"))


def schedule(problem: NchwProblem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), output (n, co, out_h, out_w)."""
    along = {"weights": (True, 1), "columns": (False, pixel_vector(problem, config.vector))}
    return simt.schedule_tiles(Schedule(graph(problem, config, arch)), config, along, problem.out_w)


def default(problem: NchwProblem, arch: Arch) -> SimtConfig:
    return simt.default(problem, arch, (problem.co, problem.pixels))


def space(problem: NchwProblem, arch: Arch) -> Sequence[SimtConfig]:
    return simt.space(problem, arch, (1, 4) if pixel_vector(problem, 4) > 1 else (1,))


SCHEDULE = ScheduleSpec(
    name="simt",
    summary="implicit GEMM on CUDA cores: channels x pixels, zero fill on fetch, virtual threads",
    kinds=("cuda", "rocm"),
    config=SimtConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    channels_along_rows=True,
    joined=joined,
    graph=graph,
)
