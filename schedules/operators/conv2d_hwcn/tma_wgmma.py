"""HWCN convolution on Hopper: for each output pixel, output channels x batch by TMA and wgmma.

Both operands have their reduction axis outside (MN-major), in runs of 64 rows of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.hopper.config import stage_channels
from schedules.hopper.geometry import Load, Operand, Output
from schedules.hopper.shared import SharedTile, Staging, TensorMap, staging_for
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.pixel_work import (
    PixelConfig,
    PixelPlace,
    PixelWork,
    data_map,
    quickest,
    runs_of,
    with_and_without_padding,
)

if TYPE_CHECKING:
    import tvm

    from schedules.tirx.types import Expr, Index

DTYPES = ("float16", "bfloat16")
ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
RUN = 64  # rows of an operand side by side in 128 bytes


@dataclass(frozen=True)
class TmaWgmmaConfig(PixelConfig):
    """Tiles of (output channels, batch, input channels)."""

    def staging(self) -> Staging:
        return staging_for(self.rows, self.block_n, ITEM, RUN)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        if problem.dtype not in DTYPES:
            return f"dtype={problem.dtype} is not {' or '.join(DTYPES)}"
        for name in ("n", "co"):
            if getattr(problem, name) % VECTOR:
                return f"{name}={getattr(problem, name)} is not a multiple of {VECTOR}, which TMA needs"
        reason = self.check_block(problem.dtype, arch)
        if reason:
            return reason
        for name, size, cluster, parts in (
            ("block_m", self.block_m, "cluster_n", self.cluster_n),
            ("block_n", self.block_n, "cluster_m", self.cluster_m),
        ):
            if size % (RUN * parts):
                return f"{name}={size} is not {cluster}={parts} times a multiple of {RUN}"
        return HwcnWork(problem, self).reason(arch)


class HwcnWork(PixelWork):
    config: TmaWgmmaConfig
    channels_along_rows = True

    def __init__(self, problem: HwcnProblem, config: TmaWgmmaConfig) -> None:
        p = problem
        super().__init__(p, config)
        self.a = Operand(
            SharedTile(config.block_m, config.block_k, ITEM, RUN, transposed=True),
            TensorMap(
                "filter",
                p.dtype,
                (p.co, p.ci, p.kh * p.kw),
                (p.co * ITEM, p.ci * p.co * ITEM),
                (RUN, config.block_k, 1),
                (1, 1, 1),
                RUN * ITEM,
            ),
        )
        b = SharedTile(config.block_n, config.block_k, ITEM, RUN, transposed=True)
        self.b = Operand(b, data_map(p, b))
        staging = config.staging()
        target = TensorMap(
            "output",
            p.dtype,
            (p.n, p.co, p.out_h * p.out_w),
            (p.n * ITEM, p.co * p.n * ITEM),
            (staging.width, config.rows, 1),
            (1, 1, 1),
            staging.row_bytes,
            promotion=0,
        )
        self.output = Output(p.dtype, staging, target)

    def loads_a(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        at = (chunk * self.a.tile.k, self.tap(ry, rx))
        return runs_of(self.a.tile, part, self.config.cluster_n, place.row, at)

    def loads_b(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        at = (chunk * self.b.tile.k, *self.data_at(place, ry, rx))
        return runs_of(self.b.tile, part, self.config.cluster_m, place.column, at)

    def store_at(self, place: PixelPlace, part: Index, column: int) -> tuple[Index, ...]:
        return place.column + column, place.row + part * self.config.rows, place.pixel


def schedule(problem: HwcnProblem, config: TmaWgmmaConfig, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (h, w, ci, n), filter (kh, kw, ci, co), the terms of the epilogue, output (out_h,
    out_w, co, n)."""
    from schedules.hopper.program import program

    return program(HwcnWork(problem, config))


def default(problem: HwcnProblem, arch: Arch) -> TmaWgmmaConfig:
    return quickest(problem, arch, TmaWgmmaConfig(block_k=stage_channels(problem.ci, 64, 16)), HwcnWork)


def space(problem: HwcnProblem, arch: Arch) -> Sequence[TmaWgmmaConfig]:
    return with_and_without_padding(TmaWgmmaConfig, problem.dtype, arch.device)


SCHEDULE = ScheduleSpec(
    name="tma_wgmma",
    summary="a product for each pixel on Hopper: TMA with multicast, mbarrier ring, wgmma, persistent",
    kinds=("cuda",),
    config=TmaWgmmaConfig,
    apply=schedule,
    default=default,
    space=space,
    channels_along_rows=True,
    tirx=WrittenInTirx(
        reason="one warp loads by TMA while others multiply by wgmma, and the blocks of a cluster share loads; "
        "the schedule language gives all threads the same loops, and has neither mbarriers nor clusters",
        siblings=("mma",),
    ),
)
