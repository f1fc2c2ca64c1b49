"""HWCN convolution of float32 on tensor cores: every operand as two bfloat16 parts, three products for one.

Data and filter are first split into high and low parts in workspace of the function (`steps.split`); then, for
each pixel, output channels x batch are summed over (kh, kw, ci) as high x high + high x low + low x high.  All four
tiles pass through shared memory once and serve the three products.  The tensor cores cut sums off towards zero;
therefore they sum one tile of the reduction, and the CUDA cores add the tiles up.

The error is not float32's: up to 3 * 2^-16 of the sum of the absolute products.  In emulation on normal data,
||y - ref|| / ||ref|| is 4.4e-6 and the largest |y - ref| 2e-5 of the root mean square, whatever ci (float32 in order
over 2304 products: 0.9e-6 and 0.9e-5).  Hence it is only used where it is asked for by name.  Infinities and NaN among
the operands give what they give in float32; what comes within 1% of the largest float32 may overflow, to an infinity or
NaN; of operands below 2^-117 fewer digits count (`steps.split`).
Sources: Henry, Tang and Heinecke (2019) for the split, Ootomo and Yokota (2022) for the sums outside the tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from schedules.core.arch import Arch
from schedules.core.arithmetic import BF16X3
from schedules.core.operator import ScheduleSpec
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.definitions.epilogue import ACCUMULATOR
from schedules.definitions.implicit import Implicit, Stage
from schedules.lowering.annotations import INSIDE_FIRST
from schedules.operators.conv2d_hwcn.definition import COLUMNS, CONV, WEIGHTS, HwcnProblem, inside_window
from schedules.steps.fragments import why_no_atom
from schedules.steps.split import PART, schedule_split, split
from schedules.steps.story import next_step
from schedules.steps.tensor_core import Operand, TensorCoreConfig, schedule_product, tile_cost
from schedules.steps.tiles import widest_vector


@dataclass(frozen=True)
class MmaSplitConfig(TensorCoreConfig):
    """Tiles of (output channels, batch, input channels)."""

    block_k: int = 64
    warps_m: int = 4
    stages: int = 3
    min_blocks: int = 1
    ahead: bool = False  # fragments of the next k step are loaded before this one is multiplied, into a second set
    skip_padding: bool = True  # taps that lie in the padding for a block's pixel are left out

    @property
    def fragment_sets(self) -> int:
        return 2 if self.ahead else 1

    @classmethod
    def unfit(cls, problem: HwcnProblem, arch: Arch) -> str | None:
        if problem.dtype != ACCUMULATOR:
            return f"dtype={problem.dtype} is not split; mma takes it as it is"
        return why_no_atom(PART, arch)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        return self.unfit(problem, arch) or self.check_tile(PART, arch, output=problem.dtype, parts=2)


def graph(problem: HwcnProblem, config: MmaSplitConfig, arch: Arch) -> tirx.PrimFunc:
    """``data_high``, ``data_low`` (h, w, ci, n) and ``filter_high``, ``filter_low`` (kh, kw, ci, co), bfloat16; then
    the product of `definition.pixel_product`, of ``columns`` and ``weights`` of each part."""
    made = Implicit(problem, dict(zip(("co", "n", "ci"), config.tile, strict=True)))
    data, data_low = (Stage(part, problem.data_axes) for part in split(made.given["data"]))
    filters, filters_low = (Stage(part, problem.filter_axes) for part in split(made.given["filter"]))
    columns, columns_low = made.columns(COLUMNS, source=data), made.columns(COLUMNS, "columns_low", data_low)
    weights, weights_low = made.weights(WEIGHTS, source=filters), made.weights(WEIGHTS, "weights_low", filters_low)
    conv = made.conv(CONV, (weights, columns), (weights, columns_low), (weights_low, columns))
    return made.program(made.output(conv, staged=True))


def schedule(problem: HwcnProblem, config: MmaSplitConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    p = problem
    sch = Schedule(graph(p, config, arch))
    # places in the product: weights, columns, columns_low, weights_low
    filters = Operand(0, widest_vector(p.co, 8), transposed=True, low=3)
    batch = Operand(1, widest_vector(p.n, 8), transposed=True, low=2)
    grid = schedule_product(
        sch, config, arch, PART, filters, batch, widest_vector(p.n, 4), skip_padding=config.skip_padding
    )
    window = inside_window(p) if config.skip_padding else None
    if window:
        next_step(sch, "Order of the blocks: pixels whose window lies within the image come first")
        of_pixel = -(-p.co // config.block_m) * -(-p.n // config.block_n)
        sch.annotate(grid, INSIDE_FIRST, [of_pixel, p.out_w, *window, 0])
    for name in ("data", "filter"):
        schedule_split(sch, name)
    return config.finish(sch.mod)


# (block_m, block_n, warps_m, warps_n); three products for each pair of fragments allow warps half as large as those of
# `mma`, and the sums of a tile beside those of all leave no registers for larger ones
SHAPES = (
    (128, 128, 4, 2),
    (64, 128, 2, 2),
    (128, 64, 4, 1),
    (64, 64, 2, 1),
    (32, 128, 1, 2),
    (128, 32, 4, 1),
    (64, 32, 2, 1),
    (32, 64, 1, 1),
    (16, 128, 1, 4),
    (128, 16, 4, 1),
    (64, 8, 4, 1),
    (16, 8, 1, 1),
)
DEPTHS = ((64, 3), (64, 2), (32, 3), (32, 2))  # (block_k, stages) in the order tried


def default(problem: HwcnProblem, arch: Arch) -> MmaSplitConfig:
    """The tile with the least work on the busiest multiprocessor, and the most stages that fit."""
    p = problem
    shape = min(SHAPES, key=lambda shape: tile_cost(shape, p.co, p.n, p.out_h * p.out_w, arch.device))
    configs = [_config(shape, depth, min_blocks=1) for depth in DEPTHS]
    return next((config for config in configs if config.check(p, arch) is None), configs[-1])


def space(problem: HwcnProblem, arch: Arch) -> Iterator[MmaSplitConfig]:
    more = ((128, 128, 2, 4), (256, 64, 8, 1), (64, 256, 2, 4), (128, 128, 4, 4), (64, 128, 2, 4), (128, 64, 4, 2))
    depths = [(block_k, stages) for block_k in (32, 64) for stages in (2, 3, 4, 5, 6)]
    skips = (True,) if problem.pad == (0, 0) else (True, False)
    for shape, depth, min_blocks, ahead, skip in product((*SHAPES, *more), depths, (0, 1, 2, 3), (False, True), skips):
        config = _config(shape, depth, min_blocks=min_blocks, ahead=ahead, skip_padding=skip)
        room = min_blocks * (config.shared_bytes(PART, problem.dtype, 2) + arch.shared_reserved)
        if room <= arch.shared_sm:
            yield config


def _config(shape: tuple[int, int, int, int], depth: tuple[int, int], **fields: Any) -> MmaSplitConfig:
    block_m, block_n, warps_m, warps_n = shape
    block_k, stages = depth
    return MmaSplitConfig(block_m, block_n, block_k, warps_m, warps_n, stages, **fields)


SCHEDULE = ScheduleSpec(
    name="mma_split",
    summary="float32 as pairs of bfloat16 on tensor cores, errors up to 3 * 2^-16; only if named",
    kinds=("cuda",),
    config=MmaSplitConfig,
    apply=schedule,
    default=default,
    space=space,
    channels_along_rows=True,
    arithmetic=BF16X3,
    graph=graph,
)
