"""HWCN convolution on Hopper as a matrix product of output channels and images for each output pixel, or for several:
what its schedules share.

Kernel taps in the padding are left out, and pixels that need all of them come first, so that the last tiles to finish
are short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from schedules.core.device import Device
from schedules.core.problem import Argument
from schedules.core.space import ProductSpace, axis
from schedules.core.tvm import T, tirx
from schedules.hopper.config import DEPTHS, HopperConfig, blocks
from schedules.hopper.geometry import Load, Taps, Work
from schedules.hopper.pixels import mean_taps_inside, taps_inside
from schedules.hopper.shared import SharedTile, TensorMap
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.image_tiles import ImageTiles
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named


@dataclass(frozen=True)
class PixelConfig(HopperConfig):
    skip_padding: bool = True  # kernel taps in the padding are left out; else they are multiplied as zeros


@dataclass(frozen=True)
class PixelPlace:
    """A block's tile: its first image and output pixel, its first output channel, and the kernel taps it needs."""

    image: Expr
    y: Expr
    x: Expr
    channel: Expr
    taps: Taps


class PixelWork(Work[PixelPlace]):
    """For each box of output pixels and images a product of these and output channels, in either order."""

    config: PixelConfig
    tiles: ImageTiles

    def __init__(self, problem: HwcnProblem, config: PixelConfig, tiles: ImageTiles) -> None:
        p = problem
        self.problem, self.config, self.tiles = p, config, tiles
        self.arguments, self.epilogue = p.arguments(), p.epilogue
        self.kernel = (p.kh, p.kw)
        self.chunks = -(-p.ci // config.block_k)
        block, cluster = config.block_n, config.cluster_n
        if self.channels_along_rows:
            block, cluster = config.block_m, config.cluster_m
        self.block_channels = block
        self.tiles_channels = -(-p.co // (block * cluster))  # of a cluster
        images, rows, columns = tiles.counts
        self.clusters = images * rows * columns * self.tiles_channels

    @property
    def inside(self) -> tuple[int, int, int, int] | None:
        """(first row, rows, first column, columns) of the clusters with the most work, which come first; None if all
        have as much."""
        return self.tiles.inside if self.config.skip_padding else None

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> PixelPlace:
        from schedules.lowering.order import inside_first

        config, tiles, channels = self.config, self.tiles, self.tiles_channels
        images, _, columns = tiles.counts
        each = channels * images
        if self.inside:
            tile = named("place", inside_first(tile, (each, columns, *self.inside)))
        pixel = named("pixel", T.truncdiv(tile, each))
        if self.channels_along_rows:
            rank, rank_channel, cluster = rank_n, rank_m, config.cluster_m
            channel, image = T.truncmod(tile, channels), T.truncmod(T.truncdiv(tile, channels), images)
        else:
            rank, rank_channel, cluster = rank_m, rank_n, config.cluster_n
            channel, image = T.truncmod(T.truncdiv(tile, images), channels), T.truncmod(tile, images)
        at = image, T.truncdiv(pixel, columns), T.truncmod(pixel, columns)
        first = [named(name, number * reach) for name, number, reach in zip("nyx", at, tiles.reach, strict=True)]
        taps = self._taps(first[1], first[2])
        own = [
            named(name, start + rank * extent) if several > 1 else start
            for name, start, extent, several in zip("nyx", first, tiles.extents, tiles.spread, strict=True)
        ]
        start = named("channel", (channel * cluster + rank_channel) * self.block_channels)
        return PixelPlace(own[0], own[1], own[2], start, taps)

    def _axes(self) -> tuple[tuple[int, int, int, int, int, int], ...]:
        """Of rows and columns: the outputs of a cluster's box, and what tells which taps of them are in the image."""
        p, (_, h, w) = self.problem, self.tiles.reach
        return (
            (h, p.h, p.kh, p.pad[0], p.stride[0], p.dilation[0]),
            (w, p.w, p.kw, p.pad[1], p.stride[1], p.dilation[1]),
        )

    def _taps(self, y: Expr, x: Expr) -> Taps:
        """The taps that lie in the image for any pixel of a cluster's box; where none do, one in the padding, which
        gives the zeros."""
        rows, columns = (
            taps_inside(name, at, *axis) if self.config.skip_padding and taps > 1 else (0, taps)
            for name, at, axis, taps in zip(("ry", "rx"), (y, x), self._axes(), self.kernel, strict=True)
        )
        return *rows, *columns

    @property
    def least_taps(self) -> int:
        return 1 if self.config.skip_padding else super().least_taps

    @property
    def mean_taps(self) -> float:
        if not self.config.skip_padding:
            return super().mean_taps
        mean = 1.0
        for count, along, taps in zip(self.tiles.counts[1:], self._axes(), self.kernel, strict=True):
            mean *= mean_taps_inside(count, *along) if taps > 1 else taps
        return mean

    def taps(self, place: PixelPlace) -> Taps:
        return place.taps

    def tap(self, ry: Expr, rx: Expr) -> Expr:
        """The number of a tap."""
        return ry * self.kernel[1] + rx

    def data_at(self, place: PixelPlace, ry: Index, rx: Index) -> tuple[Expr, Expr]:
        """(x, y) in the data of the place's first pixel under a tap."""
        p = self.problem
        y = place.y * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        x = place.x * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        return x, y

    def channel_at(self, place: PixelPlace, part: Index, index: Expr) -> Expr:
        along_rows = self.channels_along_rows
        channel = place.channel + (self._row(part, index) if along_rows else index)
        return tirx.min(channel, self.problem.co - 1)

    def row_start(self, place: PixelPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        at = self._row(part, row)
        return self._channel_start(place, at) if self.channels_along_rows else self._image_start(place, at)

    def column_start(self, place: PixelPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        return self._image_start(place, column) if self.channels_along_rows else self._channel_start(place, column)

    def _row(self, part: Index, row: Expr) -> Expr:
        """The block's row that is `row` of a part."""
        return part * self.config.rows + row

    def _channel_start(self, place: PixelPlace, at: Expr) -> tuple[Expr, Expr]:
        p, channel = self.problem, place.channel + at
        return channel * p.n, channel < p.co

    def _image_start(self, place: PixelPlace, at: Expr) -> tuple[Expr, Expr]:
        p = self.problem
        n, y, x = (start + each for start, each in zip((place.image, place.y, place.x), self.tiles.at(at), strict=True))
        there = tirx.all(n < p.n, y < p.out_h, x < p.out_w)
        size = self.config.block_n if self.channels_along_rows else self.config.block_m
        if self.tiles.places < size:
            there = tirx.all(there, at < self.tiles.places)
        return (y * p.out_w + x) * (p.co * p.n) + n, there


def runs_of(tile: SharedTile, part: Index, parts: int, start: Expr, at: tuple[Index, ...]) -> list[Load]:
    """The runs of part number `part` of an MN-major tile whose first row is `start`; `at` are the coordinates after
    it."""
    count = tile.rows // tile.run // parts
    runs = (part * count + run for run in range(count))
    return [Load(run * tile.slab, (start + run * tile.run, *at)) for run in runs]


def data_map(problem: HwcnProblem, tile: SharedTile, data: Argument, box: tuple[int, ...], tap: bool) -> TensorMap:
    """Data (h, w, .., ..) of which boxes, innermost axis first, lie under one tap of several pixels, or under several
    taps of one if `tap` is false."""
    p, (*_, outer, inner) = problem, data.shape
    item = tile.item
    sizes = (inner, outer, p.w, p.h)
    strides = (inner * item, outer * inner * item, p.w * outer * inner * item)
    steps = p.stride if tap else p.dilation
    to_tf32 = data.dtype == "float32"
    return TensorMap(data.name, data.dtype, sizes, strides, box, (1, 1, *steps[::-1]), tile.swizzle, to_tf32=to_tf32)


C = TypeVar("C", bound=PixelConfig)


def with_and_without_padding(config: type[C], dtype: str, device: Device) -> Sequence[C]:
    """Every `config` worth trying on `device` for operands of `dtype`, with taps in the padding left out, and
    multiplied."""
    return ProductSpace(config, blocks(dtype, device), axis("skip_padding", (True, False)), DEPTHS)
