"""HWCN convolution of float32 as products of bfloat16 addends on Hopper: the kernel of `tma_wgmma`; see `hopper.split`.

Addends are as the operands lie, with images and output channels up to a multiple of 8: wgmma takes bfloat16 MN-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from schedules.core.arch import Arch
from schedules.hopper.config import plain, stage_channels
from schedules.hopper.cost import estimate_of
from schedules.hopper.split import PART, SplitConfig, contiguous, split_schedules, split_tensors
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.pixel_work import with_and_without_padding
from schedules.operators.conv2d_hwcn.tma_wgmma import BoxConfig, HwcnWork

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class Bf16x3Config(SplitConfig, BoxConfig):
    """Tiles of (output channels, images and pixels, input channels)."""


@dataclass(frozen=True)
class Bf16x6Config(Bf16x3Config):
    """The same of three addends."""

    addends: ClassVar[int] = 3


def schedule(problem: HwcnProblem, config: Bf16x3Config, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (h, w, ci, n), filter (kh, kw, ci, co), the terms of the epilogue, output (out_h,
    out_w, co, n)."""
    from schedules.hopper.program import program

    work = HwcnWork(problem, config)
    sources = [contiguous(each.name, each.shape) for each in problem.arguments()[:2]]
    return program(work, prepare=partial(split_tensors, work, sources))


def default(problem: HwcnProblem, arch: Arch, kind: type[Bf16x3Config]) -> Bf16x3Config:
    return plain(kind(block_k=stage_channels(problem.ci, 32, 16)), problem, arch)


def space(problem: HwcnProblem, arch: Arch, kind: type[Bf16x3Config]) -> Sequence[Bf16x3Config]:
    return with_and_without_padding(kind, PART, arch.device)


BF16X3, BF16X6 = split_schedules(
    (Bf16x3Config, Bf16x6Config),
    schedule,
    default,
    space,
    estimate_of(HwcnWork),
    siblings=("simt", "mma_split"),
    channels_along_rows=True,
)
