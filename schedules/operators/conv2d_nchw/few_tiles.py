"""Tiles of pixels x (kw, output channels), for NCHW convolutions of few filters on Hopper.

Pixels are rows of the product, and the filters of all taps along an image row stand side by side as its columns (rx,
co), co rounded up to 8, or to 4.  The pixels are loaded unshifted, as TMA demands (see `hopper.rows`), and multiplied
once with all of them.  A stage holds the image rows that a tile's kernel rows look at once, and the kernel's rows are
offsets into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import ClassVar

from schedules.core.arch import Arch
from schedules.core.tvm import tirx
from schedules.hopper.config import ROWS, HopperConfig, work_of
from schedules.hopper.geometry import Load, Operand, Output, Product, Work
from schedules.hopper.pixels import Pixel, PixelTiles, is_output, whole
from schedules.hopper.rows import GROUP, RowTiles, output_map, shifts, whole_rows
from schedules.hopper.shared import STAGING, SharedTile, Staging, TensorMap, aligned
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.repack import filter_argument, workspace_of
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
BIASES = 8  # registers for those of a thread's rows, about
WARP_ROWS = 16  # of a wgmma's 64, that lie in one warp


@dataclass(frozen=True)
class PixelStaging(Staging):
    """Where a consumer's results wait for their store as `rows` channels x pixels, `width` of them for each store; then
    `edges` bytes for the sums that warps hand their neighbours."""

    edges: int = 0

    @property
    def together(self) -> int:
        """Stores of a pass, which is whole wgmmas."""
        each = ROWS // self.width
        blocks = self.columns // ROWS
        fits = (n for n in range(1, blocks + 1) if blocks % n == 0 and n * each * self.store_bytes <= STAGING)
        return each * max(fits, default=1)

    @property
    def nbytes(self) -> int:
        return aligned(self.together * self.store_bytes + self.edges)


@dataclass(frozen=True)
class TmaWgmmaFewConfig(HopperConfig):
    """Tiles of (pixels, taps along a row x output channels, input channels)."""

    granule: ClassVar[int] = GROUP
    addressing: ClassVar[int] = 40  # less than others, as columns have no bias

    cluster_m: int = 1

    def pitch(self, problem: NchwProblem) -> int:
        """Columns from one tap to the next, as block_n has them; 0 if it has no taps."""
        return next((pitch for pitch in pitches(problem) if self.block_n == columns_of(problem, pitch)), 0)

    def staging(self, problem: NchwProblem, run: int) -> PixelStaging:
        channels = channels_of(problem)
        handed = sum(map(abs, shifts(problem))) * (self.rows // WARP_ROWS)  # rows of sums
        return PixelStaging(channels, min(run, ROWS), ITEM, self.rows, edges=handed * channels * 4)

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        p = problem
        for name, size in (("ci", p.ci), ("w", p.w), ("out_w", p.out_w)):
            if size % VECTOR:
                return f"{name}={size} is not a multiple of {VECTOR}, which TMA needs"
        if p.stride != (1, 1):
            return f"stride={p.stride} is not 1"
        reach = max(map(abs, shifts(p)))
        if reach > GROUP:
            return f"pad={p.pad[1]}, dilation={p.dilation[1]} reach over {reach} pixels, sums shift by {GROUP} at most"
        return super().unfit(problem, arch)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        p, reason = problem, self.unfit(problem, arch)
        if reason:
            return reason
        if self.pitch(p) == 0:
            ways = " or ".join(str(columns_of(p, pitch)) for pitch in pitches(p))
            return f"block_n={self.block_n} is not {ways}, kw={p.kw} times co={p.co} rounded up to 8 or 4"
        if self.cluster_n != 1:
            return f"cluster_n={self.cluster_n} is not 1, a block has all filters"
        rows = whole_rows(p, self.rows) if self.consumers > 0 and self.block_m >= self.consumers else None
        # all rows of a thread need the same few biases, which it keeps
        reason = self.check_block(p.dtype, arch, more=BIASES if p.epilogue.of_axis("channel") else 0)
        if reason:
            return reason
        if rows is None:
            return f"block_m={self.block_m} gives each consumer no whole number of rows of {max(p.w, p.out_w)} pixels"
        pitch = self.pitch(p)
        if self.cluster_m > 1 and pitch % (GROUP * self.cluster_m):
            return f"co={p.co} rounded up to {pitch} is not cluster_m={self.cluster_m} times a multiple of 8"
        work: FewWork = work_of(p, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> FewWork:
        return FewWork(problem, self)


def channels_of(problem: NchwProblem) -> int:
    """Output channels in whole groups of columns."""
    return -(-problem.co // GROUP) * GROUP


def pitches(problem: NchwProblem) -> list[int]:
    """What a tap's columns may be: output channels in whole groups, or in halves of groups where that makes fewer."""
    whole, half = (-(-problem.co // unit) * unit for unit in (GROUP, GROUP // 2))
    return [whole, half] if columns_of(problem, half) < columns_of(problem, whole) else [whole]


def columns_of(problem: NchwProblem, pitch: int) -> int:
    """Of all taps along a row, in whole groups."""
    return -(-problem.kw * pitch // GROUP) * GROUP


@dataclass(frozen=True)
class FewPlace:
    """A block's tile: its first output pixel."""

    pixel: Pixel


class FewWork(Work[FewPlace]):
    config: TmaWgmmaFewConfig
    channels_along_rows = False

    def __init__(self, problem: NchwProblem, config: TmaWgmmaFewConfig) -> None:
        p = problem
        rows = whole_rows(p, config.rows)
        assert rows is not None  # checked
        width, run = rows
        self.problem, self.config, self.width = p, config, width
        self.arguments, self.epilogue = p.arguments(), p.epilogue
        self.workspace = workspace_of(p)
        self.kernel = (1, 1)
        self.chunks = -(-p.ci // config.block_k)
        self.channels = channels_of(p)
        self.columns = 1
        self.tiles = PixelTiles(p, (1, config.block_m // width, width))
        self.clusters = whole(self.tiles.count, config.cluster_m)
        self.rows = RowTiles(self.tiles, width, (0, 0), run).with_halo()
        self.a = Operand(
            SharedTile(self.rows.pixels, config.block_k, ITEM, run, transposed=True),
            TensorMap(
                "data",
                p.dtype,
                (p.w, p.ci, p.h, p.n),
                (p.h * p.w * ITEM, p.w * ITEM, p.ci * p.h * p.w * ITEM),
                self.rows.box(config.block_k, 1),
                (1, 1, 1, 1),
                run * ITEM,
            ),
        )
        run = min(config.block_k, 128 // ITEM)
        self.pitch = config.pitch(p)
        spare = config.block_n - p.kw * self.pitch
        # of the taps, those that lie as one box leaves them: all, a kernel row's where a tap is several runs of
        # channels or rows are spare, or one where blocks share its output channels
        alone = config.cluster_m == 1
        taps = p.kw if alone else 1, p.kh if alone and config.block_k == run and not spare else 1
        self.b = Operand(
            SharedTile(config.block_n, config.block_k, ITEM, run),
            TensorMap(
                filter_argument(problem).name,
                p.dtype,
                (p.ci, p.co, p.kw, p.kh),
                (p.ci * ITEM, p.co * p.ci * ITEM, p.kw * p.co * p.ci * ITEM),
                (run, self.pitch // config.cluster_m, *taps),
                (1, 1, 1, 1),
                run * ITEM,
            ),
            p.kh,
            spare=spare,
        )
        down = p.dilation[0] * (width // self.rows.run) * self.a.tile.slab
        self.products = tuple(Product(0, ry * down, ry * self.b.tile.nbytes) for ry in range(p.kh))
        staging = config.staging(p, self.rows.run)
        target = output_map(p, staging, self.channels)
        self.staging, self.target = staging, target
        self.output = Output(p.dtype, staging, target)

    @cached_property
    def added(self) -> None:
        """Its way out reads a residual element by element."""

    def of_images(self, n: Expr) -> FewWork:
        return FewWork(self.problem.unchecked(n=n), self.config)

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> FewPlace:
        n, y, x = self.tiles.start(named("pixels", tile * self.config.cluster_m + rank_m))
        return FewPlace((named("n", n), named("y", y), x))

    def loads_a(self, place: FewPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile = self.a.tile
        return [
            Load(offset, (x, chunk * tile.k + channel, y, n))
            for offset, x, channel, y, n in self.rows.loads(tile, place.pixel, 0, 1, -self.problem.pad[0])
        ]

    def loads_b(self, place: FewPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, p = self.b.tile, self.problem
        _, rows, wide, high = self.b.boxes.box
        loads = []
        for run in range(tile.k // tile.run):
            channel = chunk * tile.k + run * tile.run
            for tap_y, tap_x in product(range(0, p.kh, high), range(0, p.kw, wide)):
                row = tap_x * self.pitch + part * rows
                offset = tap_y * tile.nbytes + run * tile.slab + row * tile.swizzle
                loads.append(Load(offset, (channel, part * rows, tap_x, tap_y)))
        return loads

    def store_at(self, place: FewPlace, part: Index, column: int) -> tuple[Index, ...]:
        n, y, x = place.pixel
        down, along = divmod(column, self.width)
        return x + along, 0, y + part * (self.config.rows // self.width) + down, n

    def channel_at(self, place: FewPlace, part: Index, index: Expr) -> Expr:
        p = self.problem
        return index if p.co == self.channels else tirx.min(index, p.co - 1)

    def row_start(self, place: FewPlace, part: Index, row: Expr) -> tuple[Expr, Expr]:
        p, (n, y, x) = self.problem, place.pixel
        n, y, x = pixel = self.tiles.pixel((n, y + part * (self.config.rows // self.width), x), row)
        return (n * p.co * p.out_h + y) * p.out_w + x, is_output(p, pixel)

    def column_start(self, place: FewPlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        p = self.problem
        return column * (p.out_h * p.out_w), column < p.co
