"""int8 convolution without matrix cores: the implicit matrix product by dot products of four bytes.

The tiles, shared memory and epilogue of `matrix`, with a thread's sums in registers: each thread multiplies its pixels
by its channels, eight neighbouring ones of each group, four input channels at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.lowering.annotations import SWIZZLE
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.conv2d_nchw32.tiled import CHANNELS, QUADS, Rounding, schedule_output, tiled_definition
from schedules.steps.dot import PACK, dot4
from schedules.steps.intrinsics import tensorize
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, cooperative_fetch, inline_if_present

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
        for name, value in self.to_json().items():
            if value < 1:
                return f"{name}={value} must be at least 1"
        if self.tile_n % CHANNELS:
            return f"tile_n={self.tile_n} is not a multiple of {CHANNELS}"
        threads = self.warps_m * self.warps_n * arch.wave
        if threads > arch.max_threads:
            return (
                f"warps_m={self.warps_m} x warps_n={self.warps_n} are {threads} threads, {arch} has {arch.max_threads}"
            )
        shared = sum(self.block(arch)) * problem.lanes
        if shared > arch.shared_static:
            return f"tile_m={self.tile_m} needs {shared} bytes of shared memory, {arch} has {arch.shared_static}"
        registers = self.tile_m * self.tile_n + (self.tile_m + self.tile_n) * min(VECTOR, problem.lanes) // PACK + 40
        if registers > arch.registers_thread:
            return (
                f"tile_m={self.tile_m} x tile_n={self.tile_n} needs about {registers} registers a thread, {arch} has "
                f"{arch.registers_thread}"
            )
        return None


def rounding_of(config: SimtConfig, arch: Arch) -> Rounding:
    """How `config` cuts the product."""
    return Rounding(*config.block(arch), chunk=1, run=1, lanes=arch.wave // QUADS)


def graph(problem: Nchw32Problem, config: SimtConfig, arch: Arch) -> tirx.PrimFunc:
    return tiled_definition(problem, rounding_of(config, arch))


def schedule(problem: Nchw32Problem, config: SimtConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program."""

    def divided(index: Any, by: int) -> tuple[Any, Any]:
        return index // by, index % by

    pixels, vector = arch.wave // QUADS, min(VECTOR, problem.lanes)  # neighbouring pixels in neighbouring lanes
    warps = (config.warps_m, config.warps_n)
    sch = Schedule(graph(problem, config, arch))
    conv = sch.get_sblock("conv")

    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    shared = [sch.cache_read(conv, i, "shared") for i in (0, 1)]
    operands = [sch.cache_read(conv, i, "local") for i in (0, 1)]
    inline_if_present(sch, "rows", "columns")
    sch.set_scope(conv, 0, "local")
    # neighbouring rows and columns lie in neighbouring lanes: with axes for the lanes, what one of them holds is dense
    sch.transform_block_layout(conv, lambda m, n, g, y, x, k: [*divided(m, pixels), *divided(n, QUADS), g, y, x, k])
    sch.transform_layout(conv, ("write", 0), lambda m, n: [*divided(m, pixels), *divided(n, QUADS)])
    rows, columns = operands
    for operand, by in ((rows, pixels), (columns, QUADS)):
        index = _row_divided(by)
        sch.transform_block_layout(operand, index)
        sch.transform_layout(operand, ("write", 0), index)

    next_step(sch, "Blocks, warps and lanes; the epilogue in the lane that holds the sums")
    schedule_output(sch, problem, rounding_of(config, arch), warps, quads_first=False)

    # up to sixteen channels of a thread's pixels and filters in registers
    next_step(sch, "The reduction: each thread multiplies its pixels and filters, four channels by one dot product")
    m, pixel, n, quad, rg, ry, rx, k = sch.get_loops(conv)[-8:]
    warp_m, m = sch.split(m, [config.warps_m, config.tile_m])
    warp_n, n = sch.split(n, [config.warps_n, config.tile_n])
    step, word, k = sch.split(k, [None, vector // PACK, PACK])
    sch.reorder(rg, ry, rx, warp_m, warp_n, pixel, quad, step, word, m, n, k)
    bind(sch, (sch.fuse(warp_m, warp_n), "threadIdx.y"), (sch.fuse(pixel, quad), "threadIdx.x"))
    for loop in (word, m, n):
        sch.unroll(loop)
    for operand in operands:
        sch.compute_at(operand, step, preserve_unit_loops=True)
        row, _, lane = sch.get_loops(operand)[-3:]
        sch.unroll(row)
        sch.vectorize(lane)
    for stage in shared:
        sch.compute_at(stage, rx, preserve_unit_loops=True)
        cooperative_fetch(sch, stage, 5, (warps[0] * warps[1], arch.wave), vector)
        if problem.lanes > vector:
            sch.annotate(stage, SWIZZLE, arch.bank_bytes)

    for loop in sch.get_loops(sch.decompose_reduction(conv, rg))[-2:]:
        sch.unroll(loop)
    tensorize(sch, k, dot4(arch))
    return sch.mod


def _row_divided(by: int) -> Callable[..., list[Any]]:
    return lambda g, y, x, row, k: [g, y, x, row // by, row % by, k]


def default(problem: Nchw32Problem, arch: Arch) -> SimtConfig:
    """Smaller tiles for small problems."""
    for fields in ((8, 8, 2, 2), (4, 8, 2, 2), (4, 8, 2, 1)):
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
    ranges=True,
    graph=graph,
)
