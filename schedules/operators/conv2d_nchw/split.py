"""NCHW convolution of float32 as products of bfloat16 addends on Hopper: the kernel of `tma_wgmma_turned`; see
`hopper.split`.

What is split is turned too: addends are in lines of `Positions`, channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace
from schedules.core.tvm import T
from schedules.hopper.config import DEPTHS, blocks, plain, stage_channels
from schedules.hopper.schedule import split_schedules
from schedules.hopper.split import PART, Source, SplitConfig, split_tensors
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.tma_wgmma_turned import TurnedConfig, TurnedWork, lines_of
from schedules.tirx.types import Expr


@dataclass(frozen=True)
class Bf16x3Config(SplitConfig, TurnedConfig):
    """Tiles of (pixels, output channels, input channels)."""


@dataclass(frozen=True)
class Bf16x6Config(Bf16x3Config):
    """The same of three addends."""

    addends: ClassVar[int] = 3


def sources(work: TurnedWork) -> list[Source]:
    """What lines of the addends' tensors are in those that are given."""
    p, positions = work.problem, work.positions
    pixels, taps = p.h * p.w, p.kh * p.kw

    def pixel(number: Expr) -> tuple[Expr, Expr, Expr | None]:
        image, at, there = positions.source(number)
        return number, image * (p.ci * pixels) + at, there

    def tap(number: Expr) -> tuple[Expr, Expr, Expr | None]:
        if p.packed:
            return number, number * p.ci, None
        # neighbours in the tensor are taps of a channel
        channel, at = T.truncdiv(number, taps), T.truncmod(number, taps)
        return at * p.co + channel, channel * (p.ci * taps) + at, None

    return [
        Source("data", positions.planes * positions.data, p.ci, pixels, pixel),
        Source("filter", taps * p.co, p.ci, 1 if p.packed else taps, tap),
    ]


def default(problem: NchwProblem, arch: Arch, kind: type[Bf16x3Config]) -> Bf16x3Config:
    return plain(kind(block_k=stage_channels(problem.ci, 32, 16)), problem, arch)


def space(problem: NchwProblem, arch: Arch, kind: type[Bf16x3Config]) -> Sequence[Bf16x3Config]:
    return ProductSpace(kind, blocks(PART, arch.device, filters=True), lines_of(problem), DEPTHS)


BF16X3, BF16X6 = split_schedules(
    (Bf16x3Config, Bf16x6Config),
    default,
    space,
    siblings=("simt", "direct"),
    more=lambda problem, work: dict(prepare=partial(split_tensors, work, sources(work))),
)
