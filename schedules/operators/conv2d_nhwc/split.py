"""NHWC convolution of float32 as products of bfloat16 addends on Hopper: the kernel of `tma_wgmma`; see `hopper.split`.

Addends are as the operands lie, with channels up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedules.core.arch import Arch
from schedules.hopper.config import plain, stage_channels
from schedules.hopper.schedule import split_schedules
from schedules.hopper.split import SplitConfig, split_as_they_lie
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.conv2d_nhwc.tma_wgmma import TmaWgmmaConfig, configs


@dataclass(frozen=True)
class Bf16x3Config(SplitConfig, TmaWgmmaConfig):
    """Tiles of (pixels, output channels, input channels)."""


@dataclass(frozen=True)
class Bf16x6Config(Bf16x3Config):
    """The same of three addends."""

    addends: ClassVar[int] = 3


def default(problem: NhwcProblem, arch: Arch, kind: type[Bf16x3Config]) -> Bf16x3Config:
    return plain(kind(block_k=stage_channels(problem.ci, 32, 16)), problem, arch)


def space(problem: NhwcProblem, arch: Arch, kind: type[Bf16x3Config]) -> Sequence[Bf16x3Config]:
    return configs(problem, arch, kind)


BF16X3, BF16X6 = split_schedules(
    (Bf16x3Config, Bf16x6Config),
    default,
    space,
    siblings=("simt",),
    more=split_as_they_lie,
)
