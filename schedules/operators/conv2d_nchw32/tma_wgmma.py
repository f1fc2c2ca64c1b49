"""int8 convolution over NCHW32 on Hopper: pixels x output channels by TMA and wgmma.

A tile of pixels is a box (n, h, w) of one or more groups of 32 channels; a group of a pixel is a row of 32 bytes.
Neighbours are contiguous, pixels along w and filters along co' of the prepacked (ci/32, kh, kw, co', 32), and TMA moves
up to four as one line of 128 bytes (``shared.folded``): of filters always, of pixels as the config says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.problem import Pair, numpy_dtype
from schedules.core.space import ProductSpace
from schedules.core.tvm import tirx
from schedules.hopper.config import DEPTHS, ROWS, HopperConfig, blocks, plain, stage_channels, work_of
from schedules.hopper.config import SHAPES as BLOCK_SHAPES
from schedules.hopper.cost import product_cycles, rounds
from schedules.hopper.geometry import Load, Operand, Output, Product, Taps, Work
from schedules.hopper.pixels import (
    Box,
    Pixel,
    PixelTiles,
    flattened,
    highest,
    is_output,
    most_images,
    pixel_tiles,
    place_pixels,
    squarest,
    taps_inside,
    whole,
)
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import FOLDS, PATTERN, SharedTile, Staging, TensorMap, staging_for
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named


@dataclass(frozen=True)
class TmaWgmmaConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    dtypes: ClassVar[tuple[str, ...]] = ("int8",)

    block_k: int = 128
    row_pixels: int = 1  # neighbours along w that TMA moves as one line, tiles are as wide; 1 lets them be any width

    # a stage holds all taps of a column of the kernel, and their pixels once: some lines more than those of one tap
    tall: bool = False
    # tiles of as many images as can be, tiles of one place in a row; taps that are padding for all of a tile left out
    skip_padding: bool = False

    @property
    def groups(self) -> int:
        """Groups of input channels in a stage."""
        return self.block_k // GROUP

    def fold(self, problem: Nchw32Problem) -> int:
        """Pixels that arrive as one line: with a stride along w they are not neighbours."""
        return self.row_pixels if problem.stride[1] == 1 else 1

    def staging(self, problem: Nchw32Problem) -> Staging:
        item = numpy_dtype(problem.epilogue.out_dtype).itemsize
        folds = (self.row_pixels if item == 1 else 1, self.fold(problem))
        return staging_for(self.rows, self.block_n, item, GROUP, folds)

    @classmethod
    def unfit(cls, problem: Nchw32Problem, arch: Arch) -> str | None:
        return problem.not_groups or super().unfit(problem, arch)

    def work(self, problem: Nchw32Problem) -> Nchw32Work | None:
        tiles = _tiles(problem, self)
        return Nchw32Work(problem, self, tiles) if tiles else None

    def check(self, problem: Nchw32Problem, arch: Arch) -> str | None:
        if self.row_pixels not in FOLDS:
            return f"row_pixels={self.row_pixels} is not 1, 2 or 4"
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch)
        if reason:
            return reason
        for name in ("cluster_m", "cluster_n"):
            if self.groups > 1 and self.groups % getattr(self, name):
                return f"block_k={self.block_k} is not {name}={getattr(self, name)} times a multiple of {GROUP}"
        if self.groups == 1 and self.block_m // self.cluster_n % (PATTERN * self.row_pixels):
            parts = f"{self.cluster_n} times a multiple of {PATTERN * self.row_pixels}"
            return f"block_m={self.block_m} is not cluster_n={parts} rows, as row_pixels={self.row_pixels} needs"
        if self.tall and not _shares_lines(problem):
            return f"tall=true is for kernels whose rows share pixels, not {problem.kh} at stride {problem.stride[0]}"
        if self.tall and self.groups == 1 and self.cluster > 1:
            return f"tall=true deals out whole groups to a cluster, block_k={self.block_k} is but one; give more"
        work: Nchw32Work | None = work_of(problem, self)
        if work is None:
            return f"block_m={self.block_m} pixels at stride {problem.stride} are more than TMA reaches over"
        if self.skip_padding and problem.pad == (0, 0):
            return "skip_padding=true is for kernels that reach into the padding, here is none"
        if self.skip_padding and self.cluster_m > 1:
            fewest = replace(work.tiles, problem=work.problem.unchecked(n=problem.n_from or problem.n))
            images = [tiles.counts[0] for tiles in (fewest, work.tiles)]
            if images[0] != images[1] or images[0] % self.cluster_m:
                return f"skip_padding=true needs tiles of images in {self.cluster_m}s (cluster_m), not {images[0]}"
        return work.reason(arch)


def _lines(problem: Nchw32Problem) -> tuple[list[int], list[tuple[int, int]]]:
    """Lines that a kernel column looks at from an output line and those below: the first of each class that lies whole
    strides apart; and of each tap the class, and how many strides down."""
    rows = [ry * problem.dilation[0] for ry in range(problem.kh)]
    classes = sorted({row % problem.stride[0] for row in rows})
    return classes, [(classes.index(row % problem.stride[0]), row // problem.stride[0]) for row in rows]


def _shares_lines(problem: Nchw32Problem) -> bool:
    return len(_lines(problem)[0]) < problem.kh


def _tiles(problem: Nchw32Problem, config: TmaWgmmaConfig) -> PixelTiles | None:
    """The boxes of a block's pixels; cut for the cluster only where there is but one group to deal out."""
    shared = config.cluster_n if config.groups == 1 else 1
    width = config.row_pixels if config.row_pixels > 1 else None
    flat = flattened(problem, batch=False, width=config.row_pixels)
    # a tap further down is a line further on in shared memory, where the swizzle has to be the same
    line = PATTERN * config.fold(problem) if config.tall else 1
    prefer = most_images if config.skip_padding else highest if config.tall or width else squarest
    tiles = pixel_tiles(flat, config.block_m, (config.parts, shared), width, line, prefer, lines_outside=True)
    return tiles and replace(tiles, images_first=config.skip_padding)


