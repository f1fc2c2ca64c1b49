"""Depthwise convolution on the CPU: the contiguous axis in vector lanes, a register tile of sums.

A task owns some output rows of some channels of an image.  It copies the input under them into a buffer that stays in
cache, in float32, where borders end, and where columns that a stride skips lie apart: so every tap finds its operands
next to each other.  With channels last, lanes are channels, and the filter is turned first.  Else lanes are the columns
of a row, and a task's channels follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product, starmap

from schedules.core.arch import Arch, physical_cores, vector_unit
from schedules.core.cpu import KIB
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.tvm import PrimExpr, Schedule, te, tirx, tvm
from schedules.definitions.epilogue import ACCUMULATOR
from schedules.definitions.implicit import At, Implicit, stage
from schedules.definitions.padding import select
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem, outer_axes
from schedules.steps.register_tile import accumulate, vectors_for
from schedules.steps.story import next_step

CACHED = 128 * KIB  # bytes that a task copies: part of the second-level cache of a core
TASKS = 4  # for each core
MOST_UNROLLED = 512  # multiply-adds of a register tile
EXACT = 2**24 // 2**14  # products of two int8 whose sum a float32 always holds


@dataclass(frozen=True)
class CpuConfig(Config):
    vector: int = 8  # elements of a vector: channels where they are last, else columns
    block_vectors: int = 1  # vectors of a register tile
    block_rows: int = 4  # and how many such it has: columns where channels are last, else rows
    task_rows: int = 8  # output rows of a task
    chunk: int = 0  # channels of a task, in vectors of a register tile where they are last; 0: all

    @property
    def panel(self) -> int:
        """Elements of a register tile along the contiguous axis."""
        return self.vector * self.block_vectors

    def check(self, problem: DepthwiseProblem, arch: Arch) -> str | None:
        if self.vector not in (1, 2, 4, 8, 16, 32):
            return f"vector={self.vector} is not a power of two up to 32"
        for name in ("block_vectors", "block_rows", "task_rows"):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.chunk < 0:
            return f"chunk={self.chunk} must not be negative"
        if self.panel * self.block_rows > 1024:
            return f"block_rows={self.block_rows} x block_vectors={self.block_vectors} vectors hold over 1024 sums"
        if "lo" in problem.output_axes and problem.extents["lo"] % self.panel:
            return f"vector={self.vector} x block_vectors={self.block_vectors} are no part of {problem.extents['lo']}"
        return None


def graph(problem: DepthwiseProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    """The TE graph: ``padded``, data with its border, the column x * phases + phase of it apart; ``weights``; ``conv``,
    the sum over kh and kw in whole register tiles; ``output``, the part that was asked for."""
    p, (outer, channel) = problem, outer_axes(problem)
    last, before = (channel, "x") if p.channels_last else ("x", "y")
    sums = ACCUMULATOR if p.dtype != "int8" or p.kh * p.kw <= EXACT else "int32"
    made = Implicit(p, {last: config.panel, before: config.block_rows}, wide=True, sums=sums)
    (top, left), (down, right) = p.pad, p.stride
    phases = 1 if p.channels_last else right
    extents = {axis: made.extent(axis) for axis in (*outer, channel)} | {"phase": phases}
    extents["row"] = (made.extent("y") - 1) * down + (p.kh - 1) * p.dilation[0] + 1
    extents["column"] = (made.extent("x") - 1) * (right // phases) + (p.kw - 1) * p.dilation[1] // phases + 1
    axes = (*outer, "row", "phase", "column", *((channel,) if p.channels_last else ()))

    def element(at: At) -> PrimExpr:
        y, x = at["row"] - top, at["column"] * phases + at["phase"] - left
        inside = [
            (top > 0 or extents["row"] > p.h, te.all(y >= 0, y < p.h)),
            (left > 0 or extents["column"] * phases > p.w, te.all(x >= 0, x < p.w)),
            (extents[channel] > p.extents[channel], at[channel] < p.extents[channel]),
        ]
        return select(inside, made.data({**at, "h": y, "w": x})).astype(sums)

    padded = stage("padded", axes, [extents[axis] for axis in axes], element)
    weights = made.weights(" ".join((*outer[1:], "kh", "kw", channel) if p.channels_last else p.filter_axes))
    taps = {"kh": te.reduce_axis((0, p.kh), "ry"), "kw": te.reduce_axis((0, p.kw), "rx")}

    def total(at: At) -> PrimExpr:
        across = taps["kw"] * p.dilation[1]
        row, column = at["y"] * down + taps["kh"] * p.dilation[0], at["x"] * (right // phases) + across // phases
        value = padded({**at, "row": row, "phase": across % phases, "column": column})
        return te.sum(value * weights({**at, **taps}), axis=list(taps.values()))

    conv = stage("conv", p.output_axes, [made.extent(axis) for axis in p.output_axes], total)
    return made.program(made.output(conv))


def schedule(problem: DepthwiseProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, filter, the epilogue's terms, output."""
    p = problem
    sch = Schedule(graph(p, config, arch))
    padded, weights, conv, output = (sch.get_sblock(name) for name in ("padded", "weights", "conv", "output"))
    next_step(sch, "The filter: turned first, so that channels are contiguous, or read as it lies")
    if p.channels_last:
        sch.parallel(sch.fuse(*sch.get_loops(weights)[:2]))
    else:
        sch.compute_inline(weights)

    next_step(sch, "A parallel task for some rows and channels of an image, and register tiles in it")
    for block in (padded, conv):
        sch.set_scope(block, 0, "local")
    at = dict(zip(p.output_axes, sch.get_loops(conv), strict=False))
    ry, rx = sch.get_loops(conv)[-2:]
    outer, channel = outer_axes(p)
    last, before = (channel, "x") if p.channels_last else ("x", "y")
    last_tile, vector, lane = sch.split(at[last], [None, config.block_vectors, config.vector])
    before_tile, row = sch.split(at[before], [None, config.block_rows])
    tasks, tiles = {}, {"y": at["y"], channel: at[channel]} | {last: last_tile, before: before_tile}
    rows_high = 1 if p.channels_last else config.block_rows
    for axis, share in (("y", -(-config.task_rows // rows_high)), (channel, config.chunk)):
        extent = int(sch.get(tiles[axis]).extent)
        tasks[axis], tiles[axis] = sch.split(tiles[axis], [None, min(share or extent, extent)])
    others = [at[axis] for axis in outer if axis != channel]
    sch.reorder(*others, *tasks.values(), tiles[channel], tiles["y"], tiles["x"], ry, rx, row, vector, lane)
    task = sch.fuse(*others, *tasks.values())
    sch.parallel(task)

    next_step(sch, "The rows that a task reads, copied into its cache; sums in registers, and the way out of each tile")
    sch.compute_at(padded, task if p.channels_last else tiles[channel], preserve_unit_loops=True)
    sch.reverse_compute_at(output, tiles["x"], preserve_unit_loops=True)
    *_, phase, column = sch.get_loops(padded)
    if not p.channels_last and p.stride[1] > 1:  # else LLVM copies element by element, and looks for the border at each
        sch.unroll(phase)
        sch.annotate(column, "pragma_loop_partition_hint", 1)
    sch.unroll(rx)
    if p.kh * p.kw * config.block_rows * config.block_vectors <= MOST_UNROLLED:
        sch.unroll(ry)
    accumulate(sch, conv, ry, (row, vector), lane)
    return sch.mod


@lru_cache
def default(problem: DepthwiseProblem, arch: Arch) -> CpuConfig:
    """Vectors no wider than the problem, tasks whose copy a core keeps in its cache, and a few of them for each."""
    p, unit, wanted = problem, vector_unit(arch), TASKS * physical_cores()
    extent = p.extents[outer_axes(p)[1]] if p.channels_last else p.out_w
    vector = min(vectors_for(unit, extent), key=lambda v: (-(-extent // v), v))
    reach = (p.kh - 1) * p.dilation[0] + 1
    if p.channels_last:
        config = CpuConfig(vector, 2 if extent > vector else 1, min(4, p.out_w), chunk=1)
        times, step = p.n * -(-p.extents["co"] // config.panel), 1
        row_bytes = 4 * config.panel * (p.w + 2 * p.pad[1])
    else:
        step = min(range(1, min(p.out_h, 8) + 1), key=lambda rows: (-(-p.out_h // rows) * rows + 8 // rows, -rows))
        config = CpuConfig(vector, 1, step, chunk=max(1, min(p.ci, p.n * p.ci // wanted)))
        times, row_bytes = p.n * -(-p.ci // config.chunk), 4 * (p.w + 2 * p.pad[1])
    rows = min((CACHED // row_bytes - reach) // p.stride[0] + 1, p.out_h * times // wanted, p.out_h)
    parts = -(-p.out_h // max(rows, step))
    return replace(config, task_rows=-(-p.out_h // (parts * step)) * step)


def space(problem: DepthwiseProblem, arch: Arch) -> Iterator[CpuConfig]:
    """The default, and others around it."""
    extent = problem.extents[outer_axes(problem)[1]] if problem.channels_last else problem.out_w
    vectors = vectors_for(vector_unit(arch), extent)
    found = starmap(CpuConfig, product(vectors, (1, 2, 4), (1, 2, 4, 6, 7, 8), (1, 2, 4, 8, 14, 28, 56), (0, 1, 4, 16)))
    yield from dict.fromkeys([default(problem, arch), *found])


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="channels or columns in vector lanes, sums in registers, borders ended in a copy that stays in cache",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    graph=graph,
)
