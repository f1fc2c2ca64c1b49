"""Rows of images that are no whole 16 bytes, read by TMA where they lie: the reduction of a tile in phases.

A box of TMA begins at a multiple of 16 bytes.  A row that does not comes with the last images of the row before it, up
to seven, and its own stand as many columns late.  Every second, fourth or eighth channel's are equally late.  A phase
multiplies the channels of one lateness, latest first; between phases the sums move to the front
(`hopper.geometry.Shifts`), and behind the last one an image's sums stand in the column that is its own.
"""

from __future__ import annotations

import math

from schedules.core.problem import Argument
from schedules.core.tvm import T
from schedules.hopper.config import K_BYTES
from schedules.hopper.geometry import Shifts
from schedules.hopper.shared import TensorMap
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.image_tiles import UNIT, ImageTiles
from schedules.tirx.types import Expr

ITEM = 2  # bytes
WIDEST = 256  # columns of a wgmma


def phases(problem: HwcnProblem) -> int:
    """How many, 1 if rows are whole 16 bytes; a power of two."""
    return UNIT // math.gcd(problem.n, UNIT)


def columns(problem: HwcnProblem) -> int:
    """In which the images of a row may stand."""
    return problem.n + UNIT - math.gcd(problem.n, UNIT)


def serve(problem: HwcnProblem) -> bool:
    """Whether the problem can be multiplied so: a phase has whole steps of the reduction, a tile all images."""
    steps = phases(problem) * (K_BYTES // ITEM)
    return phases(problem) > 1 and problem.n > UNIT and columns(problem) <= WIDEST and problem.ci % steps == 0


def channel(problem: HwcnProblem, phase: Expr) -> Expr:
    """The first channel of a phase: late by as many images as there are phases to come, times what sums move by."""
    count = phases(problem)
    odd = problem.n // math.gcd(problem.n, UNIT) % count  # its own inverse
    return T.truncmod((count - 1 - phase) * odd, count)


def late(problem: HwcnProblem, channel: Expr) -> Expr:
    """From where a row of `data_map` is read so that it begins at 16 bytes."""
    return T.truncdiv(channel * (problem.n % UNIT), UNIT) * UNIT


def data_map(problem: HwcnProblem, data: Argument, box: tuple[int, int, int, int], swizzle: int) -> TensorMap:
    """Data (h, w, ci / phases, phases, n) in boxes of images, channels of a phase, columns and rows.

    A row begins at the last 16 bytes at which it could, were its phase's and those before it this many apart; it ends
    behind the last images that stand in it.
    """
    p, count, apart = problem, phases(problem), problem.n // UNIT * UNIT
    own = p.ci * p.n
    images, channels, w, h = box
    return TensorMap(
        data.name,
        data.dtype,
        (p.n + (count - 1) * (p.n - apart), count, p.ci // count, p.w, p.h),
        (apart * ITEM, count * p.n * ITEM, own * ITEM, p.w * own * ITEM),
        (images, 1, channels, w, h),
        (1, 1, 1, p.stride[1], p.stride[0]),
        swizzle,
    )


def filter_map(problem: HwcnProblem, weight: Argument, run: int, channels: int) -> TensorMap:
    """The filter (kh * kw, ci / phases, phases, co) in boxes of output channels and channels of a phase."""
    p, count, co = problem, phases(problem), weight.shape[-1]
    return TensorMap(
        weight.name,
        weight.dtype,
        (co, count, p.ci // count, p.kh * p.kw),
        (co * ITEM, count * co * ITEM, p.ci * co * ITEM),
        (run, 1, channels, 1),
        (1, 1, 1, 1),
        run * ITEM,
    )


def shifts(problem: HwcnProblem, tiles: ImageTiles, places: int) -> Shifts:
    """Of a tile of `places`, of which an image's neighbours may lie in another run."""
    beside = tiles.box[1] * tiles.box[2] * tiles.run  # from a run to the next of the same pixel
    following: list[int | None] = []
    for first in range(0, places, UNIT):
        inside = first % tiles.run + UNIT < tiles.run
        then = first + UNIT if inside else first - first % tiles.run + beside
        following.append(then // UNIT if then < places else None)
    return Shifts(phases(problem), math.gcd(problem.n, UNIT), tuple(following))
