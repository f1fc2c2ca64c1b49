"""NHWC convolution on Hopper: pixels x output channels by TMA and wgmma.

A tile of pixels is a box (n, h, w), which TMA reads shifted by a kernel tap, padding as zeros and strides as element
strides, and writes clipped; where the output channels of a pixel are no multiple of 16 bytes, which TMA needs, ordinary
stores write the pixels, which are contiguous.  The filter (co, kh, kw, ci) has its channels last as the data: both
operands are K-major.  With `halo` a box has the lines below it too that the kernel's further rows look at: these are
offsets into it, of whole eights of pixels, after which a swizzle begins anew.  Patches are a pixel for each row of
theirs (`NhwcProblem.folded`): then a few channels are many, and TMA leaves no columns out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from schedules.core.arch import Arch
from schedules.core.problem import Argument, numpy_dtype
from schedules.core.space import ProductSpace, axis
from schedules.core.tvm import T, tirx
from schedules.hopper import split
from schedules.hopper.config import DEPTHS, SHAPES, HopperConfig, blocks, fitting, plain, stage_channels, work_of
from schedules.hopper.geometry import Load, Operand, Output, Product, Work
from schedules.hopper.pixels import PixelTiles, TilePlace, flattened, is_output, pixel_tiles, place_pixels, whole
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import (
    PATTERN,
    UNIT,
    Runs,
    RunStaging,
    SharedTile,
    Staging,
    TensorMap,
    run_staging,
    staging_for,
)
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

LINE = 128  # bytes of a swizzled row, at most


def _item(problem: NhwcProblem) -> int:
    """Bytes of an element of the output."""
    return numpy_dtype(problem.dtype).itemsize


def operands(problem: NhwcProblem, config: TmaWgmmaConfig) -> tuple[Argument, Argument]:
    """The data and the filter that TMA reads."""
    data, weight, *_ = problem.arguments()
    if config.addends == 1:
        return data, weight
    return split.addends_of(data.name, data.shape), split.addends_of(weight.name, weight.shape)


def _vector(problem: NhwcProblem) -> int:
    """Channels in 16 bytes."""
    return UNIT // _item(problem)


@dataclass(frozen=True)
class TmaWgmmaConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    # a stage has the pixels of one tap along a row, and the rows that the kernel's others look at; else of one tap
    halo: bool = False

    def staging(self, problem: NhwcProblem, slices: int) -> Staging | RunStaging:
        item, columns = _item(problem), self.block_n // slices
        if problem.co % _vector(problem):
            return run_staging(self.rows, columns, problem.co, item)
        return staging_for(self.rows, columns, item, LINE // item)

    @classmethod
    def unfit(cls, problem: NhwcProblem, arch: Arch) -> str | None:
        p = cls.simplest(problem)
        if cls.addends == 1 and p.ci % _vector(p):
            return f"ci={p.ci} is not a multiple of {_vector(p)}, which TMA needs"
        if _item(problem) == 4 and problem.co % _vector(problem):
            return f"co={problem.co} is not a multiple of {_vector(problem)}, which TMA needs"
        return super().unfit(problem, arch)

    def check(self, problem: NhwcProblem, arch: Arch) -> str | None:
        p, reason = self.simplest(problem), self.unfit(problem, arch) or self.check_block(problem.dtype, arch)
        if reason:
            return reason
        if self.halo and (p.kh == 1 or p.stride[0] != 1):
            return f"halo=true is for kernels of several rows at stride 1, not of {p.kh} at {p.stride[0]}"
        work: NhwcWork | None = work_of(problem, self)
        if work is None and self.halo:
            return f"halo=true has no box of an image with block_m={self.block_m} pixels in lines of whole eights"
        if work is None:
            return f"block_m={self.block_m} pixels at stride {problem.stride} are more than TMA reaches over"
        if self.halo and work.loaded.box[1] % self.cluster_n:
            return f"cluster_n={self.cluster_n} does not divide the {work.loaded.box[1]} lines of a stage"
        if self.block_n % (8 * self.cluster_m):
            return f"block_n={self.block_n} is not {self.cluster_m} times a multiple of 8 rows"
        return work.reason(arch)

    @classmethod
    def simplest(cls, problem: NhwcProblem) -> NhwcProblem:
        """The same problem of fewer axes; addends are made of whole pixels."""
        found: NhwcProblem = flattened(problem.folded if cls.addends == 1 else problem, batch=True)
        return found

    def work(self, problem: NhwcProblem) -> NhwcWork | None:
        """None if TMA does not reach over a tile's pixels."""
        tiles = self.tiles(problem)
        return NhwcWork(problem, self, tiles) if tiles else None

    def tiles(self, problem: NhwcProblem) -> PixelTiles | None:
        p, parts = self.simplest(problem), (self.parts, self.cluster_n)
        return pixel_tiles(p, self.block_m, parts, line=PATTERN if self.halo else 1, alone=self.halo)


