"""int8 convolution over NCHW32 on Hopper: pixels x output channels by TMA and wgmma.

A tile of pixels is a box (n, h, w) of one or more groups of 32 channels; a group is a row of 32 bytes, which TMA and
wgmma swizzle alike.  The filter (ci/32, kh, kw, co', 32) as it is prepacked needs no other order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedules.arch import Arch
from schedules.conv2d_nchw32.definition import Nchw32Problem
from schedules.conv2d_nchw32.epilogue import unrounded
from schedules.conv2d_nchw32.packing import GROUP
from schedules.hopper import NO_ROUTES
from schedules.hopper.config import HopperConfig, blocks, default_shape, fitting_stages
from schedules.hopper.pixels import PixelTiles, flattened, pixel_tiles, place_pixels
from schedules.hopper.shared import SharedTile, Staging, TensorMap, staging_for
from schedules.hopper.work import Load, Operand, Output, Tensors, Work
from schedules.operator import ScheduleSpec
from schedules.problem import numpy_dtype

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class TmaWgmmaConfig(HopperConfig):
    """Tiles of (pixels, output channels, input channels)."""

    block_k: int = 128

    @property
    def groups(self) -> int:
        """Groups of input channels in a stage."""
        return self.block_k // GROUP

    def staging(self, problem: Nchw32Problem) -> Staging:
        return staging_for(self.rows, self.block_n, numpy_dtype(problem.out_dtype).itemsize, GROUP)

    def check(self, problem: Nchw32Problem, arch: Arch) -> str | None:
        staging = 0 if self.consumers < 1 or self.block_n % GROUP else self.staging(problem).nbytes
        reason = self.check_block(problem.dtype, arch, staging)
        if reason:
            return reason
        for name in ("cluster_m", "cluster_n"):
            if self.groups > 1 and self.groups % getattr(self, name):
                return f"block_k={self.block_k} is not {name}={getattr(self, name)} times a multiple of {GROUP}"
        tiles = _tiles(problem, self)
        if tiles is None:
            return f"block_m={self.block_m} pixels at stride {problem.stride} are more than TMA reaches over"
        if problem.residual and problem.pixels * problem.co_groups * GROUP >= 2**31:
            return "the residual has 2**31 elements or more, which 32-bit indices do not reach"
        return Nchw32Work(problem, self, tiles).reason()


def _tiles(problem: Nchw32Problem, config: TmaWgmmaConfig) -> PixelTiles | None:
    """The boxes of a block's pixels; cut for the cluster only where there is but one group to deal out."""
    shared = config.cluster_n if config.groups == 1 else 1
    return pixel_tiles(flattened(problem, batch=False), config.block_m, (config.consumers, shared))


@dataclass(frozen=True)
class Place:
    """A block's tile: its first output pixel, and its first group of output channels."""

    pixel: tuple[Any, Any, Any]
    group: Any


