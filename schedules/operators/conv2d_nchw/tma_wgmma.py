"""NCHW convolution on Hopper: output channels x pixels by TMA and wgmma, taps along a row added up in registers.

TMA cannot load pixels shifted along their contiguous axis by less than 16 bytes.  So each step of the reduction, a
kernel row and a chunk of channels, loads its pixels once, unshifted, and multiplies them with the filters of all kw
taps of the row, into kw sets of sums; the epilogue adds these up, each shifted by its tap.  The products are those of
an ordinary implicit GEMM and the loads of pixels kw times fewer, at kw times the sums.  Columns of wgmma are pixels,
so that a shift is a choice of registers and a shuffle.  With `halo` a step is a chunk of channels: the rows that all
of the kernel looks at are loaded once, the kernel's rows are offsets into them, and a stage has the filters of all
taps.

A stride along a row is taken where a row of the kernel has one tap: columns are all pixels that are loaded, and the
epilogue leaves out those that no output looks at.  Rows that a stride leaves out are not loaded, and where the kernel
has one row, what counts is that rows which are looked at are whole 16 bytes apart.

With `phases` taps along a row are phases of the reduction, the last tap's first, between which the sums move by a
column: one set of sums, for wider tiles, and loads as those of an ordinary implicit GEMM.  A row's first sums, which
move out of it, are complete then, since the taps to come look beyond the image at them: they wait in registers.

The filter comes packed, (kh, kw, co, ci), rows of ci (K-major), or is packed by a kernel before (`repack`); pixels lie
as they are (MN-major), whole image rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, ClassVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.space import ProductSpace, Words, axis
from schedules.core.tvm import T, tirx
from schedules.hopper.config import DEPTHS, REGISTERS, ROWS, HopperConfig, clusters, first_legal, work_of
from schedules.hopper.geometry import Load, Operand, Output, Product, Shifts, Work
from schedules.hopper.pixels import Pixel, TilePlace, flattened, is_output, place_pixels, whole
from schedules.hopper.rows import GROUP, RowTiles, flat_tiles, late, output_map, row_tiles, shifts, whole_rows
from schedules.hopper.schedule import SHIFTING, tma_schedule
from schedules.hopper.shared import Runs, RunStaging, SharedTile, Staging, TensorMap, run_staging, staging_for
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw.repack import by_classes, filter_argument, repack, workspace_of
from schedules.tirx.types import Expr, Index
from schedules.tirx.values import named

ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
STEP = 2  # pixels that a stride along a row moves by, at most
SECTORS = 1  # CUtensorMapL2promotion of 64 bytes: no more of the rows between, which a stride leaves out


@dataclass(frozen=True)
class TmaWgmmaConfig(HopperConfig):
    """Tiles of (output channels, pixels, input channels)."""

    addressing: ClassVar[int] = 40  # less than others, as columns have no bias
    thins: ClassVar[bool] = True  # a tile's columns are pixels that are loaded, of which a stride leaves some out

    block_n: int = 128
    consumers_n: int = 1  # consumers side by side along the pixels

    halo: bool = False  # pixels are loaded once for all kernel rows, with the rows around them; else once for each
    phases: bool = False  # a stage has one tap of a kernel row, and the sums move between taps; else all of them

    def rows_of(self, problem: NchwProblem) -> RowTiles | None:
        """The output pixels of a block; None if there are no such tiles."""
        if self.consumers_n < 1 or self.block_n < self.consumers_n:
            return None
        tiles = flat_tiles if self.phases else row_tiles
        return tiles(looked_at(problem), self.columns, self.consumers_n, images=not self.halo)

    def loaded(self, rows: RowTiles) -> RowTiles:
        """The pixels of a stage."""
        return rows.with_halo() if self.halo else rows

    def staging(self, rows: RowTiles) -> Staging | RunStaging:
        stored = (self.columns - sum(rows.margins)) // rows.step
        run = rows.run // rows.step
        if late(rows.tiles.problem.out_w) or run < self.granule:
            return run_staging(self.rows, stored, stored + GROUP, ITEM)
        return staging_for(self.rows, stored, ITEM, run)

    def classes(self, problem: NchwProblem) -> int:
        """Of channels whose rows begin alike, which are phases of the reduction."""
        return classes_of(problem) if self.phases else 1

    @classmethod
    def unfit(cls, problem: NchwProblem, arch: Arch) -> str | None:
        p = looked_at(problem)
        if p.ci % VECTOR:
            return f"ci={p.ci} is not a multiple of {VECTOR}, which TMA needs"
        if classes_of(problem) == 1 and pitch(problem) % VECTOR:
            return _apart(problem)
        if p.stride[1] != 1 and (p.stride[1] > STEP or p.kw > 1 or p.pad[1]):
            return f"stride={p.stride} moves {p.stride[1]} pixels along a row, sums can be shifted only at 1"
        reach = max(map(abs, shifts(p)))
        if reach > GROUP:
            return f"pad={p.pad[1]}, dilation={p.dilation[1]} reach over {reach} pixels, sums shift by {GROUP} at most"
        return super().unfit(problem, arch)

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        p, reason = looked_at(problem), self.unfit(problem, arch)
        if reason:
            return reason
        classes = self.classes(problem)
        if classes == 1 and pitch(problem) % VECTOR:
            return _apart(problem)
        if self.halo and p.stride[0] != 1:
            return f"halo={self.halo} at stride={p.stride} would load rows that no tap looks at"
        if self.phases and classes == 1 and (p.kw == 1 or p.stride[0] != 1 or p.dilation[1] != 1 or p.pad[1] >= p.kw):
            return (
                f"phases={self.phases} is for several taps along a row, side by side and not all of them beyond it, at"
                f" stride 1, not for kw={p.kw}, stride={p.stride}, pad={p.pad[1]}, dilation={p.dilation[1]}"
            )
        rows = self.rows_of(problem)
        reason = self.check_block(p.dtype, arch, 1 if self.phases else p.kw)
        if reason:
            return reason
        if rows is None:
            return (
                f"block_n={self.block_n} for consumers_n={self.consumers_n} holds no whole number of rows of"
                f" {max(p.w, p.out_w)} pixels"
            )
        if (self.columns - sum(rows.margins)) % (self.granule * rows.step):
            return f"block_n={self.block_n} leaves no multiple of {self.granule} pixels at stride={p.stride}"
        if self.phases:
            kept = moves(p, self, rows, classes).sums(self.rows // ROWS)
            reason = self.check_sums(arch, 1, self.addressing + kept)
            if reason:
                return reason
        if not self.loaded(rows).cut(self.cluster_m) and self.block_k % (8 * self.cluster_m):
            return f"block_k={self.block_k} is not cluster_m={self.cluster_m} times a multiple of 8"
        if self.block_m % (8 * self.cluster_n):
            return f"block_m={self.block_m} is not cluster_n={self.cluster_n} times a multiple of 8"
        work: NchwWork = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: NchwProblem) -> NchwWork | None:
        rows = self.rows_of(problem)
        return NchwWork(problem, self, rows) if rows else None


def classes_of(problem: NchwProblem) -> int:
    """Of channels whose rows begin alike; 1 where they are no phases of a reduction."""
    p = flattened(problem, batch=False)
    alone = (p.kh, p.kw, p.stride, p.pad, p.h) == (1, 1, (1, 1), (0, 0), 1) and p.w > VECTOR
    return VECTOR // math.gcd(p.w, VECTOR) if alone else 1


def _apart(problem: NchwProblem) -> str:
    return f"rows that are looked at are {pitch(problem)} pixels apart, TMA needs a multiple of {VECTOR}"


def pitch(problem: NchwProblem) -> int:
    """Pixels from a row that is looked at to the next."""
    p = flattened(problem, batch=False)
    return p.w * (p.stride[0] if (p.kh, p.pad[0]) == (1, 0) else 1)


def looked_at(problem: NchwProblem) -> NchwProblem:
    """`problem` with pixels as tiles count them: of kernels of one row only rows that are looked at, `pitch` apart."""
    p: NchwProblem = flattened(problem, batch=False)
    return p if pitch(problem) == p.w else p.unchecked(h=p.out_h, stride=(1, p.stride[1]))


def moves(problem: NchwProblem, config: TmaWgmmaConfig, rows: RowTiles, classes: int) -> Shifts:
    """Of the sums of a consumer, between the taps of a row of `problem`, from the last to the first, or its `classes`
    of channels, from the latest on."""
    p, row, groups = problem, rows.width // GROUP, config.columns // GROUP
    following = tuple(group + 1 if (group + 1) % row else None for group in range(groups))
    if classes > 1:
        return Shifts(classes, GROUP // classes, following)
    # parts of rows have margins, into which what is stored moves
    kept = tuple(range(0, groups, row)) if p.pad[1] and rows.margins == (0, 0) else ()
    return Shifts(p.kw, 1, following, p.pad[1], kept)


class NchwWork(Work[TilePlace]):
    config: TmaWgmmaConfig
    channels_along_rows = True

    def __init__(self, problem: NchwProblem, config: TmaWgmmaConfig, rows: RowTiles) -> None:
        p = looked_at(problem)
        self.given, self.problem, self.config, self.rows = problem, p, config, rows
        self.arguments, self.epilogue = problem.arguments(), p.epilogue
        self.classes = config.classes(problem)
        packed = by_classes(problem, self.classes)
        self.workspace = workspace_of(packed)
        self.loaded = config.loaded(rows)
        stages, taps = (1, p.kh) if config.halo else (p.kh, 1)  # kernel rows by stages, and in a stage
        self.kernel = (stages, 1)
        self.margin = rows.margins[0]
        channels = p.ci // self.classes
        self.chunks = (max(p.kw, self.classes) if config.phases else 1) * -(-channels // config.block_k)
        if config.phases:
            self.shifts = moves(p, config, rows, self.classes)
        across = 1 if config.phases else p.kw  # taps along a row in a stage
        self.channels = -(-p.co // (config.block_m * config.cluster_m))  # tiles of a cluster along the channels
        self.clusters = whole(rows.tiles.count, config.cluster_n) * self.channels
        run = min(config.block_k, 128 // ITEM)
        filters = filter_argument(packed)
        line = channels if self.classes == 1 else filters.shape[-1]
        self.a = Operand(
            SharedTile(config.block_m, config.block_k, ITEM, run),
            TensorMap(
                filters.name,
                p.dtype,
                (channels, p.co, p.kh * p.kw * self.classes),
                (line * ITEM, p.co * line * ITEM),
                (run, config.block_m // config.cluster_n, 1),
                (1, 1, 1),
                run * ITEM,
            ),
            taps * across,
        )
        image = problem.h * problem.w * ITEM
        h, w = (1, p.h * p.w) if rows.flat else (p.h, p.w)
        apart, each = w if rows.flat else pitch(problem), image  # rows, and channels
        if self.classes > 1:
            # a row begins at the last 16 bytes at which it could, were its class's and those before it so far apart
            apart, each, h = w // VECTOR * VECTOR, self.classes * image, self.classes
            w += (h - 1) * (w - apart)
        self.b = Operand(
            SharedTile(self.loaded.pixels, config.block_k, ITEM, rows.run, transposed=True),
            TensorMap(
                "data",
                p.dtype,
                (w, channels, h, p.n),
                (each, apart * ITEM, p.ci * image),
                self.loaded.box(config.block_k, config.cluster_m),
                (1, 1, p.stride[0], 1),
                rows.run * ITEM,
                promotion=SECTORS if apart > w else TensorMap.promotion,
            ),
        )
        down = p.dilation[0] * (rows.width // rows.run) * self.b.tile.slab
        self.products = tuple(
            Product(rx, (ry * across + rx) * self.a.tile.nbytes, ry * down)
            for ry, rx in product(range(taps), range(across))
        )
        staging = config.staging(rows)
        self.output = Output(p.dtype, staging, self._target(staging))

    def _target(self, staging: Staging | RunStaging) -> TensorMap | Runs:
        p = self.problem
        if isinstance(staging, Staging):
            return output_map(p, staging, self.config.rows, self.rows.flat)
        return Runs("output", math.prod(self.arguments[-1].shape), 1, math.gcd(p.out_w, VECTOR))

    def of_images(self, n: Expr) -> NchwWork:
        tiles = replace(self.rows.tiles, problem=self.problem.unchecked(n=n))
        return NchwWork(self.given.unchecked(n=n), self.config, replace(self.rows, tiles=tiles))

    def place(self, tile: Expr, rank_m: Index, rank_n: Index) -> TilePlace:
        cluster = self.config.cluster_n, self.config.cluster_m
        pixel, row = place_pixels(self.rows.tiles, self.channels, cluster, tile, rank_n, rank_m)
        return TilePlace(pixel, named("channel", row * self.config.block_m))

    def loads_a(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.a.tile, self.config.block_m // self.config.cluster_n
        taps = [ry * self.a.count + tap for tap in range(self.a.count)]
        if self.classes > 1:
            taps = [self._class_of(chunk)]
        elif self.shifts:
            across = self.problem.kw - 1 - T.truncdiv(chunk, self.chunks_of_phase)
            taps = [tap * self.problem.kw + across for tap in taps]
        channel = self._channel_of(chunk)
        return [
            Load(
                number * tile.nbytes + run * tile.slab + part * (rows * tile.swizzle),
                (channel + run * tile.run, place.channel + part * rows, tap),
            )
            for (number, tap), run in product(enumerate(taps), range(tile.k // tile.run))
        ]

    def _class_of(self, chunk: Expr) -> Expr:
        """The class of the channels of a chunk: late by as many pixels as there are phases to come, times what sums
        move by."""
        odd = self.problem.w // math.gcd(self.problem.w, VECTOR) % self.classes  # its own inverse
        phase = T.truncdiv(chunk, self.chunks_of_phase)
        return named("class_", T.truncmod((self.classes - 1 - phase) * odd, self.classes))

    def _channel_of(self, chunk: Expr) -> Expr:
        """The first channel of a chunk, of whatever phase."""
        return (T.truncmod(chunk, self.chunks_of_phase) if self.shifts else chunk) * self.a.tile.k

    def loads_b(self, place: TilePlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        p, tile, first = self.problem, self.b.tile, self._channel_of(chunk)
        down, after = ry * p.dilation[0] - p.pad[0], T.int32(0)
        if self.classes > 1:
            down = self._class_of(chunk)
            after = T.truncdiv(down * (p.w % VECTOR), VECTOR) * VECTOR
        return [
            Load(offset, (x + after if self.classes > 1 else x, first + channel, y, n))
            for offset, x, channel, y, n in self.loaded.loads(tile, place.pixel, part, self.config.cluster_m, down)
        ]

    def store_at(self, place: TilePlace, part: Index, column: int) -> tuple[Index, ...]:
        n, y, x = self._first_pixel(place, part)
        _, h, w = self.rows.tiles.part(self.config.consumers_n)
        if self.rows.flat:
            return y * w + column % (h * w), self._channel(place, part, 0), 0, n + column // (h * w)
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

    def run_at(self, place: TilePlace, part: Index, row: Expr, column: Expr) -> tuple[Expr, Expr]:
        at_channel, is_channel = self.row_start(place, part, row)
        at_pixel, is_pixel = self.column_start(place, part, column)
        inside = tirx.if_then_else(tirx.all(is_channel, is_pixel), 1, 0)
        return named("index", at_channel + at_pixel), named("inside", inside)

    def column_start(self, place: TilePlace, part: Index, column: Expr) -> tuple[Expr, Expr]:
        p = self.problem
        n, y, x = pixel = self.rows.tiles.pixel(self._first_pixel(place, part), column)
        return (n * p.co * p.out_h + y) * p.out_w + x, is_output(p, pixel)


def _more(problem: NchwProblem, work: NchwWork) -> dict[str, Any]:
    """How results leave, and the kernel before."""
    from schedules.hopper.shifted import ShiftedResults

    shifted = {} if work.shifts else dict(way_out=partial(ShiftedResults, work.rows))
    return dict(shifted, prepare=partial(repack, by_classes(problem, work.classes)))


# 64 rows of a block, consumers, those side by side, and what else
WAYS: tuple[tuple[int, int, int, Words], ...] = (
    (2, 2, 1, {}),
    (1, 2, 2, {}),
    (1, 1, 1, {}),
    (3, 3, 1, {}),
    (1, 3, 3, {}),
    (4, 2, 1, {}),
    (2, 2, 2, {}),
    (2, 1, 1, {}),
    (1, 2, 1, dict(ping_pong=True)),
    (2, 2, 1, dict(ping_pong=True)),
)
COLUMNS = (128, 96, 64, 48, 32, 256, 224, 192, 160, 144, 112, 80, 16)  # of a consumer; with phases `phase_widths`
LONGEST_RUN = 256  # columns of a wgmma
TARGETS = (256, 192, 128, 64)  # of which widths that are tried are the next narrower


def default(problem: NchwProblem, arch: Arch) -> TmaWgmmaConfig:
    """The class's with two stages, or else the first legal tile, narrow ones first."""
    tiles = [TmaWgmmaConfig(num_stages=2)]
    tiles += [
        TmaWgmmaConfig(rows * ROWS, columns * beside, k, 2, consumers, 1, 1, consumers_n=beside, **words)
        for columns, (rows, consumers, beside, words), k in product(COLUMNS[::-1], WAYS[::-1], (64, 16))
    ]
    return first_legal((config.filling(arch.device) for config in tiles), problem, arch)


