"""NCHW convolution by 1x1 on Hopper of small images as they lie: whole images x output channels by wgmma.

A chunk of an image's channels is one piece of memory, as are an image's results of neighbouring channels: both move by
bulk copies, which blocks of a cluster share, whatever the image's rows and planes are multiples of.  Threads read
pixels from there, at any stride (`hopper.images`).  Filters come by TMA, as they lie unless they are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace
from schedules.hopper.config import (
    DEPTHS,
    HEIGHTS,
    PING_PONG,
    REGISTERS,
    SHAPES,
    WARPGROUP,
    HopperConfig,
    blocks,
    fitting,
    plain,
    stage_channels,
    work_of,
)
from schedules.hopper.geometry import Load, Operand
from schedules.hopper.images import VECTOR, Images, why_no_images
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import PlaneStaging, SharedTile, in_passes
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import (
    ITEM,
    ROOM,
    PositionPlace,
    PositionWork,
    check_shared_filters,
)
from schedules.operators.conv2d_nchw.positions import Positions, gathered, simplest
from schedules.operators.conv2d_nchw.repack import repack
from schedules.tirx.types import Expr, Index

MOST = 16  # images of a tile, each a copy of its own
HEIGHT = 384  # of a tile at most, of three consumers
# tiles beside those of other kernels, which images would not fit into: (block_m, block_n, consumers)
TALL = (
    *((HEIGHT, n, 3) for n in (32, 48, 64, 80, 96)),
    *((m, n, 1) for m, n in ((128, 64), (128, 96), (128, 128), (192, 64), (192, 96), (256, 48), (256, 64))),
)
TALL_PING_PONG = ((192, 64, 2), (192, 96, 2), (256, 32, 2), (256, 48, 2))


@dataclass(frozen=True)
class TmaWgmmaImagesConfig(HopperConfig):
    """Tiles of (pixels of whole images, output channels, input channels)."""

    whole_images = True
    by_threads = True
    k_steps = (2, 4, 8)  # two sets of fragments take turns
    registers = REGISTERS | {(3, 1): (32, 160)}

    @property
    def fragments(self) -> int:
        """Registers of a thread for operand a, words of two numbers."""
        return self.rows * self.block_k // WARPGROUP // 2

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        p = simplest(problem)
        reason = super().unfit(problem, arch) or why_no_images(p)
        if reason:
            return reason
        if p.out_h * p.out_w > HEIGHT:
            return f"an output image has {p.out_h * p.out_w} pixels, a tile {HEIGHT} at most"
        if p.co % VECTOR:
            return f"co={p.co} is not a multiple of {VECTOR}, whose results are whole 16 bytes"
        return None

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch, more=self.fragments)
        reason = reason or check_shared_filters(self)
        if reason:
            return reason
        p = simplest(problem)
        if p.out_h * p.out_w > self.block_m:
            return f"block_m={self.block_m} is less than the {p.out_h * p.out_w} pixels of an output image"
        if self.block_k % (VECTOR * self.cluster_n):
            return f"block_k={self.block_k} is not {self.cluster_n} blocks times a multiple of {VECTOR}"
        if self.split_k > 1 and self.parts > 1:
            return f"all consumers of a tile store together, which split_k={self.split_k} parts; give consumers=1"
        work: ImagesWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> ImagesWork:
        return ImagesWork(problem, self)


class ImagesWork(PositionWork):
    in_order = False
    most_images = MOST

    def __init__(self, problem: NchwProblem, config: TmaWgmmaImagesConfig) -> None:
        p = simplest(problem)
        super().__init__(p, config, Positions(gathered(p), lines_outside=False))
        self.arguments = problem.arguments()
        tile = SharedTile(config.block_m, config.block_k, ITEM, config.block_m, transposed=True)
        self.a = Operand(tile, Images("data", p, self.images, config.block_k), by_registers=True)
        staging = self.output.staging
        assert isinstance(staging, PlaneStaging)
        # results wait in what memory the stages leave
        taken = config.num_stages * self.stage_bytes + self.beside_stages - config.consumers * staging.nbytes
        room = (ROOM // config.blocks_sm - taken) // config.consumers
        self.output = replace(self.output, staging=in_passes(staging, room))

    def position_at(self, place: PositionPlace) -> Expr:
        return place.position

    def loads_a(self, place: PositionPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        raise NotImplementedError("its images come by no tensor map")


def images_of(problem: NchwProblem, pixels: int) -> int:
    """Whole output images in a tile of so many `pixels`."""
    p = simplest(problem)
    return min(pixels // (p.out_h * p.out_w), MOST)


def stage_bytes(problem: NchwProblem, pixels: int, channels: int) -> int:
    """Of what the images in a tile of so many `pixels`, and `channels`, look at."""
    return Images("data", simplest(problem), images_of(problem, pixels), channels).nbytes


def boxes(problem: NchwProblem, pixels: int, blocks: int = 1, _: bool = False) -> int | None:
    """Tiles of as many `pixels`, for `blocks` at a time; None if there are none."""
    images = images_of(problem, pixels)
    return -(-simplest(problem).n // (images * blocks)) * blocks if images else None


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaImagesConfig:
    p = simplest(problem)
    base = TmaWgmmaImagesConfig(block_k=stage_channels(p.ci, 64, 32), num_stages=2)
    if p.out_h * p.out_w <= 128:
        return plain(base, problem, arch)
    m, consumers = next(((m, c) for m, c in HEIGHTS if m >= p.out_h * p.out_w), (HEIGHT, 3))
    return replace(base, block_m=m, block_n=64, consumers=consumers, cluster_m=1).filling(arch.device)


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaImagesConfig]:
    p = simplest(problem)
    heights = *HEIGHTS, (HEIGHT, 3)
    some = fitting(lambda m: boxes(problem, m) or p.n * p.pixels, p.co, p.reduction, arch.device, heights)
    shapes, turns = (*SHAPES, *TALL, *some), (*PING_PONG, *TALL_PING_PONG)
    words = blocks(p.dtype, arch.device, shapes, filters=True, ping_pong=turns)
    fits = [each for each in words if each["block_m"] >= p.out_h * p.out_w]
    return ProductSpace(TmaWgmmaImagesConfig, fits or words, DEPTHS)


SCHEDULE = tma_schedule(
    "tma_wgmma_images",
    "implicit GEMM on Hopper of 1x1 over small images of any size, whole: bulk copies, wgmma, clusters, persistent",
    TmaWgmmaImagesConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    stage_bytes=stage_bytes,
    boxes=boxes,
    more=lambda problem, work: dict(prepare=partial(repack, work.problem)),
)