def _pixels(
    tensor: str,
    dtype: str,
    sizes: Box,
    groups: int,
    box: Box,
    groups_box: int,
    stride: Pair = (1, 1),
    fold: int = 1,
    promotion: int = 2,
) -> TensorMap:
    """Boxes (n, h, w) of a tensor (n, groups, h, w, 32); rows of a box count w, n, h, then groups.

    With a `fold` the pixels of a line of the image are one axis of bytes, and boxes as wide as the fold.
    """
    (n, h, w), (box_n, box_h, box_w) = sizes, box
    row = GROUP * numpy_dtype(dtype).itemsize
    image = h * w * row
    outer = (groups * image, w * row, image)
    if fold > 1:
        assert box_w == fold and stride[1] == 1
        inner: tuple[tuple[int, ...], ...] = ((GROUP * w,), (), (GROUP * fold,), (1,))
    else:
        inner = ((GROUP, w), (row,), (GROUP, box_w), (1, stride[1]))
    return TensorMap(
        tensor,
        dtype,
        (*inner[0], n, h, groups),
        (*inner[1], *outer),
        (*inner[2], box_n, box_h, groups_box),
        (*inner[3], 1, stride[0], 1),
        row * fold,
        promotion,
    )


def _at(pixel: Pixel, group: Expr, fold: int) -> tuple[Index, ...]:
    """Coordinates of a box in the tensor map of `_pixels`."""
    n, y, x = pixel
    return (x * GROUP, n, y, group) if fold > 1 else (0, x, n, y, group)


@dataclass(frozen=True)
class GroupPlace:
    """A block's tile: its first output pixel, and its first group of output channels."""

    pixel: Pixel
    group: Expr


