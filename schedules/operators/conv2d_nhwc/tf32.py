"""NHWC convolution of float32 in TF32 on Hopper: the kernel of `tma_wgmma`, whose operands TMA rounds as it loads them.

Both are rounded to nearest, to 10 bits of mantissa: up to 2^-10 of the sum of the absolute products is lost.  Hence it
is only used where it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedules.core.arch import Arch
from schedules.hopper.config import plain, stage_channels
from schedules.hopper.schedule import tf32_schedule
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.conv2d_nhwc.tma_wgmma import TmaWgmmaConfig, configs


@dataclass(frozen=True)
class Tf32Config(TmaWgmmaConfig):
    """Tiles of (pixels, output channels, input channels)."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    block_k: int = 32


def default(problem: NhwcProblem, arch: Arch) -> Tf32Config:
    return plain(Tf32Config(block_k=stage_channels(problem.folded.ci, 32, 8)), problem, arch)


def space(problem: NhwcProblem, arch: Arch) -> Sequence[Tf32Config]:
    return configs(problem, arch, Tf32Config)


SCHEDULE = tf32_schedule(Tf32Config, default, space, siblings=("simt",), folded=True)
