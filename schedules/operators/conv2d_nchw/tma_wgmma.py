"""NCHW convolution on Hopper: output channels x pixels by TMA and wgmma, taps along a row added up in registers.

TMA cannot load pixels shifted along their contiguous axis by less than 16 bytes.  So each step of the reduction, a
kernel row and a chunk of channels, loads its pixels once, unshifted, and multiplies them with the filters of all kw
taps of the row, into kw sets of sums; the epilogue adds these up, each shifted by its tap.  The products are those of
an ordinary implicit GEMM and the loads of pixels kw times fewer, at kw times the sums.  Columns of wgmma are pixels,
so that a shift is a choice of registers and a shuffle.  With `halo` a step is a chunk of channels: the rows that all
of the kernel looks at are loaded once, the kernel's rows are offsets into them, and a stage has the filters of all
taps.

The filter comes packed, (kh, kw, co, ci), rows of ci (K-major), or is packed by a kernel before (`repack`); pixels lie
as they are (MN-major), whole image rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.space import ProductSpace, Words, axis
from schedules.core.tvm import tirx
from schedules.hopper.config import DEPTHS, REGISTERS, HopperConfig, clusters, first_legal
from schedules.hopper.geometry import Load, Operand, Output, Product, Work
from schedules.hopper.pixels import Pixel, TilePlace, flattened, is_output, place_pixels, whole
from schedules.hopper.rows import GROUP, RowTiles, output_map, row_tiles, shifts
from schedules.hopper.schedule import SHIFTING, tma_schedule
from schedules.hopper.shared import SharedTile, Staging, TensorMap, staging_for
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.repack import filter_argument, repack, workspace_of
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

DTYPES = ("float16", "bfloat16")
ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
ADDRESSING = 40  # registers beside the accumulators, about; less than others, as columns have no bias


@dataclass(frozen=True)
class TmaWgmmaConfig(HopperConfig):
    """Tiles of (output channels, pixels, input channels)."""

    block_n: int = 128
    consumers_n: int = 1  # consumers side by side along the pixels

    halo: bool = False  # pixels are loaded once for all kernel rows, with the rows around them; else once for each

    def rows_of(self, problem: NchwProblem) -> RowTiles | None:
        """The output pixels of a block; None if there are no such tiles."""
        if self.consumers_n < 1 or self.block_n < self.consumers_n:
            return None
        return row_tiles(flattened(problem, batch=False), self.columns, self.consumers_n, images=not self.halo)

    def loaded(self, rows: RowTiles) -> RowTiles:
        """The pixels of a stage."""
        return rows.with_halo() if self.halo else rows

    def staging(self, rows: RowTiles) -> Staging:
        stored = self.columns - sum(rows.margins)
        return staging_for(self.rows, stored, ITEM, rows.run)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        p = flattened(problem, batch=False)
        if p.dtype not in DTYPES:
            return f"dtype={p.dtype} is not {' or '.join(DTYPES)}"
        for name, size in (("ci", p.ci), ("w", p.w), ("out_w", p.out_w)):
            if size % VECTOR:
                return f"{name}={size} is not a multiple of {VECTOR}, which TMA needs"
        if p.stride[1] != 1:
            return f"stride={p.stride} moves {p.stride[1]} pixels along a row, sums can be shifted only at 1"
        reach = max(map(abs, shifts(p)))
        if reach > GROUP:
            return f"pad={p.pad[1]}, dilation={p.dilation[1]} reach over {reach} pixels, sums shift by {GROUP} at most"
        if self.halo and p.stride[0] != 1:
            return f"halo={self.halo} at stride={p.stride} would load rows that no tap looks at"
        rows = self.rows_of(p)
        reason = self.check_block(p.dtype, arch, p.kw, ADDRESSING)
        if reason:
            return reason
        if rows is None:
            return (
                f"block_n={self.block_n} for consumers_n={self.consumers_n} holds no whole number of rows of"
                f" {max(p.w, p.out_w)} pixels"
            )
        if not self.loaded(rows).cut(self.cluster_m) and self.block_k % (8 * self.cluster_m):
            return f"block_k={self.block_k} is not cluster_m={self.cluster_m} times a multiple of 8"
        if self.block_m % (8 * self.cluster_n):
            return f"block_m={self.block_m} is not cluster_n={self.cluster_n} times a multiple of 8"
        return NchwWork(problem, self, rows).reason(arch)


class NchwWork(Work[TilePlace]):
    config: TmaWgmmaConfig
    channels_along_rows = True

    def __init__(self, problem: NchwProblem, config: TmaWgmmaConfig, rows: RowTiles) -> None:
        p = flattened(problem, batch=False)
        self.given, self.problem, self.config, self.rows = problem, p, config, rows
        self.arguments, self.epilogue = problem.arguments(), p.epilogue
        self.workspace = workspace_of(problem)
        self.loaded = config.loaded(rows)
        stages, taps = (1, p.kh) if config.halo else (p.kh, 1)  # kernel rows by stages, and in a stage
        self.kernel = (stages, 1)
        self.margin = rows.margins[0]
        self.chunks = -(-p.ci // config.block_k)
        self.channels = -(-p.co // (config.block_m * config.cluster_m))  # tiles of a cluster along the channels
        self.clusters = whole(rows.tiles.count, config.cluster_n) * self.channels
        run = min(config.block_k, 128 // ITEM)
        self.a = Operand(
            SharedTile(config.block_m, config.block_k, ITEM, run),
            TensorMap(
                filter_argument(problem).name,
                p.dtype,
                (p.ci, p.co, p.kh * p.kw),
                (p.ci * ITEM, p.co * p.ci * ITEM),
                (run, config.block_m // config.cluster_n, 1),
                (1, 1, 1),
                run * ITEM,
            ),
            taps * p.kw,
        )
        image = p.h * p.w * ITEM
        self.b = Operand(
            SharedTile(self.loaded.pixels, config.block_k, ITEM, rows.run, transposed=True),
            TensorMap(
                "data",
                p.dtype,
                (p.w, p.ci, p.h, p.n),
                (image, p.w * ITEM, p.ci * image),
                self.loaded.box(config.block_k, config.cluster_m),
                (1, 1, p.stride[0], 1),
                rows.run * ITEM,
            ),
        )
        down = p.dilation[0] * (rows.width // rows.run) * self.b.tile.slab
        self.products = tuple(
            Product(rx, (ry * p.kw + rx) * self.a.tile.nbytes, ry * down)
            for ry, rx in product(range(taps), range(p.kw))
        )
        staging = config.staging(rows)
        target = output_map(p, staging, config.rows)
        self.output = Output(p.dtype, staging, target)

    def of_images(self, n: Expr) -> NchwWork:
        tiles = replace(self.rows.tiles, problem=self.problem.unchecked(n=n))
        return NchwWork(self.given.unchecked(n=n), self.config, replace(self.rows, tiles=tiles))

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> TilePlace:
        cluster = self.config.cluster_n, self.config.cluster_m
        pixel, row = place_pixels(self.rows.tiles, self.channels, cluster, tile, rank_n, rank_m)
        return TilePlace(pixel, named("channel", row * self.config.block_m))

    def loads_a(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.a.tile, self.config.block_m // self.config.cluster_n
        return [
            Load(
                tap * tile.nbytes + run * tile.slab + part * (rows * tile.swizzle),
                (chunk * tile.k + run * tile.run, place.channel + part * rows, ry * self.a.count + tap),
            )
            for tap, run in product(range(self.a.count), range(tile.k // tile.run))
        ]

    def loads_b(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        p, tile = self.problem, self.b.tile
        return [
            Load(offset, (x, chunk * tile.k + channel, y * p.stride[0] + ry * p.dilation[0] - p.pad[0], n))
            for offset, x, channel, y, n in self.loaded.loads(tile, place.pixel, part, self.config.cluster_m)
        ]

    def store_at(self, place: TilePlace, part: Index, column: int) -> tuple[Index, ...]:
        n, y, x = self._first_pixel(place, part)
        _, h, w = self.rows.tiles.part(self.config.consumers_n)
        row = column // w
        return x + column % w, self._channel(place, part, 0), y + row % h, n + row // h

    def _first_pixel(self, place: TilePlace, part: Index) -> Pixel:
        consumers_n = self.config.consumers_n
        if consumers_n == 1:
            return place.pixel
        return self.rows.tiles.of_part(place.pixel, self.part_at(part)[1], consumers_n)

    def _channel(self, place: TilePlace, part: Index, row: Expr) -> Expr:
        return place.channel + self.part_at(part)[0] * self.config.rows + row

    def channel_at(self, place: TilePlace, part: Index, index: Expr) -> Expr:
        channel, whole = self._channel(place, part, index), self.config.block_m * self.config.cluster_m
        return channel if self.problem.co % whole == 0 else tirx.min(channel, self.problem.co - 1)

    def row_start(self, place: TilePlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        p, channel = self.problem, self._channel(place, part, row)
        return channel * (p.out_h * p.out_w), channel < p.co

    def column_start(self, place: TilePlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        p = self.problem
        n, y, x = pixel = self.rows.tiles.pixel(self._first_pixel(place, part), column)
        return (n * p.co * p.out_h + y) * p.out_w + x, is_output(p, pixel)


def _work(problem: NchwProblem, config: TmaWgmmaConfig) -> NchwWork | None:
    """None if there are no such tiles."""
    rows = config.rows_of(problem)
    return NchwWork(problem, config, rows) if rows else None


def _more(problem: NchwProblem, work: NchwWork) -> dict[str, Any]:
    """How results leave, and the kernel before."""
    from schedules.hopper.shifted import ShiftedResults

    return dict(way_out=partial(ShiftedResults, work.rows), prepare=partial(repack, problem))


# (block_m, columns of a consumer, consumers, consumers_n)
SHAPES = tuple(
    (64 * (consumers // consumers_n), columns, consumers, consumers_n)
    for columns in (128, 96, 64, 48, 32, 256, 192, 160, 144, 112, 80, 16)
    for consumers, consumers_n in ((2, 1), (2, 2), (1, 1), (3, 1), (3, 3))
)


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaConfig:
    """The class's with two stages, or else the first legal tile, narrow ones first."""
    tiles = [TmaWgmmaConfig(num_stages=2)]
    tiles += [
        TmaWgmmaConfig(m, columns * n, k, 2, consumers, 1, 1, consumers_n=n)
        for (m, columns, consumers, n), k in product(SHAPES[::-1], (64, 16))
    ]
    return first_legal((config.filling(arch.device) for config in tiles), problem, arch)


@lru_cache
def _tiles(device: Device) -> tuple[Words, ...]:
    """Fields of every tile and cluster."""
    return tuple(
        dict(block_m=block_m, block_n=columns * consumers_n, consumers=consumers, consumers_n=consumers_n, **words)
        for (block_m, columns, consumers, consumers_n), words in product(
            SHAPES, [*clusters(1, device), *clusters(2, device)]
        )
        if (consumers, words["blocks_sm"]) in REGISTERS
    )


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaConfig]:
    return ProductSpace(
        TmaWgmmaConfig,
        _tiles(arch.device),
        axis("block_k", (16, 32, 64, 128)),
        DEPTHS,
        axis("halo", (False, True) if problem.kh > 1 else (False,)),
    )


SCHEDULE = tma_schedule(
    "tma_wgmma",
    "implicit GEMM on Hopper: unshifted rows by TMA, wgmma, taps along a row added in registers, persistent",
    TmaWgmmaConfig,
    _work,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    reason=SHIFTING,
    more=_more,
    ranges=True,
    channels_along_rows=True,
)