C = TypeVar("C", bound=TmaWgmmaConfig)


class NhwcWork(Work[TilePlace]):
    config: TmaWgmmaConfig
    channels_along_rows = False

    def __init__(self, problem: NhwcProblem, config: TmaWgmmaConfig, tiles: PixelTiles) -> None:
        p = config.simplest(problem)
        self.given, self.problem, self.config, self.tiles = problem, p, config, tiles
        data, weight = operands(problem, config)
        item, to_tf32 = numpy_dtype(data.dtype).itemsize, data.dtype == "float32"
        ci = p.ci if config.addends == 1 else data.shape[-1]
        self.arguments, self.epilogue = problem.arguments(), p.epilogue
        # rows of the kernel by stages, and in a stage
        self.kernel, rows = ((1, p.kw), p.kh) if config.halo else ((p.kh, p.kw), 1)
        _, _, w = tiles.box
        down = p.dilation[0] * w  # rows of operand a from one kernel row to the next
        self.loaded = tiles.lengthened((rows - 1) * p.dilation[0])
        self.chunks = -(-p.ci // config.block_k)
        self.columns = -(-p.co // (config.block_n * config.cluster_n))  # tiles of a cluster along the channels
        self.clusters = whole(tiles.count, config.cluster_m) * self.columns
        run = min(config.block_k, LINE // item)
        a = SharedTile(config.block_m + (rows - 1) * down, config.block_k, item, run)
        b = SharedTile(config.held_n, config.block_k, item, run)
        n, h, w = self.loaded.part(config.cluster_n)
        taps = p.kh * p.kw
        self.products = tuple(Product(0, row * down * a.swizzle, row * b.nbytes) for row in range(rows))
        self.a = Operand(
            a,
            TensorMap(
                data.name,
                data.dtype,
                (ci, p.w, p.h, p.n),
                (ci * item, p.w * ci * item, p.h * p.w * ci * item),
                (run, w, h, n),
                (1, p.stride[1], p.stride[0], 1),
                a.swizzle,
                to_tf32=to_tf32,
            ),
        )
        self.b = Operand(
            b,
            TensorMap(
                weight.name,
                weight.dtype,
                (ci, taps, p.co),
                (ci * item, taps * ci * item),
                (run, 1, config.block_n // config.cluster_m),
                (1, 1, 1),
                b.swizzle,
                to_tf32=to_tf32,
            ),
            rows,
        )
        if config.addends > 1:
            split.split(self, data, weight)
        # pixels that are stored as runs are whole
        self.slices = 1 if p.co % _vector(p) else config.slices
        self.output = self._output(config.staging(problem, self.slices))

    def _output(self, staging: Staging | RunStaging) -> Output:
        p, item, most = self.problem, _item(self.problem), _vector(self.problem)
        n, h, w = self.tiles.part(self.config.parts)
        target: TensorMap | Runs
        if isinstance(staging, Staging):
            target = TensorMap(
                "output",
                p.dtype,
                (p.co, p.out_w, p.out_h, p.n),
                (p.co * item, p.out_w * p.co * item, p.out_h * p.out_w * p.co * item),
                (staging.width, w, h, n),
                (1, 1, 1, 1),
                staging.swizzle,
                promotion=0,
            )
        elif staging.packed:
            # pixels of a row of the tile; where the tile or the image ends, whole pixels are left out
            line = p.out_w if p is self.given or not p.n_from else self.given.out_h * self.given.out_w
            vector = math.gcd(most, w * p.co, line * p.co)
            target = Runs("output", p.pixels * p.co, w, vector)
        else:
            target = Runs("output", p.pixels * p.co, 1, math.gcd(most, staging.width, p.co))
        return Output(p.dtype, staging, target)

    def of_images(self, n: Expr) -> NhwcWork:
        given = self.given.unchecked(n=n)
        return NhwcWork(given, self.config, replace(self.tiles, problem=self.config.simplest(given)))

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> TilePlace:
        cluster = self.config.cluster_m, self.config.cluster_n
        pixel, column = place_pixels(self.tiles, self.columns, cluster, tile, rank_m, rank_n)
        return TilePlace(pixel, named("channel", column * self.config.block_n))

    def loads_a(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        p, tile, parts = self.problem, self.a.tile, self.config.cluster_n
        n, y, x = self.loaded.of_part(place.pixel, part, parts)
        at = (
            x * p.stride[1] + rx * p.dilation[1] - p.pad[1],
            y * p.stride[0] + ry * p.dilation[0] - p.pad[0],
            n,
        )
        offset = part * (tile.rows // parts * tile.swizzle)
        return [
            Load(offset + run * tile.slab, (chunk * tile.k + run * tile.run, *at)) for run in range(tile.k // tile.run)
        ]

    def loads_b(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.b.tile, self.config.block_n // self.config.cluster_m
        offset = part * (rows * tile.swizzle) if rows < tile.rows else 0
        return [
            Load(
                row * tile.nbytes + offset + run * tile.slab,
                (chunk * tile.k + run * tile.run, (ry + row) * self.kernel[1] + rx, place.channel + part * rows),
            )
            for row, run in product(range(self.b.count), range(tile.k // tile.run))
        ]

    def store_at(self, place: TilePlace, part: Index, column: Index) -> tuple[Index, ...]:
        n, y, x = self.tiles.of_part(place.pixel, part, self.config.parts)
        return place.channel + column, x, y, n

    def run_at(self, place: TilePlace, part: Index, row: Expr, column: Index) -> tuple[Expr, Expr]:
        p, staging = self.problem, self.output.staging
        _, h, w = self.tiles.part(self.config.parts)
        n, y, x = self.tiles.of_part(place.pixel, part, self.config.parts)
        n, y, x = n + T.truncdiv(row, h * w), y + T.truncmod(T.truncdiv(row, w), h), x + T.truncmod(row, w)
        channel = place.channel + column
        there = tirx.all(n < p.n, y < p.out_h, channel < p.co)
        index = named("index", ((n * p.out_h + y) * p.out_w + x) * p.co + channel)
        if isinstance(staging, RunStaging) and staging.packed:
            inside = tirx.min(p.out_w - x, w) * p.co
        else:
            inside = tirx.if_then_else(x < p.out_w, p.co - channel, 0)
        return index, named("inside", tirx.if_then_else(there, inside, 0))

    def channel_at(self, place: TilePlace, part: Index, index: Expr) -> Expr:
        channel, whole = place.channel + index, self.problem.co % (self.config.block_n * self.config.cluster_n) == 0
        return channel if whole else tirx.min(channel, self.problem.co - 1)

    def row_start(self, place: TilePlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        p, parts = self.problem, self.config.parts
        n, y, x = pixel = self.tiles.pixel(self.tiles.of_part(place.pixel, part, parts), row)
        return ((n * p.out_h + y) * p.out_w + x) * p.co, is_output(p, pixel)

    def column_start(self, place: TilePlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        channel = place.channel + column
        return channel, channel < self.problem.co


def boxes(problem: NhwcProblem, pixels: int, blocks: int = 1, _: bool = False) -> int | None:
    """Boxes of as many `pixels` that the output is cut into, for `blocks` at a time; None if TMA reaches over none."""
    tiles = pixel_tiles(flattened(problem.folded, batch=True), pixels, (1,))
    return -(-tiles.count // blocks) * blocks if tiles else None


def default(problem: NhwcProblem, arch: Arch) -> TmaWgmmaConfig:
    return plain(TmaWgmmaConfig(block_k=stage_channels(problem.folded.ci, 64, 16)), problem, arch)


def configs(problem: NhwcProblem, arch: Arch, kind: type[C]) -> Sequence[C]:
    """Every config of `kind` worth trying, legal or not."""
    halos = (False, True) if problem.kh > 1 and problem.stride[0] == 1 else (False,)
    p = problem
    shapes = SHAPES + fitting(lambda m: boxes(p, m) or -(-p.pixels // m), p.co, p.kh * p.kw * p.ci, arch.device)
    tiles = blocks(split.PART if kind.addends > 1 else problem.dtype, arch.device, shapes, filters=True)
    return ProductSpace(kind, tiles, axis("halo", halos), DEPTHS)


def space(problem: NhwcProblem, arch: Arch) -> Sequence[TmaWgmmaConfig]:
    return configs(problem, arch, TmaWgmmaConfig)


SCHEDULE = tma_schedule(
    "tma_wgmma",
    "implicit GEMM on Hopper: TMA with multicast, mbarrier ring, wgmma, persistent",
    TmaWgmmaConfig,
    default,
    space,
    siblings=("wgmma", "mma"),
    ranges=True,
    boxes=boxes,
    folded=True,
)
