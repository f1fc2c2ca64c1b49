"""HWCN convolution on Hopper as a matrix product for each output pixel: what its schedules share.

Kernel taps in the padding are left out, and pixels that need all of them come first, so that the last tiles to finish
are short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.space import ProductSpace
from schedules.hopper.config import HopperConfig, blocks, tiles_of
from schedules.hopper.cost import fastest
from schedules.hopper.geometry import Load, Work
from schedules.hopper.pixels import taps_inside
from schedules.hopper.shared import SharedTile, TensorMap
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, inside_window

if TYPE_CHECKING:
    from schedules.hopper.geometry import Taps
    from schedules.tirx.types import Expr, Index


@dataclass(frozen=True)
class PixelConfig(HopperConfig):
    skip_padding: bool = True  # kernel taps in the padding are left out; else they are multiplied as zeros


@dataclass(frozen=True)
class PixelPlace:
    """A block's tile: its output pixel, its first row and column, and the kernel taps it needs."""

    pixel: Expr
    y: Expr
    x: Expr
    row: Expr
    column: Expr
    taps: Taps


class PixelWork(Work[PixelPlace]):
    """For each output pixel a product of output channels and images, in either order."""

    config: PixelConfig

    def __init__(self, problem: HwcnProblem, config: PixelConfig) -> None:
        p = problem
        rows, columns = (p.co, p.n) if self.channels_along_rows else (p.n, p.co)
        self.problem, self.config = p, config
        self.arguments, self.epilogue = p.arguments(), p.epilogue
        self.kernel = (p.kh, p.kw)
        self.chunks = -(-p.ci // config.block_k)
        self.tiles_m = -(-rows // (config.block_m * config.cluster_m))  # of a cluster
        self.tiles_n = -(-columns // (config.block_n * config.cluster_n))
        self.clusters = p.out_h * p.out_w * self.tiles_m * self.tiles_n

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> PixelPlace:
        from tvm.script import tirx as T

        from schedules.lowering.order import inside_first
        from schedules.tirx.values import named

        p, config = self.problem, self.config
        each = self.tiles_m * self.tiles_n
        window = inside_window(p)
        if config.skip_padding and window:
            tile = named("place", inside_first(tile, (each, p.out_w, *window)))
        pixel = named("pixel", T.truncdiv(tile, each))
        y, x = named("y", T.truncdiv(pixel, p.out_w)), named("x", T.truncmod(pixel, p.out_w))
        at_m, at_n = T.truncmod(tile, self.tiles_m), T.truncmod(T.truncdiv(tile, self.tiles_m), self.tiles_n)
        row = named("row", (at_m * config.cluster_m + rank_m) * config.block_m)
        column = named("column", (at_n * config.cluster_n + rank_n) * config.block_n)
        return PixelPlace(pixel, y, x, row, column, self._taps(y, x))

    def _taps(self, y: Expr, x: Expr) -> Taps:
        """The taps of the pixel that lie in the image; where none do, one in the padding, which gives the zeros."""
        p = self.problem
        if not self.config.skip_padding:
            return 0, p.kh, 0, p.kw

        rows = taps_inside("ry", y, 1, p.h, p.kh, p.pad[0], p.stride[0], p.dilation[0])
        columns = taps_inside("rx", x, 1, p.w, p.kw, p.pad[1], p.stride[1], p.dilation[1])
        return *rows, *columns

    @property
    def least_taps(self) -> int:
        return 1 if self.config.skip_padding else super().least_taps

    def taps(self, place: PixelPlace) -> Taps:
        return place.taps

    def tap(self, ry: Expr, rx: Expr) -> Expr:
        """The number of a tap."""
        return ry * self.kernel[1] + rx

    def data_at(self, place: PixelPlace, ry: Expr, rx: Expr) -> tuple[Expr, Expr]:
        """(x, y) in the data of the place's pixel under a tap."""
        p = self.problem
        y = place.y * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        x = place.x * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        return x, y

    def channel_at(self, place: PixelPlace, part: Index, index: Expr) -> Expr:
        from tvm import tirx

        along_rows = self.channels_along_rows
        channel = self._row(place, part, index) if along_rows else place.column + index
        return tirx.min(channel, self.problem.co - 1)

    def row_start(self, place: PixelPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        p, at = self.problem, self._row(place, part, row)
        first = place.pixel * (p.co * p.n)
        return (first + at * p.n, at < p.co) if self.channels_along_rows else (first + at, at < p.n)

    def column_start(self, place: PixelPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        p, at = self.problem, place.column + column
        return (at, at < p.n) if self.channels_along_rows else (at * p.n, at < p.co)

    def _row(self, place: PixelPlace, part: Index, row: Expr) -> Expr:
        """The output channel or image of row `row` of a part."""
        return place.row + part * self.config.rows + row


def data_map(problem: HwcnProblem, tile: SharedTile, to_tf32: bool = False) -> TensorMap:
    """The data (h, w, ci, n) in boxes of a run of images by the tile's channels."""
    p, item = problem, tile.item
    return TensorMap(
        "data",
        p.dtype,
        (p.n, p.ci, p.w, p.h),
        (p.n * item, p.ci * p.n * item, p.w * p.ci * p.n * item),
        (tile.run, tile.k, 1, 1),
        (1, 1, 1, 1),
        tile.swizzle,
        to_tf32=to_tf32,
    )


def runs_of(tile: SharedTile, part: Index, parts: int, start: Expr, at: tuple[Index, ...]) -> list[Load]:
    """The runs of part number `part` of an MN-major tile whose first row is `start`; `at` are the coordinates after
    it."""
    count = tile.rows // tile.run // parts
    runs = (part * count + run for run in range(count))
    return [Load(run * tile.slab, (start + run * tile.run, *at)) for run in runs]


C = TypeVar("C", bound=PixelConfig)


def quickest(problem: HwcnProblem, arch: Arch, base: C, work: Callable[[HwcnProblem, C], PixelWork]) -> C:
    """`base` with the tile and the cluster of the least estimated time and the most stages that fit; `base` itself if
    none is legal."""
    legal = (config for config in tiles_of(base, arch.device) if config.check(problem, arch) is None)
    found = fastest((work(problem, config) for config in legal), arch)
    return replace(base, **found.config.to_json()) if found else base.filling(arch.device)


def with_and_without_padding(config: type[C], dtype: str, device: Device) -> Sequence[C]:
    """Every `config` worth trying on `device` for operands of `dtype`, with taps in the padding left out, and
    multiplied."""
    return ProductSpace(lambda words, skip: config(**words, skip_padding=skip), blocks(dtype, device), (True, False))
