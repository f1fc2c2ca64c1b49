"""HWCN convolution on Hopper: for each output pixel, output channels x batch by TMA and wgmma.

Both operands have their reduction axis outside (MN-major), in runs of 64 rows of 128 bytes.  Kernel taps in the padding
are left out, and pixels that need all of them come first, so that the last tiles to finish are short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from schedules.arch import Arch
from schedules.conv2d_hwcn.definition import HwcnProblem, inside_window
from schedules.hopper import NO_ROUTES
from schedules.hopper.config import HopperConfig, blocks, tiles_of
from schedules.hopper.pixels import taps_inside
from schedules.hopper.shared import SharedTile, Staging, TensorMap, staging_for
from schedules.hopper.work import Load, Operand, Output, Tensors, Work, fastest
from schedules.operator import ScheduleSpec

if TYPE_CHECKING:
    import tvm

DTYPES = ("float16", "bfloat16")
ITEM = 2  # bytes
VECTOR = 8  # elements in 16 bytes
RUN = 64  # rows of an operand side by side in 128 bytes


@dataclass(frozen=True)
class TmaWgmmaConfig(HopperConfig):
    """Tiles of (output channels, batch, input channels)."""

    skip_padding: bool = True  # kernel taps in the padding are left out; else they are multiplied as zeros

    def staging(self) -> Staging:
        return staging_for(self.rows, self.block_n, ITEM, RUN)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        if problem.dtype not in DTYPES:
            return f"dtype={problem.dtype} is not {' or '.join(DTYPES)}"
        for name in ("n", "co"):
            if getattr(problem, name) % VECTOR:
                return f"{name}={getattr(problem, name)} is not a multiple of {VECTOR}, which TMA needs"
        reason = self.check_block(problem.dtype, arch)
        if reason:
            return reason
        for name, size, cluster, parts in (
            ("block_m", self.block_m, "cluster_n", self.cluster_n),
            ("block_n", self.block_n, "cluster_m", self.cluster_m),
        ):
            if size % (RUN * parts):
                return f"{name}={size} is not {cluster}={parts} times a multiple of {RUN}"
        return HwcnWork(problem, self).reason(arch)


@dataclass(frozen=True)
class Place:
    """A block's tile: its output pixel, its first output channel and image, and the kernel taps it needs."""

    pixel: Any
    y: Any
    x: Any
    channel: Any
    image: Any
    taps: tuple[Any, Any, Any, Any]


