"""NCHW convolution as an implicit product on matrix cores: output channels x pixels.

The filter's rows are contiguous in k = (ci, kh, kw) and loaded as they lie; pixels are contiguous in the other operand,
which `ldmatrix` transposes on its way into registers.  Pixels come one by one, as taps shift them off every alignment,
so that a tile has rather more channels than pixels.  k is padded to whole tiles once, not for each tap, and few output
channels to 16.  Source: the K100_AI implicit-GEMM article's problem, on the main loop of
`steps.tensor_core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace, axis
from schedules.definitions.implicit import product as matrix_product
from schedules.operators.conv2d_nchw.definition import NchwProblem, pixel_vector, weight_vector
from schedules.steps.tensor_core import Operand, TensorCoreConfig, schedule_product, whole_steps
from schedules.steps.tf32 import tf32_schedule
from schedules.steps.tiles import widest, widest_vector

if TYPE_CHECKING:
    import tvm
    from tvm import tirx

TILES = (  # block_m, block_n, warps_m, warps_n
    (256, 64, 4, 2),
    (128, 128, 2, 4),
    (128, 128, 2, 2),
    (128, 64, 4, 2),
    (128, 64, 2, 2),
    (64, 128, 2, 4),
    (64, 128, 2, 2),
    (64, 64, 2, 2),
    (32, 128, 1, 4),
    (32, 64, 1, 4),
    (16, 128, 1, 4),
    (16, 64, 1, 4),
)


def graph(problem: NchwProblem, config: TensorCoreConfig, arch: Arch) -> tirx.PrimFunc:
    tile = dict(zip(("co", "pixel", "k"), config.tile, strict=True))
    return matrix_product(problem, "k pixel", "co k", "co pixel", tile, tf32=config.tf32)


def schedule(problem: NchwProblem, config: TensorCoreConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), the epilogue's terms, output (n, co,
    out_h, out_w)."""
    from tvm.s_tir import Schedule

    p = problem
    sch = Schedule(graph(p, config, arch))
    most = widest(p.dtype)
    filters = Operand(0, weight_vector(p, most))
    pixels = Operand(1, pixel_vector(p, most), transposed=True)
    schedule_product(sch, config, arch, p.dtype, filters, pixels, widest_vector(p.out_h * p.out_w, most))
    return config.finish(sch.mod)


def default(problem: NchwProblem, arch: Arch) -> TensorCoreConfig:
    """The tile height with the least work, where a lower one counts for more because it reuses pixels less; half the
    width where whole tiles would leave multiprocessors idle."""
    p = problem
    block_m = min((128, 64, 32, 16), key=lambda rows: -(-p.co // rows) * (rows + 32))
    wide = -(-p.co // block_m) * -(-p.pixels // 128) >= 128
    block_n = 128 if block_m < 128 and wide else 64
    rows, columns = (1, 4) if block_m <= 32 else (2, 2)
    if block_m >= 64 and 8 * arch.wave <= arch.max_threads:
        rows, columns = (4, 2) if block_n == 64 and block_m == 128 else (2, 4)
    stages = 3 if "cp_async" in arch.features else 2
    return TensorCoreConfig(block_m, block_n, whole_steps(32, p.dtype, arch), rows, columns, stages)


def space(problem: NchwProblem, arch: Arch) -> ProductSpace[TensorCoreConfig]:
    names = ("block_m", "block_n", "warps_m", "warps_n")
    return ProductSpace(
        TensorCoreConfig,
        [dict(zip(names, tile, strict=True)) for tile in TILES if tile[0] < 2 * max(problem.co, 16)],
        axis("block_k", (32, 64)),
        axis("stages", (2, 3, 4)),
        axis("min_blocks", (0, 2, 3)),
    )


SCHEDULE = ScheduleSpec(
    name="mma",
    summary="implicit GEMM on matrix cores: mma.sync with ldmatrix, transposed for pixels, and cp.async; MFMA; WMMA",
    kinds=("cuda", "rocm"),
    config=TensorCoreConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    channels_along_rows=True,
    joined=lambda problem, step: True,
    graph=graph,
)
TF32 = tf32_schedule(SCHEDULE)
