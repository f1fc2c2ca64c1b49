"""NCHW convolution by 1x1 on Hopper: pixels x output channels, both operands as they lie, by TMA and wgmma.

Rows of a tile are slabs of pixels side by side of a plane, of whatever images: slabs come MN-major, as wgmma takes
operand a of 16 bits too, and the filters K-major.  So tiles have any multiple of 16 output channels, where those of
`tma_wgmma`, whose rows are channels, have multiples of 64; and a plane's end wastes part of a slab, not of a tile.
Results leave by TMA, a slab of each channel, turned by stmatrix.

Sources: PTX ISA, "wgmma.mma_async" (the transposes of operands in shared memory) and "stmatrix".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from schedules.core.arch import Arch
from schedules.core.space import ProductSpace
from schedules.core.tvm import T, tirx
from schedules.hopper.config import (
    DEPTHS,
    K_STEPS,
    SHAPES,
    HopperConfig,
    blocks,
    fitting,
    plain,
    stage_channels,
    work_of,
)
from schedules.hopper.geometry import Load, Operand, Output
from schedules.hopper.pixels import flattened, whole
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import SharedTile, TensorMap, line_staging
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.position_work import ITEM, LINE, FilterWork, check_shared_filters
from schedules.operators.conv2d_nchw.repack import repack
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

SLAB = LINE // ITEM  # pixels
VECTOR = 8  # pixels in 16 bytes


@dataclass(frozen=True)
class TmaWgmmaSlabsConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    @property
    def slabs(self) -> int:
        return self.block_m // SLAB

    @property
    def loaders_slabs(self) -> int:
        """Blocks of a row of the cluster that each load slabs of their own, of those that they share."""
        return next(n for n in (4, 2, 1) if self.cluster_n % n == 0 and self.slabs % n == 0)

    @property
    def loaders_channels(self) -> int:
        """Blocks that each load a part of a slab's channels."""
        return self.cluster_n // self.loaders_slabs

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        p = flattened(problem, batch=False)
        if (p.kh, p.kw, p.stride, p.pad, p.h) != (1, 1, (1, 1), (0, 0), 1):
            return f"a kernel of {p.kh}x{p.kw}, stride={p.stride}, pad={p.pad} looks at more than a pixel; give 1x1"
        if p.w % VECTOR:
            return f"an image has {p.w} pixels, TMA needs a multiple of {VECTOR}"
        return super().unfit(problem, arch)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch) or check_shared_filters(self)
        if reason:
            return reason
        if self.block_k % (8 * self.loaders_channels):
            return f"block_k={self.block_k} is not {self.loaders_channels} blocks times a multiple of 8"
        work: SlabWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> SlabWork:
        return SlabWork(problem, self)


@dataclass(frozen=True)
class SlabPlace:
    """A block's tile: the number of its first slab, of all images, and its first output channel."""

    slab: Expr
    channel: Expr


