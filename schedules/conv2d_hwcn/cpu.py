"""HWCN convolution on the CPU: one axis in vector lanes, the other in registers.

A task computes register tiles of output channels x batch for one pixel.  With a batch to fill the lanes, a weight is
broadcast against vectors of the batch; with a batch of one, a pixel's channel is broadcast against vectors of filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from schedules.arch import Arch
from schedules.conv2d_hwcn.definition import HwcnProblem, definition
from schedules.operator import ScheduleSpec
from schedules.primitives.steps import next_step
from schedules.primitives.tiles import block_exists, inline_if_present
from schedules.problem import Config

if TYPE_CHECKING:
    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV


@dataclass(frozen=True)
class CpuConfig(Config):
    lanes: str = "n"  # the axis in vector lanes: n or co
    vector: int = 16  # elements of a vector
    block_lanes: int = 4  # vectors of a register tile
    block_rows: int = 4  # elements of the other axis in a register tile
    chunk: int = 4  # register tiles along co that one parallel task computes
    padding: str = "inline"  # inline: border tests in the inner loop; buffer: a padded copy of the data is made first

    @property
    def block(self) -> tuple[int, int]:
        """A register tile's (output channels, batch)."""
        lanes = self.vector * self.block_lanes
        return (self.block_rows, lanes) if self.lanes == "n" else (lanes, self.block_rows)

    def check(self, problem: HwcnProblem, arch: Arch) -> str | None:
        if self.lanes not in ("n", "co"):
            return f"lanes={self.lanes} is not n or co"
        if self.padding not in ("inline", "buffer"):
            return f"padding={self.padding} is not inline or buffer"
        for name in ("block_lanes", "block_rows", "chunk"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.vector not in (1, 2, 4, 8, 16, 32):
            return f"vector={self.vector} is not a power of two up to 32"
        if self.vector * self.block_lanes * self.block_rows > 1024:
            return f"block_lanes={self.block_lanes} x block_rows={self.block_rows} vectors hold over 1024 accumulators"
        return None


def schedule(problem: HwcnProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    from tvm import te
    from tvm.s_tir import Schedule

    sch = Schedule(te.create_prim_func(definition(problem, tile=(1, *config.block))))
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")

    # the batch's and the filters' round-up with it
    next_step(sch, "The border: tested where it is read, or written out once; sums in registers")
    sch.set_scope(conv, 0, "local")
    if config.padding == "inline":
        inline_if_present(sch, "padded", "weights")
    else:
        for name in ("padded", "weights"):
            if block_exists(sch, name):
                y, x, _, lane = sch.get_loops(sch.get_sblock(name))
                _, lane = sch.split(lane, [None, config.vector])
                sch.parallel(sch.fuse(y, x))
                sch.vectorize(lane)

    next_step(sch, "Register tiles in vector lanes, and a parallel task for each few of them")
    y, x, f, n, ry, rx, rc = sch.get_loops(conv)
    block_f, block_n = config.block
    chunk, fo, f = sch.split(f, [None, config.chunk, block_f])
    no, n = sch.split(n, [None, block_n])
    inner, row = (n, f) if config.lanes == "n" else (f, n)
    inner, lane = sch.split(inner, [None, config.vector])
    sch.reorder(y, x, chunk, no, fo, ry, rx, rc, row, inner, lane)
    sch.parallel(sch.fuse(y, x, chunk))
    sch.reverse_compute_at(output, fo, preserve_unit_loops=True)
    _vectorize_tile(sch, row, inner, lane)
    init = sch.decompose_reduction(conv, ry)
    _vectorize_tile(sch, *sch.get_loops(init)[-3:])
    if config.lanes == "n":
        _, lane = sch.split(sch.get_loops(output)[-1], [None, config.vector])
        sch.vectorize(lane)
    return sch.mod


def _vectorize_tile(sch: Schedule, row: LoopRV, inner: LoopRV, lane: LoopRV) -> None:
    sch.vectorize(lane)
    sch.unroll(row)
    sch.unroll(inner)


def default(problem: HwcnProblem, arch: Arch) -> CpuConfig:
    """The longer of batch and channels in the lanes, vectors and tiles no larger than the problem."""
    lanes = "n" if problem.n >= min(16, problem.co) else "co"
    extent, rows = (problem.n, problem.co) if lanes == "n" else (problem.co, problem.n)
    vector = 16
    while vector > 1 and vector > extent:
        vector //= 2
    return CpuConfig(
        lanes=lanes,
        vector=vector,
        block_lanes=max(1, min(4, extent // vector)),
        block_rows=min(4, rows),
        padding="buffer" if extent % vector else "inline",
    )


def space(problem: HwcnProblem, arch: Arch) -> Iterator[CpuConfig]:
    for fields in product(("n", "co"), (4, 8, 16), (1, 2, 4), (1, 2, 4, 6, 8), (1, 4, 16), ("inline", "buffer")):
        yield CpuConfig(*fields)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="batch or filters in vector lanes, register tiles, parallel over pixels and channels",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
)