class HwcnWork(Work):
    config: TmaWgmmaConfig

    def __init__(self, problem: HwcnProblem, config: TmaWgmmaConfig) -> None:
        p = problem
        self.problem, self.config = p, config
        self.arguments = p.arguments()
        self.kernel = (p.kh, p.kw)
        self.chunks = -(-p.ci // config.block_k)
        self.rows = -(-p.co // (config.block_m * config.cluster_m))  # tiles of a cluster along the channels
        self.columns = -(-p.n // (config.block_n * config.cluster_n))  # and along the batch
        self.clusters = p.out_h * p.out_w * self.rows * self.columns
        box = (RUN, config.block_k)
        self.a = Operand(
            SharedTile(config.block_m, config.block_k, ITEM, RUN, transposed=True),
            TensorMap(
                "filter",
                p.dtype,
                (p.co, p.ci, p.kh * p.kw),
                (p.co * ITEM, p.ci * p.co * ITEM),
                (*box, 1),
                (1, 1, 1),
                RUN * ITEM,
            ),
        )
        self.b = Operand(
            SharedTile(config.block_n, config.block_k, ITEM, RUN, transposed=True),
            TensorMap(
                "data",
                p.dtype,
                (p.n, p.ci, p.w, p.h),
                (p.n * ITEM, p.ci * p.n * ITEM, p.w * p.ci * p.n * ITEM),
                (*box, 1, 1),
                (1, 1, 1, 1),
                RUN * ITEM,
            ),
        )
        staging = config.staging()
        target = TensorMap(
            "output",
            p.dtype,
            (p.n, p.co, p.out_h * p.out_w),
            (p.n * ITEM, p.co * p.n * ITEM),
            (staging.width, config.rows, 1),
            (1, 1, 1),
            staging.row_bytes,
            promotion=0,
        )
        self.output = Output(p.dtype, staging, target)

    def place(self, tile: Any, rank_m: Any, rank_n: Any) -> Place:
        from tvm.script import tirx as T

        from schedules.hopper.program import named
        from schedules.primitives.order import inside_first

        p, config = self.problem, self.config
        each = self.rows * self.columns
        window = inside_window(p)
        if config.skip_padding and window:
            tile = named("place", inside_first(tile, (each, p.out_w, *window)))
        pixel = named("pixel", T.truncdiv(tile, each))
        y, x = named("y", T.truncdiv(pixel, p.out_w)), named("x", T.truncmod(pixel, p.out_w))
        row, column = T.truncmod(tile, self.rows), T.truncmod(T.truncdiv(tile, self.rows), self.columns)
        channel = named("channel", (row * config.cluster_m + rank_m) * config.block_m)
        image = named("image", (column * config.cluster_n + rank_n) * config.block_n)
        return Place(pixel, y, x, channel, image, self._taps(y, x))

    def _taps(self, y: Any, x: Any) -> tuple[Any, Any, Any, Any]:
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

    def taps(self, place: Place) -> tuple[Any, Any, Any, Any]:
        return place.taps

    def loads_a(self, place: Place, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        tap = ry * self.kernel[1] + rx
        return self._runs(self.a.tile, part, self.config.cluster_n, place.channel, (chunk * self.a.tile.k, tap))

    def loads_b(self, place: Place, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        p = self.problem
        y = place.y * p.stride[0] + ry * p.dilation[0] - p.pad[0]
        x = place.x * p.stride[1] + rx * p.dilation[1] - p.pad[1]
        return self._runs(self.b.tile, part, self.config.cluster_m, place.image, (chunk * self.b.tile.k, x, y))

    @staticmethod
    def _runs(tile: SharedTile, part: Any, parts: int, start: Any, at: tuple[Any, ...]) -> list[Load]:
        """The runs of part number `part` of a tile whose first row is `start`."""
        count = tile.rows // RUN // parts
        runs = (part * count + run for run in range(count))
        return [Load(run * tile.slab, (start + run * RUN, *at)) for run in runs]

    def store_at(self, place: Place, consumer: Any, column: int) -> tuple[Any, ...]:
        return place.image + column, place.channel + consumer * self.config.rows, place.pixel

    def finish(self, tensors: Tensors, place: Place, total: Any, of_row: Any, of_column: Any, column: Any) -> Any:
        return total


def schedule(problem: HwcnProblem, config: TmaWgmmaConfig, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    from schedules.hopper.program import program

    return program(HwcnWork(problem, config))


def default(problem: HwcnProblem, arch: Arch) -> TmaWgmmaConfig:
    """The tile and the cluster of the least estimated time, with the most stages that fit."""
    channels = 64
    while channels > 16 and channels // 2 >= problem.ci:
        channels //= 2
    base = TmaWgmmaConfig(block_k=channels)
    legal = (config for config in tiles_of(base) if config.check(problem, arch) is None)
    found = fastest((HwcnWork(problem, config) for config in legal), arch)
    return found.config if found else base


def space(problem: HwcnProblem, arch: Arch) -> Iterator[TmaWgmmaConfig]:
    found = (TmaWgmmaConfig(**words) for words in blocks(problem.dtype))
    return chain.from_iterable((config, replace(config, skip_padding=False)) for config in found)


SCHEDULE = ScheduleSpec(
    name="tma_wgmma",
    summary="a product for each pixel on Hopper: TMA with multicast, mbarrier ring, wgmma, persistent",
    kinds=("cuda",),
    config=TmaWgmmaConfig,
    apply=schedule,
    default=default,
    space=space,
    no_routes=NO_ROUTES,
)