class Nchw32Work(Work[GroupPlace]):
    config: TmaWgmmaConfig
    channels_along_rows = False

    def __init__(self, problem: Nchw32Problem, config: TmaWgmmaConfig, tiles: PixelTiles) -> None:
        p: Any = tiles.problem
        self.given, self.problem, self.config, self.tiles = problem, p, config, tiles
        self.arguments, self.epilogue = problem.arguments(), p.epilogue
        self.classes, taps = _lines(p) if config.tall else ([0], [(0, 0)])
        self.kernel = (p.kh // len(taps), p.kw)
        self.groups_out = config.block_n // GROUP
        self.chunks = -(-p.ci_groups // config.groups)
        self.columns = -(-p.co_groups // (self.groups_out * config.cluster_n))  # tiles of a cluster along the channels
        self.clusters = whole(tiles.count, config.cluster_m) * self.columns
        # each of a cluster loads some of the groups, or some of the rows of the only one
        dealt = config.groups > 1
        fold = config.fold(problem)
        n, h, w = tiles.box if dealt else tiles.part(config.cluster_n)
        more = max(down for _, down in taps)  # lines
        tile = SharedTile(config.block_m + more * n * w, config.block_k, 1, GROUP, fold=fold)
        self.a = Operand(
            tile,
            _pixels(
                "data",
                p.dtype,
                (p.n, p.h, p.w),
                p.ci_groups,
                (n, h + more, w),
                config.groups // config.cluster_n if dealt else 1,
                p.stride,
                fold,
            ),
            len(self.classes),
        )
        self.products = tuple(
            Product(0, number * tile.nbytes + down * n * w * GROUP, tap * config.held_n * GROUP)
            for tap, (number, down) in enumerate(taps)
        )
        dealt = dealt and config.loaders_b == config.cluster_m  # else each block has columns of its own
        rows = config.block_n if dealt else config.block_n // config.cluster_m
        fold = next(fold for fold in FOLDS if rows % (PATTERN * fold) == 0)
        channels = p.co_groups * GROUP
        self.b = Operand(
            SharedTile(config.held_n * len(taps), config.block_k, 1, GROUP, fold=fold),
            TensorMap(
                "filter",
                p.dtype,
                (GROUP * fold, channels // fold, p.kw, p.kh, p.ci_groups),
                (GROUP * fold, channels * GROUP, p.kw * channels * GROUP, p.kh * p.kw * channels * GROUP),
                (
                    GROUP * fold,
                    rows // fold,
                    1,
                    len(taps),
                    config.groups // config.cluster_m if dealt else config.groups,
                ),
                (1, 1, 1, 1, 1),
                GROUP * fold,
            ),
        )
        self.staging = staging = config.staging(problem)
        target = _pixels(
            "output",
            p.epilogue.out_dtype,
            (p.n, p.out_h, p.out_w),
            p.co_groups,
            tiles.part(config.parts),
            1,
            fold=staging.fold,
            promotion=0,
        )
        self.output = Output(p.epilogue.out_dtype, staging, target)

    def of_images(self, n: Expr) -> Nchw32Work:
        tiles = replace(self.tiles, problem=self.problem.unchecked(n=n))
        return Nchw32Work(self.given.unchecked(n=n), self.config, tiles)

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> GroupPlace:
        cluster = self.config.cluster_m, self.config.cluster_n
        if self.problem.co < self.problem.ci:
            # a network's layer before has written much more than this one will, the end of it last: the L2 cache has
            # that still, and after this layer the beginning, which the next but one reads again as its residual
            tile = self.clusters - 1 - tile
        pixel, column = place_pixels(self.tiles, self.columns, cluster, tile, rank_m, rank_n)
        return GroupPlace(pixel, named("group_out", column * self.groups_out))

    def taps(self, place: GroupPlace) -> Taps:
        p = self.problem
        if not self.config.skip_padding:
            return super().taps(place)
        _, y, x = place.pixel
        _, h, w = self.tiles.box
        rows = (0, 1)
        if not self.config.tall:
            rows = taps_inside("ry", y, h, p.h, p.kh, p.pad[0], p.stride[0], p.dilation[0])
        return *rows, *taps_inside("rx", x, w, p.w, p.kw, p.pad[1], p.stride[1], p.dilation[1])

    @property
    def least_taps(self) -> int:
        return 1 if self.config.skip_padding else super().least_taps

    @property
    def mean_taps(self) -> float:
        """Kernel taps of a tile, or columns of them, in the mean."""
        p = self.problem
        if not self.config.skip_padding:
            return math.prod(self.kernel)

        def mean(size: int, out: int, extent: int, k: int, pad: int, stride: int, dilation: int) -> float:
            starts = range(0, out, extent)
            inside = (
                any(0 <= at * stride + tap * dilation - pad < size for at in range(start, start + extent))
                for start in starts
                for tap in range(k)
            )
            return sum(inside) / len(starts)

        _, h, w = self.tiles.box
        columns = mean(p.w, p.out_w, w, p.kw, p.pad[1], p.stride[1], p.dilation[1])
        if self.config.tall:
            return columns
        return columns * mean(p.h, p.out_h, h, p.kh, p.pad[0], p.stride[0], p.dilation[0])

    def loads_a(self, place: GroupPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        p, tile, config = self.problem, self.a.tile, self.config
        first, (n, y, x) = chunk * config.groups, place.pixel
        offset = part * (tile.nbytes // config.cluster_n)
        if config.groups > 1:
            first = first + part * (config.groups // config.cluster_n)
        else:
            n, y, x = self.tiles.of_part(place.pixel, part, config.cluster_n)
        x, y = (
            start * stride + tap * dilation - pad
            for start, stride, tap, dilation, pad in zip(
                (x, y), p.stride[::-1], (rx, ry), p.dilation[::-1], p.pad[::-1], strict=True
            )
        )
        return [
            Load(number * tile.nbytes + offset, _at((n, y + line, x), first, tile.fold))
            for number, line in enumerate(self.classes)
        ]

    def loads_b(self, place: GroupPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, config = self.b.tile, self.config
        first, line = chunk * config.groups, place.group * (GROUP // tile.fold)
        own = config.loaders_b < config.cluster_m
        if config.groups > 1 and not own:
            first = first + part * (config.groups // config.cluster_m)
        else:
            line = line + part * (config.block_n // config.cluster_m // tile.fold)
        return [Load(0 if own else part * (tile.nbytes // config.cluster_m), (0, line, rx, ry, first))]

    def store_at(self, place: GroupPlace, part: Index, column: int) -> tuple[Index, ...]:
        pixel = self.tiles.of_part(place.pixel, part, self.config.parts)
        return _at(pixel, place.group + column // GROUP, self.staging.fold)

    def channel_at(self, place: GroupPlace, part: Index, index: Expr) -> Expr:
        channel, groups = place.group * GROUP + index, self.problem.co_groups
        whole = groups % (self.groups_out * self.config.cluster_n) == 0
        return channel if whole else tirx.min(channel, groups * GROUP - 1)

    def row_start(self, place: GroupPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        """Where group 0 of the row's pixel begins."""
        p = self.problem
        n, y, x = pixel = self.tiles.pixel(self.tiles.of_part(place.pixel, part, self.config.parts), row)
        return ((n * p.co_groups * p.out_h + y) * p.out_w + x) * GROUP, is_output(p, pixel)

    def column_start(self, place: GroupPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        p, group = self.problem, place.group + tirx.truncdiv(column, GROUP)
        return group * (p.out_h * p.out_w * GROUP) + tirx.truncmod(column, GROUP), group < p.co_groups


def microseconds(work: Nchw32Work, device: Device) -> float:
    """About how long the kernel takes on `device`, to compare configs by: for each tile, or one of each of a
    multiprocessor's blocks, the longest of multiplying and finishing, of what TMA moves in lines, and in bytes from L2,
    and some of the others; for blocks that do not share a tile.

    A block's consumers finish a tile together and do not multiply meanwhile; another block may, or with `ping_pong`
    another consumer, or on Blackwell who multiplies.  Filters that stay are loaded in no time.
    """
    config, staging, t = work.config, work.staging, device.timings.lines
    shared = ((work.a, config.cluster_n), (work.b, config.cluster_m))[: 1 if config.stationary else 2]
    area = config.block_m * config.block_n
    products = len(work.products) * config.groups * config.block_m // ROWS
    multiply = products * product_cycles(config)
    lines = sum(operand.nbytes / operand.tile.swizzle / operand.tile.fold / parts for operand, parts in shared)
    loaded = sum(operand.nbytes / parts for operand, parts in shared)
    stages = work.mean_taps * work.chunks
    stored = area * staging.item * (2 if work.added else 1)  # a residual comes as the results leave
    multiplying, finishing, blocks = stages * (multiply + t.step), area * t.finish, config.blocks_sm
    alone = (multiplying + finishing) * config.parts / config.consumers
    if config.multiplies_apart and config.overlaps:
        alone = max(multiplying, finishing)
    busy = (
        max(blocks * multiplying, blocks * finishing, alone),
        blocks * t.line * (stages * lines + stored / staging.row_bytes / staging.fold),
        blocks * (stages * loaded + stored) / t.l2,
    )
    tile = (1 - t.hinder) * max(busy) + t.hinder * sum(busy)
    too_few = t.too_few if config.num_stages < 3 else 1
    return rounds(config, work.clusters, device) * tile * too_few * device.timings.cycle / 1000


# few channels want many pixels
SHAPES = (*BLOCK_SHAPES, (384, 64, 3), (512, 64, 2))
# for two blocks of a multiprocessor, of which one finishes its tile while the other multiplies
PAIRED = ((256, 64, 1), (128, 128, 1))


def default(problem: Nchw32Problem, arch: Arch) -> TmaWgmmaConfig:
    return plain(TmaWgmmaConfig(block_k=stage_channels(problem.ci_groups * GROUP, 128, 32)), problem, arch)


def ways(problem: Nchw32Problem) -> list[dict[str, Any]]:
    """What may serve the problem beside the sizes of its tiles."""
    ways: list[dict[str, Any]] = [dict(row_pixels=row) for row in sorted(FOLDS)]
    if _shares_lines(problem):
        ways += [dict(way, tall=True) for way in ways]
    if problem.pad != (0, 0):
        ways.append(dict(skip_padding=True))
    return ways


def space(problem: Nchw32Problem, arch: Arch) -> Sequence[TmaWgmmaConfig]:
    found = blocks(problem.dtype, arch.device, SHAPES + PAIRED, filters=True)
    return ProductSpace(TmaWgmmaConfig, found, ways(problem), DEPTHS)


SCHEDULE = tma_schedule(
    "tma_wgmma",
    "implicit GEMM on Hopper: TMA with multicast, mbarrier ring, int8 wgmma, persistent",
    TmaWgmmaConfig,
    default,
    space,
    siblings=("mma",),
    estimate=microseconds,
    ranges=True,
)
