"""HWCN convolution of float32 in TF32 on Hopper: for each output pixel, batch x output channels by TMA and wgmma.

Of TF32 wgmma takes only K-major tiles from shared memory, and both the data and the filter have their channels outside.
The data comes as it lies, by TMA into shared memory, and the threads that multiply bring it to wgmma through registers
(`hopper.fragments`); the filter is first copied with its input channels last into workspace of the function.  A
thread's sums are of neighbouring images, which lie side by side in the output: it stores them from its registers.

TMA rounds both operands to nearest, to 10 bits of mantissa: up to 2^-10 of the sum of the absolute products is lost.
Hence it is only used where it is asked for by name.
Source: CUTLASS's sm90 mainloop with operand a from registers, which takes MN-major TF32 the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from schedules.core.arch import Arch
from schedules.core.problem import Argument
from schedules.core.tvm import T, tirx
from schedules.hopper.config import K_BYTES, WARPGROUP, plain, stage_channels, work_of
from schedules.hopper.geometry import Load, Operand, Output
from schedules.hopper.schedule import tf32_schedule
from schedules.hopper.shared import Columns, NoStaging, SharedTile, TensorMap
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.image_tiles import ImageTiles
from schedules.operators.conv2d_hwcn.pixel_work import (
    PixelConfig,
    PixelPlace,
    PixelWork,
    data_map,
    runs_of,
    with_and_without_padding,
)
from schedules.tirx.types import Expr, Index, Tensors
from schedules.tirx.values import named

DTYPE = "float32"
ITEM = 4  # bytes
VECTOR = 4  # elements in 16 bytes
RUN = 32  # images side by side in 128 bytes
GROUP = 8  # channels that `hopper.fragments` permutes among themselves

_PACK = """
__device__ __forceinline__ void hopper_store_eight(float a, float b, float c, float d, float e, float f, float g,
    float h, void* to) {
  ((float4*)to)[0] = make_float4(a, b, c, d);
  ((float4*)to)[1] = make_float4(e, f, g, h);
}
"""


@dataclass(frozen=True)
class Tf32Config(PixelConfig):
    """Tiles of (batch, output channels, input channels)."""

    dtypes: ClassVar[tuple[str, ...]] = (DTYPE,)
    by_threads = True

    block_k: int = 32

    @property
    def fragments(self) -> int:
        """Registers of a thread for operand a."""
        return self.rows * self.block_k // WARPGROUP

    @classmethod
    def unfit(cls, problem: HwcnProblem, arch: Arch) -> str | None:
        if problem.n % VECTOR:
            return f"n={problem.n} is not a multiple of {VECTOR}, which TMA needs"
        return super().unfit(problem, arch)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        reason = self.unfit(problem, arch) or self.check_block(problem.dtype, arch)
        # fragments are of a tile that is whole
        reason = reason or self.check_block(problem.dtype, arch, more=self.fragments)
        if reason:
            return reason
        if self.block_k == K_BYTES // ITEM:
            return f"block_k={self.block_k} is one step of wgmma, of which two take turns"
        for name, size, cluster, parts, unit in (
            ("block_m", self.block_m, "cluster_n", self.cluster_n, RUN),
            ("block_n", self.block_n, "cluster_m", self.cluster_m, 8),
        ):
            if size % (unit * parts):
                return f"{name}={size} is not {cluster}={parts} times a multiple of {unit}"
        work: Tf32Work = work_of(problem, self)
        return work.reason(arch)

    def work(self, problem: HwcnProblem) -> Tf32Work:
        return Tf32Work(problem, self)


class Tf32Work(PixelWork):
    config: Tf32Config
    channels_along_rows = False

    def __init__(self, problem: HwcnProblem, config: Tf32Config) -> None:
        p = problem
        super().__init__(p, config, ImageTiles(p, (config.block_m, 1, 1), config.block_m, (config.cluster_m, 1, 1)))
        channels = -(-p.ci // GROUP) * GROUP
        packed = Argument("packed", (p.kh * p.kw, p.co, channels), DTYPE)
        self.workspace = (packed,)
        a = SharedTile(config.block_m, config.block_k, ITEM, RUN, transposed=True)
        b = SharedTile(config.block_n, config.block_k, ITEM, min(RUN, config.block_k))
        self.a = Operand(a, data_map(p, a, p.arguments()[0], (RUN, config.block_k, 1, 1), True), by_registers=True)
        self.b = Operand(
            b,
            TensorMap(
                packed.name,
                DTYPE,
                packed.shape[::-1],
                (channels * ITEM, p.co * channels * ITEM),
                (b.run, config.block_n // config.cluster_m, 1),
                (1, 1, 1),
                b.swizzle,
                to_tf32=True,
            ),
        )
        columns = Columns("output", p.out_h * p.out_w * p.co * p.n)
        self.output = Output(DTYPE, NoStaging(config.rows, config.block_n), columns)

    def loads_a(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        at = (chunk * self.a.tile.k, *self.data_at(place, ry, rx))
        return runs_of(self.a.tile, part, self.config.cluster_n, place.image, at)

    def loads_b(self, place: PixelPlace, ry: Expr, rx: Expr, chunk: Expr, part: Index) -> Sequence[Load]:
        tile, rows = self.b.tile, self.config.block_n // self.config.cluster_m
        channel = place.channel + part * rows
        return [
            Load(
                part * (rows * tile.swizzle) + run * tile.slab,
                (chunk * tile.k + run * tile.run, channel, self.tap(ry, rx)),
            )
            for run in range(tile.k // tile.run)
        ]

    def store_at(self, place: PixelPlace, part: Index, column: int) -> tuple[Index, ...]:
        raise NotImplementedError("its output is no tensor map")

    def columns_at(self, place: PixelPlace, part: Index, row: Expr) -> tuple[Expr, int, Expr | None]:
        p, config = self.problem, self.config
        image = place.image + part * config.rows + row
        start = ((place.y * p.out_w + place.x) * p.co + place.channel) * p.n + image
        if p.n % (config.block_m * config.cluster_m) == p.co % (config.block_n * config.cluster_n) == 0:
            return start, p.n, None
        return start, p.n, tirx.if_then_else(image < p.n, p.co - place.channel, 0)


def pack(problem: HwcnProblem, tensors: Tensors) -> None:
    """Emit the kernel that copies the filter (kh, kw, ci, co) as (taps, co, ci): a thread to each eight channels of a
    filter, the lanes of a warp side by side along co, so that reads are whole lines and writes whole sectors."""
    from schedules.hopper.fragments import reduction_at

    p, packed = problem, tensors["packed"]
    groups = packed.shape[2] // GROUP
    count = p.kh * p.kw * groups * p.co
    block = T.cta_id([-(-count // WARPGROUP)])
    thread = T.thread_id([WARPGROUP])
    at = named("at", block * WARPGROUP + thread)
    with T.If(at < count), T.Then():
        filter_ = named("filter_", T.truncmod(at, p.co))
        first = named("first", T.truncmod(T.truncdiv(at, p.co), groups) * GROUP)
        tap = named("tap", T.truncdiv(at, p.co * groups))
        ry, rx = T.truncdiv(tap, p.kw), T.truncmod(tap, p.kw)

        def read(channel: Expr) -> Expr:
            value = tensors["filter"][ry, rx, channel, filter_]
            return value if p.ci % GROUP == 0 else T.if_then_else(channel < p.ci, value, T.float32(0))

        values = [named("value", read(first + reduction_at(position))) for position in range(GROUP)]
        to = packed.ptr_to([tap, filter_, first])
        T.evaluate(T.cuda.func_call("hopper_store_eight", *values, to, source_code=_PACK))


def default(problem: HwcnProblem, arch: Arch) -> Tf32Config:
    return plain(Tf32Config(block_k=stage_channels(problem.ci, 32, 16)), problem, arch)


def space(problem: HwcnProblem, arch: Arch) -> Sequence[Tf32Config]:
    return with_and_without_padding(Tf32Config, DTYPE, arch.device)


SCHEDULE = tf32_schedule(
    Tf32Config,
    default,
    space,
    siblings=("simt", "mma_split"),
    more=lambda problem, work: dict(prepare=partial(pack, problem)),
)