class SlabWork(FilterWork[SlabPlace]):
    config: TmaWgmmaSlabsConfig

    def __init__(self, problem: NchwProblem, config: TmaWgmmaSlabsConfig) -> None:
        p = flattened(problem, batch=False)
        super().__init__(p, config)
        self.given, self.arguments = problem, problem.arguments()
        self.of_image = slabs_of_image(p)
        self.clusters = whole(p.n * self.of_image, config.slabs * config.cluster_m) * self.columns
        plane = p.w * ITEM
        tile = SharedTile(config.block_m, config.block_k, ITEM, SLAB, transposed=True)
        box = (SLAB, config.block_k // config.loaders_channels, 1)
        data = TensorMap("data", p.dtype, (p.w, p.ci, p.n), (plane, p.ci * plane), box, (1, 1, 1), SLAB * ITEM)
        self.a = Operand(tile, data)
        self.leave(self._output)

    def _output(self, room: int) -> Output:
        """By TMA, with so many bytes for a consumer's results to wait in."""
        p, config = self.problem, self.config
        staging = line_staging(config.rows, config.block_n // self.slices, ITEM, SLAB, room)
        plane, box = p.w * ITEM, (SLAB, staging.width, 1)
        sizes, strides, line = (p.w, p.co, p.n), (plane, p.co * plane), staging.row_bytes
        return Output(p.dtype, staging, TensorMap("output", p.dtype, sizes, strides, box, (1, 1, 1), line, promotion=0))

    def of_images(self, n: Expr) -> SlabWork:
        return SlabWork(self.given.unchecked(n=n), self.config)

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> SlabPlace:
        config = self.config
        column = T.truncmod(tile, self.columns) * config.cluster_n + rank_n
        row = T.truncdiv(tile, self.columns) * config.cluster_m + rank_m
        return SlabPlace(named("slab", row * config.slabs), named("channel", column * config.block_n))

    def _pixel(self, slab: Expr) -> tuple[Expr, Expr]:
        """The image of a slab, and its first pixel."""
        return T.truncdiv(slab, self.of_image), T.truncmod(slab, self.of_image) * SLAB

    def loads_a(self, place: SlabPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        config, tile = self.config, self.a.tile
        each, channels = config.slabs // config.loaders_slabs, config.block_k // config.loaders_channels
        of_slabs, of_channels = T.truncdiv(part, config.loaders_channels), T.truncmod(part, config.loaders_channels)
        loads = []
        for number in range(each):
            slab = of_slabs * each + number
            n, x = self._pixel(place.slab + slab)
            offset = slab * tile.slab + of_channels * (channels * tile.swizzle)
            loads.append(Load(offset, (x, chunk * tile.k + of_channels * channels, n)))
        return loads

    def loads_b(self, place: SlabPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        return self.filters_of(place.channel, T.int32(0), chunk, part)

    def store_at(self, place: SlabPlace, part: Index, column: Index) -> tuple[Index, ...]:
        raise NotImplementedError("its results leave by lines")

    def line_at(self, place: SlabPlace, part: Index, row: int, column: Index) -> tuple[Index, ...]:
        n, x = self._pixel(place.slab + (part * (self.config.rows // SLAB) + row // SLAB))
        return x, place.channel + column, n

    def channel_at(self, place: SlabPlace, part: Index, index: Expr) -> Expr:
        return self.channel_of(place.channel, index)

    def row_start(self, place: SlabPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        p, row = self.problem, part * self.config.rows + row
        n, x = self._pixel(place.slab + T.truncdiv(row, SLAB))
        x = x + T.truncmod(row, SLAB)
        return n * (p.co * p.w) + x, tirx.all(n < p.n, x < p.w)

    def column_start(self, place: SlabPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        return self.plane_of(place.channel + column)


def slabs_of_image(problem: NchwProblem) -> int:
    """Slabs of an image, the last of which may be a part."""
    return -(-(problem.h * problem.w) // SLAB)


def boxes(problem: NchwProblem, pixels: int, blocks: int = 1, _: bool = False) -> int | None:
    """Tiles of as many `pixels`, for `blocks` at a time; None if there are none."""
    if pixels % SLAB:
        return None
    slabs = problem.n * slabs_of_image(problem)
    return -(-slabs // (pixels // SLAB * blocks)) * blocks


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaSlabsConfig:
    return plain(TmaWgmmaSlabsConfig(block_k=stage_channels(problem.ci, 64, 32)), problem, arch)


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaSlabsConfig]:
    p = problem
    shapes = fitting(lambda m: boxes(p, m) or 1, p.co, p.reduction, arch.device)
    k_steps = (1, *K_STEPS) if p.ci % 32 else K_STEPS  # where part of the last 32 channels would be zeros
    words = blocks(p.dtype, arch.device, (*SHAPES, *shapes), filters=True, k_steps=k_steps)
    return ProductSpace(TmaWgmmaSlabsConfig, words, DEPTHS)


SCHEDULE = tma_schedule(
    "tma_wgmma_slabs",
    "implicit GEMM on Hopper of 1x1, pixels x channels as they lie: TMA, wgmma, clusters, persistent",
    TmaWgmmaSlabsConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    more=lambda problem, work: dict(prepare=partial(repack, work.problem)),
    ranges=True,
    boxes=boxes,
)
