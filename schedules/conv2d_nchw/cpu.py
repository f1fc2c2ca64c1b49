"""NCHW convolution on the CPU: implicit GEMM with pixels in vector lanes and output channels in registers.

A task owns a panel of pixels of all images.  For each chunk of k it gathers the panel's columns (k, pixels) into a
buffer that stays in cache, then multiplies it by the filters, a register tile of channels x pixels at a time.  Padding,
strides and dilation are dealt with in the gathering, whose cost the filters share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.arch import Arch, physical_cores
from schedules.conv2d_nchw.definition import NchwProblem, flatten_output, gemm_definition
from schedules.operator import ScheduleSpec
from schedules.primitives.steps import next_step
from schedules.problem import Config

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 16  # pixels of a vector
    block_vectors: int = 4  # vectors of a register tile, and of a panel
    block_rows: int = 6  # output channels of a register tile
    block_k: int = 256  # values of k gathered at a time
    chunk: int = 0  # register tiles along the channels that one parallel task computes; 0: all of them

    @property
    def panel(self) -> int:
        """Pixels of a panel."""
        return self.vector * self.block_vectors

    def check(self, problem: NchwProblem, arch: Arch) -> str | None:
        if self.vector not in (1, 2, 4, 8, 16, 32):
            return f"vector={self.vector} is not a power of two up to 32"
        for name in ("block_vectors", "block_rows", "block_k"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.chunk < 0:
            return f"chunk={self.chunk} must not be negative"
        if self.panel * self.block_rows > 1024:
            return f"block_rows={self.block_rows} x block_vectors={self.block_vectors} vectors hold over 1024 sums"
        return None


def schedule(problem: NchwProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), output (n, co, out_h, out_w)."""
    from tvm import te
    from tvm.s_tir import Schedule

    block_k = min(config.block_k, problem.reduction)
    tile = (config.block_rows, config.panel, block_k)
    sch = Schedule(te.create_prim_func(gemm_definition(problem, tile, branchless=True)))
    next_step(sch, "Sums and gathered columns close to the core; the filters read where they lie")
    conv, output, columns = sch.get_sblock("conv"), flatten_output(sch, problem), sch.get_sblock("columns")
    sch.compute_inline("weights")
    for block in (conv, columns):
        sch.set_scope(block, 0, "local")

    next_step(sch, "A parallel task for each panel of pixels and chunk of channels; k in chunks, then register tiles")
    f, pixel, k = sch.get_loops(conv)
    tiles = -(-problem.co // config.block_rows)
    chunk, fo, f = sch.split(f, [None, min(config.chunk or tiles, tiles), config.block_rows])
    panel, pixel, lane = sch.split(pixel, [None, config.block_vectors, config.vector])
    ko, k = sch.split(k, [None, block_k])
    sch.reorder(panel, chunk, ko, fo, k, f, pixel, lane)
    task = sch.fuse(panel, chunk)
    sch.parallel(task)

    next_step(sch, "The columns of a chunk of k, gathered once; vectors; the finished panel")
    sch.compute_at(columns, ko, preserve_unit_loops=True)
    at_k, at_pixel = sch.get_loops(columns)[-2:]
    vector, gathered = sch.split(at_pixel, [None, config.vector])
    sch.reorder(vector, at_k, gathered)  # so that what depends on the pixel alone is computed once
    sch.vectorize(gathered)
    sch.reverse_compute_at(output, task, preserve_unit_loops=True)
    for loop in (f, pixel):
        sch.unroll(loop)
    sch.vectorize(lane)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(conv, ko))[-1])
    return sch.mod


def default(problem: NchwProblem, arch: Arch) -> CpuConfig:
    """Panels no wider than the problem, and a few tasks for each core."""
    vector, block_vectors = 16, 4
    while vector > 1 and vector > problem.pixels:
        vector //= 2
    while block_vectors > 1 and vector * (block_vectors - 1) >= problem.pixels:
        block_vectors -= 1
    rows = -(-problem.co // -(-problem.co // 6))  # six, or a little less where that leaves no row unused
    panels = -(-problem.pixels // (vector * block_vectors))
    tiles = -(-problem.co // rows)
    shares = min(tiles, max(1, 4 * physical_cores() // panels))  # of the channels, where panels are too few
    return CpuConfig(vector, block_vectors, rows, 256, -(-tiles // shares))


def space(problem: NchwProblem, arch: Arch) -> Iterator[CpuConfig]:
    for fields in product((8, 16), (1, 2, 4), (1, 2, 4, 6, 8), (64, 256, 1024), (0, 1, 4, 16)):
        yield CpuConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="implicit GEMM: panels of gathered pixels in vector lanes, register tiles, parallel over pixels",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
)
