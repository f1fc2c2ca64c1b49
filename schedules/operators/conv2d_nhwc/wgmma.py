"""NHWC convolution as an implicit product by wgmma, in the schedule language: pixels x output channels.

The definition, the fetches and the pipeline are those of `mma`; the instruction takes its operands from shared memory.
`tma_wgmma` says with TIRx what no schedule can: TMA, warps of different roles, clusters.
"""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace, axis
from schedules.operators.conv2d_nhwc import mma
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.steps.tensor_core import tile_cost
from schedules.steps.warpgroup import WarpgroupConfig

# (block_m, block_n, stages): two blocks to a multiprocessor but for the first two
SHAPES = (
    (128, 256, 4),
    (256, 128, 4),
    (128, 128, 3),
    (128, 64, 4),
    (64, 128, 4),
    (64, 64, 4),
    (128, 32, 4),
    (64, 32, 4),
    (128, 16, 4),
    (64, 16, 4),
)


def default(problem: NhwcProblem, arch: Arch) -> WarpgroupConfig:
    """The tile with the least work on the busiest multiprocessor."""
    shape = min(SHAPES, key=lambda shape: tile_cost(shape, problem.pixels, problem.co, 1, arch.device))
    return WarpgroupConfig(shape[0], shape[1], 64, shape[2])


def space(problem: NhwcProblem, arch: Arch) -> ProductSpace[WarpgroupConfig]:
    return ProductSpace(
        WarpgroupConfig,
        [dict(block_m=m, block_n=n) for m, n, _ in SHAPES],
        axis("block_k", (32, 64)),
        axis("stages", (2, 3, 4, 6)),
        axis("min_blocks", (0, 1, 2)),
    )


SCHEDULE = ScheduleSpec(
    name="wgmma",
    summary="implicit GEMM by wgmma as a tensor intrinsic: multi-stage cp.async, operands in shared memory",
    kinds=("cuda",),
    config=WarpgroupConfig,
    apply=mma.schedule,
    default=default,
    space=space,
    ranges=True,
    graph=mma.graph,
)
