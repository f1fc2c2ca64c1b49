"""NHWC convolution on the CPU: implicit GEMM with output channels in vector lanes and pixels in registers.

The filters are first turned so that output channels are contiguous.  A task owns a few pixels: it gathers their columns
(kh, kw, pixels, ci) into a buffer that stays in cache, where borders, strides and dilation end, then multiplies them by
the filters, a register tile of pixels x channels at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch, physical_cores
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.operators.conv2d_nhwc.definition import NhwcProblem, matrix_product
from schedules.steps.story import next_step

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 16  # output channels of a vector
    block_vectors: int = 2  # vectors of a register tile
    block_rows: int = 6  # pixels of a register tile
    chunk: int = 0  # register tiles along the channels that one parallel task computes; 0: all of them

    @property
    def panel(self) -> int:
        """Output channels of a register tile."""
        return self.vector * self.block_vectors

    def check(self, problem: NhwcProblem, arch: Arch) -> str | None:
        if self.vector not in (1, 2, 4, 8, 16, 32):
            return f"vector={self.vector} is not a power of two up to 32"
        for name in ("block_vectors", "block_rows"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.chunk < 0:
            return f"chunk={self.chunk} must not be negative"
        if self.panel * self.block_rows > 1024:
            return f"block_rows={self.block_rows} x block_vectors={self.block_vectors} vectors hold over 1024 sums"
        return None


def graph(problem: NhwcProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    return matrix_product(problem, (config.block_rows, config.panel, 1), staged=False)


def schedule(problem: NhwcProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, h, w, ci), filter (co, kh, kw, ci), the epilogue's terms, output (n, out_h,
    out_w, co)."""
    from tvm.s_tir import Schedule

    sch = Schedule(graph(problem, config, arch))
    conv, output, columns, weights = (sch.get_sblock(name) for name in ("conv", "output", "columns", "weights"))
    next_step(sch, "Turn the filters first: output channels contiguous")
    sch.transform_layout(weights, ("write", 0), lambda ry, rx, f, c: [ry, rx, c, f])
    ry, rx, f, c = sch.get_loops(weights)
    sch.reorder(ry, rx, c, f)
    sch.parallel(sch.fuse(ry, rx))

    next_step(sch, "A parallel task for each few pixels and chunk of channels, and register tiles in it")
    for block in (conv, columns):
        sch.set_scope(block, 0, "local")
    pixel, f, ry, rx, rc = sch.get_loops(conv)
    tiles = -(-problem.co // config.panel)
    rows, pixel = sch.split(pixel, [None, config.block_rows])
    chunk, tile, f, lane = sch.split(f, [None, min(config.chunk or tiles, tiles), config.block_vectors, config.vector])
    sch.reorder(rows, chunk, tile, ry, rx, rc, pixel, f, lane)
    task = sch.fuse(rows, chunk)
    sch.parallel(task)

    next_step(sch, "Gather a task's columns once; vectors; the way out")
    sch.compute_at(columns, task, preserve_unit_loops=True)
    sch.reverse_compute_at(output, tile, preserve_unit_loops=True)
    for loop in (pixel, f):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(conv, ry))[-1])
    return sch.mod


def default(problem: NhwcProblem, arch: Arch) -> CpuConfig:
    """Vectors no wider than the problem, and a few tasks for each core."""
    vector, block_vectors = 16, 2
    while vector > 1 and vector > problem.co:
        vector //= 2
    if vector >= problem.co:
        block_vectors = 1
    rows = min(6 if block_vectors == 2 else 12, problem.pixels)
    tiles = -(-problem.co // (vector * block_vectors))
    shares = min(tiles, max(1, 4 * physical_cores() // -(-problem.pixels // rows)))
    return CpuConfig(vector, block_vectors, rows, -(-tiles // shares))


def space(problem: NhwcProblem, arch: Arch) -> Iterator[CpuConfig]:
    for fields in product((4, 8, 16), (1, 2, 4), (1, 2, 4, 6, 8, 12), (0, 1, 4)):
        yield CpuConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="implicit GEMM: output channels in vector lanes, gathered pixels in registers, parallel over pixels",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
