"""HWCN convolution on Hopper: for boxes of output pixels, output channels x (images, pixels) by TMA and wgmma.

Both operands have their reduction axis outside (MN-major), in runs of up to 64 rows of 128 bytes.  Where the batch is
no multiple of 8, the reduction has `phases`, by where rows of images begin; or a kernel before copies the data with a
padded batch, or with the channels inside (`turned`): of those any number of images fits a tile.  Of few channels a
stage has those of all taps, or of all taps of a kernel row (`window`), as one box brings them.  A tile of several
`lines` of pixels has a stage with the filters of all kernel rows, and each line that any of its own looks at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.problem import Argument, numpy_dtype
from schedules.core.space import ProductSpace
from schedules.core.tvm import T, tirx
from schedules.hopper import split
from schedules.hopper.config import DEPTHS, K_BYTES, PING_PONG, SHAPES, SUM_BYTES, clusters, first_legal, work_of
from schedules.hopper.cost import microseconds
from schedules.hopper.geometry import Load, Operand, Output, Product
from schedules.hopper.pixels import flattened
from schedules.hopper.schedule import tma_schedule
from schedules.hopper.shared import (
    UNIT,
    BlockStaging,
    Runs,
    RunStaging,
    SharedTile,
    Staging,
    TensorMap,
    beyond_indices,
    run_staging,
    staging_for,
)
from schedules.operators.conv2d_hwcn import phases, turned
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.image_tiles import ImageTiles, image_tiles
from schedules.operators.conv2d_hwcn.pixel_work import PixelConfig, PixelPlace, PixelWork, data_map, runs_of
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

ITEM = 2  # bytes of an operand's element
LINE = 128  # bytes that leave side by side, at most
K = K_BYTES // ITEM  # of the reduction in one wgmma
RUN = 64  # rows of an operand side by side in 128 bytes
LARGEST_BLOCKS = 36 * 1024  # bytes of a consumer's results in blocks, at most
LONGEST_WINDOW = 192  # products of a stage with all taps, at most
TURNED = (16, 32, 64, 96, 128)  # channels of a stage where they lie inside
LINES = (2, 3, 4)  # of a tile that searches try, and channels of a stage with the filters of all kernel rows
SHARED_K = (16, 32)
BESIDE = 0.93  # of the time that two blocks of a multiprocessor take, of which one multiplies while the other ends


@dataclass(frozen=True)
class BoxConfig(PixelConfig):
    """Tiles of (output channels, images and pixels, input channels), of operands of 16 bits."""

    k_steps: ClassVar[Sequence[int]] = range(1, LONGEST_WINDOW // K + 1)
    window = False
    turned = False
    lines = 1

    def staging(self, problem: HwcnProblem) -> Staging | RunStaging | BlockStaging:
        tiles, item = self.tiles(problem), numpy_dtype(problem.dtype).itemsize
        if self.turned or problem.n % (UNIT // item):
            if tiles and tiles.box[0] >= problem.n:
                blocks = tiles.box[1] * tiles.box[2]
                staging = BlockStaging(self.rows, self.block_n, problem.n, blocks, item, tiles.run)
                if staging.nbytes <= LARGEST_BLOCKS:
                    return staging
            return run_staging(self.rows, self.block_n, problem.n * problem.out_h * problem.out_w + self.block_n, item)
        run, line = tiles.run if tiles else RUN, LINE // item
        # channels of a few images are contiguous: several leave as one line, where no block has images beyond them
        alone = tiles is not None and tiles.reach[0] == run == problem.n
        fold = line // run if alone and run <= line and problem.co % (line // run) == 0 else 1
        return staging_for(self.rows, self.block_n, item, run, (fold, 1))

    @classmethod
    def unfit(cls, problem: HwcnProblem, arch: Arch) -> str | None:
        if cls.addends > 1 and problem.n % (UNIT // SUM_BYTES):
            return f"n={problem.n} is not a multiple of {UNIT // SUM_BYTES}, which TMA needs"
        return super().unfit(problem, arch)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self._check_lines(problem)
        reason = reason or self.check_block(problem.dtype, arch, self.lines) or self._check_k(problem)
        if reason:
            return reason
        if self.block_m % (RUN * self.cluster_n):
            return f"block_m={self.block_m} is not cluster_n={self.cluster_n} times a multiple of {RUN}"
        if self.tiles(problem) is None:
            return f"block_n={self.block_n} is not cluster_m={self.cluster_m} boxes of images and pixels"
        for argument in (operands(problem, self)[0], problem.arguments()[-1]):
            reason = beyond_indices(argument.name, math.prod(argument.shape))
            if reason:
                return reason
        work: HwcnWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: HwcnProblem) -> HwcnWork:
        return HwcnWork(problem, self)

    def stored(self, problem: HwcnProblem) -> HwcnProblem:
        """The problem whose data and filter are the tensors that TMA reads."""
        return problem

    def tiles(self, problem: HwcnProblem) -> ImageTiles | None:
        """None if TMA brings no boxes of so many places."""
        line = RUN // math.gcd(self.block_k, RUN) if self.turned else 0
        # a row of all pixels where none looks beyond itself
        columns = phases.columns(problem) if self.in_phases(problem) else 0
        p = flattened(problem, batch=False)
        parts = self.parts_of_line(problem)
        return image_tiles(p, self.block_n, self.cluster_n, parts, self.turned, line, columns, lines=self.lines)

    def lines_looked_at(self, problem: HwcnProblem) -> int:
        """Of the data, by a tile's lines under one tap, or, if these are several, under a kernel column's."""
        if self.lines == 1:
            return 1
        return (self.lines - 1) * problem.stride[0] + (problem.kh - 1) * problem.dilation[0] + 1

    def parts_of_line(self, problem: HwcnProblem) -> int:
        """In which the blocks of a cluster load a line that they share; 1 where each of them loads whole lines."""
        lines = self.lines_looked_at(problem)
        return 1 if lines > 1 and lines % self.cluster_m == 0 else self.cluster_m

    def _check_k(self, problem: HwcnProblem) -> str | None:
        """Why a stage's part of the reduction is illegal; None if it is not."""
        if self.window and self.turned:
            return "window=true takes taps as they lie, turned=true has the channels between them"
        if self.window:
            found = window_k(problem)
            if self.block_k not in found:
                known = " or ".join(map(str, found)) or f"over {LONGEST_WINDOW}"
                return f"block_k={self.block_k} is not {known}, the products of all taps or of a kernel row's"
        elif self.turned and self.block_k not in TURNED:
            return f"block_k={self.block_k} is not {', '.join(map(str, TURNED))}, with turned=true"
        elif self.block_k > TURNED[-1]:
            return f"block_k={self.block_k} is over {TURNED[-1]}, with window=false"
        return None

    def _check_lines(self, problem: HwcnProblem) -> str | None:
        """Why a tile cannot have so many lines; None if it can."""
        most = flattened(problem, batch=False).out_h
        if self.lines > most:
            return f"lines={self.lines} of a tile are more than the {most} of an image"
        if self.lines > 1 and self.window:
            return f"window=true takes taps as they lie, lines={self.lines} share what their kernel rows look at"
        if self.lines > 1 and self.split_k > 1:
            return f"split_k={self.split_k} has no way to add sums of lines={self.lines}, give 1"
        return None

    def in_phases(self, problem: HwcnProblem) -> bool:
        """Whether the reduction has phases."""
        return not (self.window or self.turned) and self.addends == 1 and phases.serve(problem)

    def kernel_rows(self, problem: HwcnProblem) -> int:
        """Rows of the kernel that a stage with `window` has."""
        return problem.kh if problem.kh * problem.kw * problem.ci <= self.block_k else 1


