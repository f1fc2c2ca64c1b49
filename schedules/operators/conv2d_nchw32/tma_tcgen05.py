"""int8 convolution over NCHW32 on Blackwell: the tiles and loads of `tma_wgmma`, multiplied by tcgen05 into tensor
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.blackwell.config import BlackwellConfig, blocks, plain
from schedules.blackwell.schedule import tcgen05_schedule
from schedules.core.arch import Arch
from schedules.core.space import ProductSpace
from schedules.hopper.config import DEPTHS, stage_channels
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.conv2d_nchw32.tma_wgmma import TmaWgmmaConfig, microseconds, ways


@dataclass(frozen=True)
class TmaTcgen05Config(BlackwellConfig, TmaWgmmaConfig):
    """Tiles of (pixels, output channels, input channels)."""


def default(problem: Nchw32Problem, arch: Arch) -> TmaTcgen05Config:
    return plain(TmaTcgen05Config(block_k=stage_channels(problem.ci_groups * GROUP, 128, 32)), problem, arch)


def space(problem: Nchw32Problem, arch: Arch) -> Sequence[TmaTcgen05Config]:
    return ProductSpace(TmaTcgen05Config, blocks(problem.dtype, arch.device), ways(problem), DEPTHS)


SCHEDULE = tcgen05_schedule(
    "implicit GEMM on Blackwell: TMA, mbarrier ring, int8 tcgen05 into tensor memory by one or two blocks, persistent",
    TmaTcgen05Config,
    default,
    space,
    siblings=("mma",),
    estimate=microseconds,
)