class Nchw32Work(Work):
    config: TmaWgmmaConfig

    def __init__(self, problem: Nchw32Problem, config: TmaWgmmaConfig, tiles: PixelTiles) -> None:
        p = flattened(problem, batch=False)
        self.problem, self.config, self.tiles = p, config, tiles
        self.arguments = problem.arguments()
        self.kernel = (p.kh, p.kw)
        self.groups_out = config.block_n // GROUP
        self.chunks = -(-p.ci_groups // config.groups)
        self.columns = -(-p.co_groups // (self.groups_out * config.cluster_n))  # tiles of a cluster along the channels
        self.clusters = -(-tiles.count // config.cluster_m) * self.columns
        # each of a cluster loads some of the groups, or some of the rows of the only one
        whole = config.groups > 1
        n, h, w = tiles.box if whole else tiles.part(config.cluster_n)
        image = p.h * p.w * GROUP
        self.a = Operand(
            SharedTile(config.block_m, config.block_k, 1, GROUP),
            TensorMap(
                "data",
                p.dtype,
                (GROUP, p.w, p.h, p.n, p.ci_groups),
                (GROUP, p.w * GROUP, p.ci_groups * image, image),
                (GROUP, w, h, n, config.groups // config.cluster_n if whole else 1),
                (1, p.stride[1], p.stride[0], 1, 1),
                GROUP,
            ),
        )
        channels, taps = p.co_groups * GROUP, p.kh * p.kw
        rows = config.block_n if whole else config.block_n // config.cluster_m
        self.b = Operand(
            SharedTile(config.block_n, config.block_k, 1, GROUP),
            TensorMap(
                "filter",
                p.dtype,
                (GROUP, channels, taps, p.ci_groups),
                (GROUP, channels * GROUP, taps * channels * GROUP),
                (GROUP, rows, 1, config.groups // config.cluster_m if whole else 1),
                (1, 1, 1, 1),
                GROUP,
            ),
        )
        staging = config.staging(problem)
        n, h, w = tiles.part(config.consumers)
        row = staging.row_bytes
        image = p.out_h * p.out_w * row
        target = TensorMap(
            "output",
            p.out_dtype,
            (GROUP, p.out_w, p.out_h, p.n, p.co_groups),
            (row, p.out_w * row, p.co_groups * image, image),
            (GROUP, w, h, n, 1),
            (1, 1, 1, 1, 1),
            row,
            promotion=0,
        )
        self.output = Output(p.out_dtype, staging, target)

    def place(self, tile: Any, rank_m: Any, rank_n: Any) -> Place:
        from schedules.hopper.program import named

        cluster = self.config.cluster_m, self.config.cluster_n
        pixel, column = place_pixels(self.tiles, self.columns, cluster, tile, rank_m, rank_n)
        return Place(pixel, named("group_out", column * self.groups_out))

    def loads_a(self, place: Place, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
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
        return [Load(offset, (0, x, y, n, first))]

    def loads_b(self, place: Place, ry: Any, rx: Any, chunk: Any, part: Any) -> Sequence[Load]:
        tile, config = self.b.tile, self.config
        first, channel = chunk * config.groups, place.group * GROUP
        if config.groups > 1:
            first = first + part * (config.groups // config.cluster_m)
        else:
            channel = channel + part * (tile.rows // config.cluster_m)
        return [Load(part * (tile.nbytes // config.cluster_m), (0, channel, ry * self.kernel[1] + rx, first))]

    def store_at(self, place: Place, consumer: Any, column: int) -> tuple[Any, ...]:
        n, y, x = self.tiles.of_part(place.pixel, consumer, self.config.consumers)
        return 0, x, y, n, place.group + column // GROUP

    def row_term(self, tensors: Tensors, place: Place, consumer: Any, row: Any) -> Any:
        """Whether the row is a pixel, and where group 0 of it begins in the residual."""
        from tvm import tirx
        from tvm.script import tirx as T

        from schedules.hopper.program import named

        p = self.problem
        if not p.residual:
            return None
        _, h, w = self.tiles.part(self.config.consumers)
        n, y, x = self.tiles.of_part(place.pixel, consumer, self.config.consumers)
        n, y, x = n + T.truncdiv(row, h * w), y + T.truncmod(T.truncdiv(row, w), h), x + T.truncmod(row, w)
        is_pixel = tirx.all(n < p.n, y < p.out_h, x < p.out_w)
        start = ((n * p.co_groups * p.out_h + y) * p.out_w + x) * GROUP
        return named("is_pixel", is_pixel), named("start", start)

    def column_term(self, tensors: Tensors, place: Place, column: Any) -> Any:
        from tvm import tirx

        from schedules.hopper.program import named

        if not self.problem.bias:
            return None
        channel = tirx.min(place.group * GROUP + column, self.problem.co_groups * GROUP - 1)
        return named("bias", tensors["bias"][channel])

    def finish(self, tensors: Tensors, place: Place, total: Any, of_row: Any, of_column: Any, column: Any) -> Any:
        from tvm import tirx

        p, residual = self.problem, None
        if p.residual:
            is_pixel, start = of_row
            group = place.group + tirx.truncdiv(column, GROUP)
            at = start + group * (p.out_h * p.out_w * GROUP) + tirx.truncmod(column, GROUP)
            inside = tirx.all(is_pixel, group < p.co_groups)
            residual = _read(tensors["flat residual"], at, inside)
        return unrounded(p, total, of_column, residual)


_TYPES = {"int8": "signed char", "int32": "int", "float32": "float"}


def _read(buffer: Any, at: Any, inside: Any) -> Any:
    """An element of the residual, or 0 if not `inside`; int8 as int32.

    Volatile, since the compiler otherwise loads all of a thread's at once, and spills the sums for them.
    """
    from tvm.script import tirx as T

    dtype = str(buffer.dtype)
    kind, wide = _TYPES[dtype], "float" if dtype == "float32" else "int"
    name = f"hopper_residual_{dtype}"
    source = (
        f"__device__ __forceinline__ {wide} {name}(const void* at, bool inside) {{\n"
        f"  return inside ? *(const volatile {kind}*)at : 0;\n}}\n"
    )
    pointer = buffer.ptr_to([at])
    return T.cuda.func_call(
        name, pointer, inside, source_code=source, return_type="float32" if wide == "float" else "int32"
    )


def schedule(problem: Nchw32Problem, config: TmaWgmmaConfig, arch: Arch) -> tvm.IRModule:
    """The TIRx program for data (n, ci/32, h, w, 32), filter (ci/32, kh, kw, co', 32), bias (co',) and residual if any,
    output (n, co'/32, out_h, out_w, 32)."""
    from schedules.hopper.program import program

    tiles = _tiles(problem, config)
    assert tiles is not None  # checked
    return program(Nchw32Work(problem, config, tiles))


def default(problem: Nchw32Problem, arch: Arch) -> TmaWgmmaConfig:
    """The tile with the least work on the busiest multiprocessor, the most stages that fit, filters shared by two."""
    block_m, block_n, consumers = default_shape(problem.pixels, problem.co_groups * GROUP)
    channels = 128
    while channels > GROUP and channels // 2 >= problem.ci_groups * GROUP:
        channels //= 2
    config = TmaWgmmaConfig(block_m, block_n, channels, 2, consumers, 2 if problem.pixels > block_m else 1, 1)
    return replace(config, num_stages=fitting_stages(config, problem.dtype, arch, config.staging(problem).nbytes))


def space(problem: Nchw32Problem, arch: Arch) -> Iterator[TmaWgmmaConfig]:
    return (TmaWgmmaConfig(**words) for words in blocks(problem.dtype))


SCHEDULE = ScheduleSpec(
    name="tma_wgmma",
    summary="implicit GEMM on Hopper: TMA with multicast, mbarrier ring, int8 wgmma, persistent",
    kinds=("cuda",),
    config=TmaWgmmaConfig,
    apply=schedule,
    default=default,
    space=space,
    no_routes=NO_ROUTES,
)