@dataclass(frozen=True)
class TmaWgmmaConfig(BoxConfig):
    """The same, of operands as they are given."""

    window: bool = False  # a stage has the channels of all taps, or of a kernel row's; else of one tap
    turned: bool = False  # data are copied with their channels inside
    lines: int = 1  # of pixels that a tile has, block_n columns each; of several a stage has what all kernel rows need


def operands(problem: HwcnProblem, config: BoxConfig) -> tuple[Argument, Argument]:
    """The data and the filter that TMA reads."""
    if config.addends == 1:
        copied = turned.data_argument(problem, config.turned)
        data = problem.arguments()[0] if config.in_phases(problem) else copied
        return data, turned.filter_argument(problem)
    data, weight, *_ = config.stored(problem).arguments()
    return split.addends_of(data.name, data.shape), split.addends_of(weight.name, weight.shape)


def window_k(problem: HwcnProblem) -> list[int]:
    """What a stage may have of the reduction with `window`: all taps, or those of a kernel row."""
    rows = sorted({problem.kh, 1}, reverse=True)
    found = (-(-count * problem.kw * problem.ci // K) * K for count in rows)
    return [k for k in found if k <= LONGEST_WINDOW]


class HwcnWork(PixelWork):
    config: BoxConfig
    channels_along_rows = True

    def __init__(self, problem: HwcnProblem, config: BoxConfig) -> None:
        p, tiles, flat = problem, config.tiles(problem), flattened(problem, batch=False)
        assert tiles is not None  # checked
        super().__init__(flat, config, tiles)
        self.arguments = p.arguments()
        data, weight = operands(p, config)
        self.workspace = tuple(each for each in (data, weight) if each.name not in ("data", "filter"))
        self.parts = config.parts_of_line(p)
        self.part = tiles.part(self.parts)
        n, h, w = self.part
        k, spare_k, taps = config.block_k, 0, math.prod(weight.shape[:2])
        if config.window:
            rows = config.kernel_rows(p)
            self.kernel, self.chunks = (p.kh // rows, 1), 1
            taps, of_stage = self.kernel[0], rows * p.kw * p.ci
            k, spare_k = of_stage, config.block_k - of_stage
            box = (tiles.run, p.ci, p.kw, rows)
        else:
            box = (math.gcd(k, RUN), n, w, h) if config.turned else (tiles.run, k, w, h)
        co, run = weight.shape[-1], box[0]
        channels = math.prod(weight.shape[:3]) // taps
        columns = max(config.block_n, tiles.places)
        b = SharedTile(columns, config.block_k, ITEM, run, transposed=not config.turned)
        if config.in_phases(p):
            count = phases.phases(p)
            self.chunks, self.shifts = count * -(-p.ci // count // k), phases.shifts(p, tiles, config.block_n)
            filters, source = phases.filter_map(p, weight, RUN, k), phases.data_map(tiles.problem, data, box, b.swizzle)
        else:
            sizes, strides = (co, channels, taps), (co * ITEM, channels * co * ITEM)
            filters = TensorMap(weight.name, weight.dtype, sizes, strides, (RUN, k, 1), (1, 1, 1), RUN * ITEM)
            source = data_map(config.stored(flat), b, data, box, tap=not config.window)
        a, rows = SharedTile(config.block_m, config.block_k, ITEM, RUN, transposed=True), 1
        if config.lines > 1:
            self.kernel, rows = (1, p.kw), p.kh
            self.products = tuple(
                Product(line, row * a.nbytes, (line * p.stride[0] + row * p.dilation[0]) * b.nbytes)
                for line, row in product(range(config.lines), range(rows))
            )
        self.a = Operand(a, filters, rows, spare_k=spare_k)
        self.b = Operand(b, source, config.lines_looked_at(p), spare=columns - tiles.places, spare_k=spare_k)
        if config.addends > 1:
            split.split(self, data, weight)
        staging = config.staging(p)
        self.output = Output(p.dtype, staging, self._target(staging))

    def _target(self, staging: Staging | RunStaging | BlockStaging) -> TensorMap | Runs:
        p = self.problem
        if not isinstance(staging, Staging):
            run = p.co * p.n if isinstance(staging, BlockStaging) else math.gcd(p.n, self.tiles.run)
            return Runs("output", math.prod(p.arguments()[-1].shape), 1, math.gcd(turned.GROUP, run))
        fold, item = staging.fold, staging.item
        return TensorMap(
            "output",
            p.dtype,
            (fold * p.n, p.co // fold, p.out_w, p.out_h),
            (fold * p.n * item, p.co * p.n * item, p.out_w * p.co * p.n * item),
            (fold * staging.width, self.config.rows // fold, 1, 1),
            (1, 1, 1, 1),
            fold * staging.swizzle,
            promotion=0,
        )

    @property
    def leaving(self) -> int:
        return max(self.outputs, self.config.lines)

    def output_at(self, place: PixelPlace, number: int) -> tuple[Expr | None, PixelPlace]:
        return None, replace(place, y=place.y + number)

    @property
    def copied(self) -> int:
        """Bytes that a kernel before reads and writes."""
        return sum(2 * argument.nbytes for argument in self.workspace)

    def loads_a(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, channels = self.a.tile, self._channels(chunk)
        return [
            replace(load, offset=row * tile.nbytes + load.offset)
            for row in range(self.a.count)
            for load in runs_of(tile, part, self.config.cluster_n, place.channel, (*channels, self.tap(ry + row, rx)))
        ]

    def loads_b(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        lines, first = self.b.count, T.int32(0)
        if self.parts < self.config.cluster_m:
            lines //= self.config.cluster_m
            part, first = 0, part * lines
        loads = self._loads_of_line(place, ry, rx, chunk, part)
        return [
            Load((first + line) * self.b.tile.nbytes + load.offset, (*load.at[:-1], load.at[-1] + (first + line)))
            for line in range(lines)
            for load in loads
        ]

    def _loads_of_line(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> list[Load]:
        """Those of the first line that a stage has, or of the only one."""
        tile, tiles, config = self.b.tile, self.tiles, self.config
        places = tiles.places // self.parts  # of a part
        if config.window:
            ry = ry * config.kernel_rows(self.problem)
            return [
                self._box(place, ry, rx, (T.int32(0),), part * places + first, part * (places // tile.run) + number)
                for number, first in enumerate(range(0, places, tile.run))
            ]
        if config.turned:
            channel = chunk * tile.k
            x, y = self.data_at(self._moved(place, part * places), ry, rx)
            image = self._moved(place, part * places).image
            return [
                Load(part * (places * tile.swizzle) + number * tile.slab, (channel + number * tile.run, image, x, y))
                for number in range(tile.k // tile.run)
            ]
        each = math.prod(self.part[1:]) * tile.run  # of a box
        channels, moved = self._channels(chunk), 0
        if self.shifts:
            moved = phases.late(self.problem, channels[0])
        return [
            self._box(place, ry, rx, channels, part * places + first, part * (places // tile.run) + number, moved)
            for first, number in ((i * each, i * each // tile.run) for i in range(places // each))
        ]

    def _channels(self, chunk: Expr) -> tuple[Expr, ...]:
        """Where the channels of a chunk begin: behind, if there are phases, which of them it is in a group of as many
        channels as there are phases."""
        if not self.shifts:
            return (chunk * self.b.tile.k,)
        each = self.chunks_of_phase
        first = phases.channel(self.problem, T.truncdiv(chunk, each))
        return named("of_group", first), T.truncmod(chunk, each) * self.b.tile.k

    def _box(
        self,
        place: PixelPlace,
        ry: Index,
        rx: Index,
        channels: tuple[Expr, ...],
        first: Index,
        run: Index,
        late: Index = 0,
    ) -> Load:
        """The box whose first place is number `first` of the tile, into run number `run`; rows are `late`."""
        moved = self._moved(place, first)
        return Load(run * self.b.tile.slab, (moved.image + late, *channels, *self.data_at(moved, ry, rx)))

    def _moved(self, place: PixelPlace, first: Index) -> PixelPlace:
        """The place whose first image and pixel are number `first` of `place`."""
        n, y, x = self.tiles.at(first)
        return replace(place, image=place.image + n, y=place.y + y, x=place.x + x)

    def store_at(self, place: PixelPlace, part: Index, column: int) -> tuple[Index, ...]:
        moved, channel = self._moved(place, column), place.channel + part * self.config.rows
        staging = self.output.staging
        assert isinstance(staging, Staging)
        if staging.fold > 1:
            return 0, T.truncdiv(channel, staging.fold), moved.x, moved.y
        return moved.image, channel, moved.x, moved.y

    def run_at(self, place: PixelPlace, part: Index, row: Expr, column: Expr) -> tuple[Expr, Expr]:
        p, staging = self.problem, self.output.staging
        if isinstance(staging, BlockStaging):
            channel = place.channel + part * self.config.rows
            at_image, is_image = self.column_start(place, part, row * staging.piece)
            inside = tirx.if_then_else(is_image, (p.co - channel) * p.n, 0)
            return named("index", at_image + channel * p.n), named("inside", inside)
        at_channel, is_channel = self.row_start(place, part, row)
        at_image, is_image = self.column_start(place, part, column)
        inside = tirx.if_then_else(tirx.all(is_channel, is_image), 1, 0)
        return named("index", at_channel + at_image), named("inside", inside)


def boxes(problem: HwcnProblem, places: int, blocks: int, turned: bool, lines: int = 1) -> int | None:
    """Tiles of `lines` of `places` images and pixels that the output of a channel is cut into, `blocks` side by side;
    None if TMA brings none."""
    columns = phases.columns(problem) if phases.serve(problem) and not turned else 0
    tiles = image_tiles(flattened(problem, batch=False), places, blocks, 1, turned, columns=columns, lines=lines)
    return math.prod(tiles.counts) * blocks if tiles else None


def estimate(work: HwcnWork, device: Device) -> float:
    """About how many microseconds the function takes on `device`."""
    beside = BESIDE if work.config.blocks_sm > 1 else 1.0
    return microseconds(work, device) * beside


def default(problem: HwcnProblem, arch: Arch) -> TmaWgmmaConfig:
    """The class's, or else the first legal tile and way."""
    tiles: list[dict[str, Any]] = [{}]
    tiles += [dict(way, **shape, num_stages=2, cluster_m=1) for way in ways(problem) for shape in shapes(problem, way)]
    return first_legal((TmaWgmmaConfig(**words).filling(arch.device) for words in tiles), problem, arch)


def ways(problem: HwcnProblem) -> list[dict[str, Any]]:
    """Fields that say what a stage has, for every way worth trying."""
    p = problem
    found: list[dict[str, Any]] = []
    skips = (True, False) if p.pad != (0, 0) else (True,)
    ci = p.ci // phases.phases(p) if phases.serve(p) else p.ci
    most = min(TURNED[-1], -(-ci // K) * K)
    stages = range(1, -(-ci // min(most, 32)) + 1)
    channels = sorted({-(-ci // count // K) * K or K for count in stages} & set(range(K, most + 1, K)), reverse=True)
    if p.ci * max(p.kh, p.kw) > K or p.kh * p.kw == 1:
        found += [dict(block_k=k, skip_padding=skip) for k in channels[:4] for skip in skips]
    if p.kh * p.kw > 1:
        found += [dict(block_k=k, window=True) for k in window_k(p)]
    if p.n % RUN and p.ci >= K:
        # those of which fewest channels are none, the widest first
        inside = sorted((k for k in TURNED if k < 2 * p.ci and 2 * k > min(p.ci, 32)), key=lambda k: (-p.ci % k, -k))
        found += [dict(block_k=k, turned=True, skip_padding=skip) for k in inside[:3] for skip in skips]
    if p.kh > 1:
        shared = [dict(block_k=k) for k in SHARED_K if k <= most]
        if p.n % RUN and p.ci >= K:
            shared += [dict(block_k=k, turned=True) for k in SHARED_K if k < 2 * p.ci]
        found += [dict(way, lines=lines) for way in shared for lines in LINES if lines <= p.out_h]
    return found


def shapes(problem: HwcnProblem, way: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields of the tile: those of `SHAPES`, and others as wide as boxes of all images are, of consumers that share it
    or take turns."""
    p, found = problem, [dict(block_m=m, block_n=n, consumers=consumers) for m, n, consumers in SHAPES]
    in_phases = phases.serve(p) and not (way.get("turned") or way.get("window"))
    unit = p.n if way.get("turned") else -(-(phases.columns(p) if in_phases else p.n) // K) * K
    widths = {-(-unit * pixels // K) * K for pixels in range(1, 17) if 64 <= unit * pixels <= 256}
    for width in sorted(widths, reverse=True)[:4]:
        more = [(256, width, 2), (192, width, 3), (128, width, 2), (64, width, 1)]
        found += [dict(block_m=m, block_n=n, consumers=c) for m, n, c in more if (m, n, c) not in SHAPES]
        more = [(128, width, 2), (64, width, 2)]
        found += [
            dict(block_m=m, block_n=n, consumers=c, ping_pong=True) for m, n, c in more if (m, n, c) not in PING_PONG
        ]
    return found


def space(problem: HwcnProblem, arch: Arch) -> Sequence[TmaWgmmaConfig]:
    """Legal or not, every tile, way, number of stages and cluster."""
    every = ways(problem)
    tiles = {tuple(shape.items()) for way in every for shape in shapes(problem, way)}
    in_turn = (dict(block_m=m, block_n=n, consumers=c, ping_pong=True) for m, n, c in PING_PONG)
    return ProductSpace(
        TmaWgmmaConfig,
        [*map(dict, sorted(tiles)), *in_turn],
        every,
        DEPTHS,
        [*clusters(1, arch.device), *clusters(2, arch.device)],
    )


SCHEDULE = tma_schedule(
    "tma_wgmma",
    "a product for boxes of pixels on Hopper: TMA with multicast, mbarrier ring, wgmma, persistent",
    TmaWgmmaConfig,
    default,
    space,
    siblings=("mma",),
    estimate=estimate,
    more=lambda problem, work: dict(prepare=partial(turned.copies, problem, work.workspace)),
    channels_along_rows=True,
    boxes=boxes,
    phases=lambda problem: phases.phases(problem) if phases.serve(problem) else 1,
)
