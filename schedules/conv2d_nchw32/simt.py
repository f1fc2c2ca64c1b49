"""int8 convolution without matrix cores: the implicit matrix product by dot products of four bytes.

The tiles, shared memory and epilogue of `matrix`, with a thread's sums in registers: each thread multiplies its pixels
by its channels, eight neighbouring ones of each group, four input channels at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from schedules.arch import Arch
from schedules.conv2d_nchw32.definition import Nchw32Problem
from schedules.conv2d_nchw32.packing import GROUP
from schedules.conv2d_nchw32.tiled import (
    CHANNELS,
    QUADS,
    Rounding,
    finish_in_registers,
    tiled_definition,
    vectorize_channels,
)
from schedules.operator import ScheduleSpec
from schedules.primitives.annotations import SWIZZLE
from schedules.primitives.dot import PACK, dot4
from schedules.primitives.intrinsics import tensorize
from schedules.primitives.tiles import bind, cooperative_fetch, inline_if_present
from schedules.problem import Config

if TYPE_CHECKING:
    import tvm

VECTOR = 16  # int8 elements of a 128-bit load


@dataclass(frozen=True)
class SimtConfig(Config):
    tile_m: int = 8  # pixels of a thread
    tile_n: int = 8  # channels of a thread
    warps_m: int = 2
    warps_n: int = 2

    def block(self, arch: Arch) -> tuple[int, int]:
        """A block's (pixels, channels)."""
        return self.tile_m * arch.wave // QUADS * self.warps_m, self.tile_n * QUADS * self.warps_n

    def check(self, problem: Nchw32Problem, arch: Arch) -> str | None:
        for name, value in self.words().items():
            if value < 1:
                return f"{name}={value} must be at least 1"
        if self.tile_n % CHANNELS:
            return f"tile_n={self.tile_n} is not a multiple of {CHANNELS}"
        threads = self.warps_m * self.warps_n * arch.wave
        if threads > arch.max_threads:
            return f"warps_m={self.warps_m} x warps_n={self.warps_n} are {threads} threads, {arch} has {arch.max_threads}"
        shared = sum(self.block(arch)) * GROUP
        if shared > arch.shared_static:
            return f"tile_m={self.tile_m} needs {shared} bytes of shared memory, {arch} has {arch.shared_static}"
        registers = self.tile_m * self.tile_n + (self.tile_m + self.tile_n) * VECTOR // PACK + 40
        if registers > arch.registers_thread:
            return (
                f"tile_m={self.tile_m} x tile_n={self.tile_n} needs about {registers} registers a thread, {arch} has "
                f"{arch.registers_thread}"
            )
        return None


def schedule(problem: Nchw32Problem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program."""
    from tvm.s_tir import Schedule

    pixels = arch.wave // QUADS  # neighbouring pixels in neighbouring lanes
    warps = (config.warps_m, config.warps_n)
    sch = Schedule(tiled_definition(problem, Rounding(*config.block(arch), chunk=1, run=1)))
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")

    # 1. memory hierarchy: global -> shared -> registers
    shared = [sch.cache_read(conv, i, "shared") for i in (0, 1)]
    operands = [sch.cache_read(conv, i, "local") for i in (0, 1)]
    inline_if_present(sch, "rows", "columns")
    sch.set_scope(conv, 0, "local")

    # 2. blocks, warps, lanes, and the epilogue
    m, f = sch.get_loops(output)
    block_m, warp_m, m, pixel = sch.split(m, [None, config.warps_m, config.tile_m, pixels])
    block_n, warp_n, group, quad, c = sch.split(f, [None, config.warps_n, config.tile_n // CHANNELS, QUADS, CHANNELS])
    sch.reorder(block_m, block_n, warp_m, warp_n, pixel, quad, group, m, c)
    bind(sch, (block_m, "blockIdx.x"), (block_n, "blockIdx.y"))
    finish_in_registers(sch, problem, group, m)
    sch.compute_at(conv, block_n, preserve_unit_loops=True)
    bind(sch, (sch.fuse(warp_m, warp_n), "threadIdx.y"), (sch.fuse(pixel, quad), "threadIdx.x"))
    sch.unroll(group)
    sch.unroll(m)
    vectorize_channels(sch, c, problem.out_dtype)

    # 3. the reduction: sixteen channels of a thread's pixels and filters in registers, four of them a dot product
    m, n, rg, ry, rx, k = sch.get_loops(conv)[-6:]
    warp_m, m, pixel = sch.split(m, [config.warps_m, config.tile_m, pixels])
    warp_n, n, quad = sch.split(n, [config.warps_n, config.tile_n, QUADS])
    step, word, k = sch.split(k, [None, VECTOR // PACK, PACK])
    sch.reorder(rg, ry, rx, warp_m, warp_n, pixel, quad, step, word, m, n, k)
    bind(sch, (sch.fuse(warp_m, warp_n), "threadIdx.y"), (sch.fuse(pixel, quad), "threadIdx.x"))
    for loop in (word, m, n):
        sch.unroll(loop)
    for operand, lanes in zip(operands, (pixels, QUADS), strict=True):
        sch.compute_at(operand, step, preserve_unit_loops=True)
        sch.transform_layout(operand, ("write", 0), _interleaved(lanes))
        row, lane = sch.get_loops(operand)[-2:]
        sch.unroll(row)
        sch.vectorize(lane)
    for stage in shared:
        sch.compute_at(stage, rx, preserve_unit_loops=True)
        cooperative_fetch(sch, stage, 5, (warps[0] * warps[1], arch.wave), VECTOR)
        sch.annotate(stage, SWIZZLE, 1)

    sch.transform_layout(
        conv, ("write", 0), lambda m, n: [m // pixels, m % pixels, n // QUADS, n % QUADS]
    )
    sch.decompose_reduction(conv, rg)
    tensorize(sch, k, dot4(arch))
    return sch.mod


def _interleaved(lanes: int) -> Callable[..., list[Any]]:
    """The layout of an operand whose neighbouring rows lie in neighbouring lanes: with an axis for the lanes, what one
    of them holds is dense."""
    return lambda g, y, x, row, c: [g, y, x, row // lanes, row % lanes, c]


def default(problem: Nchw32Problem, arch: Arch) -> SimtConfig:
    """Smaller tiles for small problems."""
    for fields in ((8, 8, 2, 2), (4, 8, 2, 2), (4, 8, 2, 1), (2, 8, 1, 1)):
        config = SimtConfig(*fields)
        m, n = config.block(arch)
        if problem.co_groups * GROUP >= n and problem.pixels >= 64 * m:
            break
    return config


def space(problem: Nchw32Problem, arch: Arch) -> Iterator[SimtConfig]:
    for fields in product((1, 2, 4, 8), (8, 16), (1, 2, 4), (1, 2, 4)):
        yield SimtConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="simt",
    summary="implicit GEMM by four-byte dot products, tiles in swizzled shared memory",
    kinds=("cuda", "rocm"),
    config=SimtConfig,
    apply=schedule,
    default=default,
    space=space,
)