@lru_cache
def _tiles(device: Device, runs: tuple[tuple[int, int, bool], ...]) -> tuple[Words, ...]:
    """Fields of every tile and cluster, of `runs`: columns of a consumer, consumers side by side, and phases or not."""
    tiles = [
        dict(block_m=rows * ROWS, block_n=columns * beside, consumers=consumers, consumers_n=beside, **words)
        | (dict(phases=True) if phases else {})
        for (columns, along, phases), (rows, consumers, beside, words) in product(runs, WAYS)
        if along == beside
    ]
    return tuple(
        dict(tile, **words)
        for tile, words in product(tiles, [*clusters(1, device), *clusters(2, device)])
        if (tile["consumers"], words["blocks_sm"]) in REGISTERS and (words["split_k"] == 1 or "ping_pong" not in tile)
    )


def phase_widths(problem: NchwProblem) -> tuple[int, ...]:
    """Columns of a consumer worth trying with phases: of whole rows, or of equal parts of one with its margins."""
    p, most = looked_at(problem), LONGEST_RUN
    if p.kw == 1 and not late(p.w):
        return ()
    if p.w + late(p.w) <= most:
        each = -(-(p.w + late(p.w)) // 16) * 16 if late(p.w) else p.w
        whole = [columns for columns in range(each, most + 1, each) if columns % 16 == 0]
        found = [max(each for each in whole if each <= most) for most in TARGETS if whole and whole[0] <= most]
        found += [columns for columns in TARGETS if whole_rows(p, columns)]  # lengthened
    else:
        parts = range(-(-p.out_w // (most - 2 * GROUP)), p.out_w // 64 + 1)
        found = [-(-p.out_w // count // 16) * 16 + 2 * GROUP for count in parts][: len(TARGETS)]
    return tuple(sorted(set(found), reverse=True))


def runs_of(problem: NchwProblem) -> Iterator[tuple[int, int, bool]]:
    """Columns of a consumer, consumers side by side, and phases or not, of which there are tiles."""
    p, sides = looked_at(problem), dict.fromkeys(beside for _, _, beside, _ in WAYS)
    plain = () if pitch(problem) % VECTOR else COLUMNS
    for tiles, given, phases in ((row_tiles, plain, False), (flat_tiles, phase_widths(problem), True)):
        for columns, beside in product(given, sides):
            if tiles(p, columns, beside):
                yield columns, beside, phases


def space(problem: NchwProblem, arch: Arch) -> Sequence[TmaWgmmaConfig]:
    return ProductSpace(
        TmaWgmmaConfig,
        _tiles(arch.device, tuple(runs_of(problem))),
        axis("block_k", (16, 32, 64, 128)),
        DEPTHS,
        axis("halo", (False, True) if problem.kh > 1 else (False,)),
    )


SCHEDULE = tma_schedule(
    "tma_wgmma",
    "implicit GEMM on Hopper: unshifted rows by TMA, wgmma, taps along a row added in registers, persistent",
    TmaWgmmaConfig,
    default,
    space,
    siblings=("mma", "mma_channels_last"),
    reason=SHIFTING,
    more=_more,
    ranges=True,
    channels_along_rows=True,
)
