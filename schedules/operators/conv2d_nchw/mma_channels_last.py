"""NCHW convolution on tensor cores by way of channels-last copies: three kernels in one function.

In NCHW a tap shifts the pixels of a row off every alignment, so the main loop of `mma` fetches them one by one.  Here
the data and the filter are first copied with their channels last, at the speed of memory; the product then fetches 16
bytes of channels at a time whatever the tap, and writes NCHW directly, its rows being output channels.  The copies live
in workspace of the function.  Source: the conversion that cuDNN runs before its NHWC kernels, without the one after.
"""

from __future__ import annotations

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.space import ProductSpace
from schedules.core.tvm import Schedule, te, tirx, tvm
from schedules.definitions.implicit import Implicit, Stage, at_run_time
from schedules.definitions.implicit import stage as stage_of
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.steps.story import next_step
from schedules.steps.tensor_core import Operand, TensorCoreConfig, default_tile, schedule_product, tiles
from schedules.steps.tiles import bind, widest_vector

LANES = (4, 8)  # of a warp along (pixels, channels): 64-byte reads and 128-byte writes, both whole sectors
WARPS = 4  # of a block that copies


def graph(problem: NchwProblem, config: TensorCoreConfig, arch: Arch) -> tirx.PrimFunc:
    """``data_last`` (n, h * w, ci) from ``images`` (n, ci, h * w), and ``weight_last`` (kh, kw, co, ci); then the
    product of NHWC data, with the output channels as rows: ``conv`` (co, pixel) sums ``weights`` (kh, kw, co, ci) x
    ``columns`` (kh, kw, pixel, ci)."""
    p = at_run_time(problem)
    made = Implicit(p, dict(zip(("co", "pixel", "ci"), config.tile, strict=True)))
    data = made.given["data"]
    images = te.compute((p.n, p.ci, p.h * p.w), lambda b, c, q: data[b, c, q // p.w, q % p.w], name="images")
    last = te.compute((p.n, p.h * p.w, p.ci), lambda b, q, c: images[b, c, q], name="data_last")
    axes = ("kh", "kw", "co", "ci")
    filters = stage_of("weight_last", axes, [p.extents[axis] for axis in axes], made.filter)
    columns = made.columns("kh kw pixel ci", source=Stage(last, ("n", "hw", "ci")))
    weights = made.weights("kh kw co ci", source=filters)
    return made.program(made.output(made.conv("co pixel", (weights, columns)), staged=True))


def schedule(problem: NchwProblem, config: TensorCoreConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data (n, ci, h, w), filter (co, ci, kh, kw), the epilogue's terms, output (n, co,
    out_h, out_w)."""
    p = problem
    sch = Schedule(graph(p, config, arch))
    vector = widest_vector(p.ci, 8)
    image = widest_vector(p.out_h * p.out_w, 8)
    schedule_product(sch, config, arch, p.dtype, Operand(0, vector), Operand(1, vector), image)
    _copy_data(sch, p)
    _copy_weight(sch, p)
    return config.finish(sch.mod)


def _copy_data(sch: Schedule, problem: NchwProblem) -> None:
    """Each thread turns a square of pixels x channels over in registers, between vector loads along pixels and vector
    stores along channels."""
    p = problem
    next_step(sch, "A kernel that copies the data with its channels last, turned over in registers")
    turned, loaded = sch.get_sblock("data_last"), sch.get_sblock("images")
    pixels, channels = widest_vector(p.h * p.w, 8), widest_vector(p.ci, 8)
    stored = sch.cache_write(turned, 0, "local")
    b, q, c = sch.get_loops(stored)
    q, warp, pixel_lane, px = sch.split(q, [None, WARPS, LANES[0], pixels])
    c, channel_lane, ch = sch.split(c, [None, LANES[1], channels])
    sch.reorder(b, q, c, warp, pixel_lane, channel_lane, px, ch)
    lane = sch.fuse(pixel_lane, channel_lane)
    bind(sch, (sch.fuse(b, q, c), "blockIdx.x"), (warp, "threadIdx.y"), (lane, "threadIdx.x"))
    sch.unroll(px)
    sch.vectorize(ch)
    for stage in (turned, loaded):
        sch.compute_at(stage, lane, preserve_unit_loops=True)
        outer, inner = sch.get_loops(stage)[-2:]
        sch.unroll(outer)
        if stage is turned:
            sch.unroll(inner)
        else:
            sch.vectorize(inner)
    sch.set_scope(loaded, 0, "local")


def _copy_weight(sch: Schedule, problem: NchwProblem) -> None:
    """A thread for each (output channel, input channel): its taps are neighbours where they are read, and neighbouring
    threads' are neighbours where they are written."""
    next_step(sch, "A kernel that copies the filter with its input channels last")
    ry, rx, f, c = sch.get_loops(sch.get_sblock("weight_last"))
    sch.reorder(f, c, ry, rx)
    block, thread = sch.split(sch.fuse(f, c), [None, 32 * WARPS])
    bind(sch, (block, "blockIdx.x"), (thread, "threadIdx.x"))


def default(problem: NchwProblem, arch: Arch) -> TensorCoreConfig:
    return TensorCoreConfig(**default_tile(problem.co, problem.pixels, 1, problem.dtype, arch))


def space(problem: NchwProblem, arch: Arch) -> ProductSpace[TensorCoreConfig]:
    return ProductSpace(TensorCoreConfig, tiles(problem.dtype, arch))


SCHEDULE = ScheduleSpec(
    name="mma_channels_last",
    summary="implicit GEMM on tensor cores from channels-last copies of data and filter",
    kinds=("cuda",),
    config=TensorCoreConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    channels_along_rows=True,
    graph=graph,
)
