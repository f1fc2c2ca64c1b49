"""NHWC convolution on Blackwell: the tiles and loads of `tma_wgmma`, multiplied by tcgen05 into tensor memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.blackwell.config import BlackwellConfig, blocks, plain
from schedules.blackwell.schedule import tcgen05_schedule
from schedules.core.arch import Arch
from schedules.core.space import ProductSpace, axis
from schedules.hopper.config import DEPTHS, stage_channels
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.conv2d_nhwc.tma_wgmma import TmaWgmmaConfig


@dataclass(frozen=True)
class TmaTcgen05Config(BlackwellConfig, TmaWgmmaConfig):
    """Tiles of (pixels, output channels, input channels)."""


def default(problem: NhwcProblem, arch: Arch) -> TmaTcgen05Config:
    return plain(TmaTcgen05Config(block_k=stage_channels(problem.folded.ci, 64, 16)), problem, arch)


def space(problem: NhwcProblem, arch: Arch) -> Sequence[TmaTcgen05Config]:
    halos = (False, True) if problem.kh > 1 and problem.stride[0] == 1 else (False,)
    return ProductSpace(TmaTcgen05Config, blocks(problem.dtype, arch.device), axis("halo", halos), DEPTHS)


SCHEDULE = tcgen05_schedule(
    "implicit GEMM on Blackwell: TMA, mbarrier ring, tcgen05 into tensor memory by one or two blocks, persistent",
    TmaTcgen05Config,
    default,
    space,
    siblings=("mma",),
    folded=True,
)
