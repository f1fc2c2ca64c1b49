"""NHWC convolution on CUDA cores: an implicit product of pixels x output channels; see `steps.simt`.

Loads are vectors along the channels, which are turned on their way to shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.implicit import product
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.steps import simt
from schedules.steps.simt import SimtConfig, joined
from schedules.steps.tiles import widest_vector


def graph(problem: NhwcProblem, config: SimtConfig, arch: Arch) -> tirx.PrimFunc:
    return product(problem, **config.product(problem, "pixel co"))


def schedule(problem: NhwcProblem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, h, w, ci), filter (co, kh, kw, ci), the epilogue's terms, output (n, out_h,
    out_w, co)."""
    load = widest_vector(problem.ci, min(config.vector, config.step)) if config.by_taps(problem) else 1
    along = {"columns": (load > 1, load), "weights": (True, load)}
    return simt.schedule_tiles(Schedule(graph(problem, config, arch)), config, along, problem.co)


def default(problem: NhwcProblem, arch: Arch) -> SimtConfig:
    return simt.default(problem, arch, (problem.pixels, problem.co))


def space(problem: NhwcProblem, arch: Arch) -> Sequence[SimtConfig]:
    return simt.space(problem, arch)


SCHEDULE = ScheduleSpec(
    name="simt",
    summary="implicit GEMM on CUDA cores: pixels x channels, zero fill on fetch, virtual threads",
    kinds=("cuda", "rocm"),
    config=SimtConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    joined=joined,
    graph=graph,
)
