"""Packing on a GPU: a thread turns a few pixels of a few channels in its registers.

Neighbouring threads have neighbouring elements of the plain tensor, pixels or channels, so that a warp reads or writes
whole lines of it; what a thread has of the packed tensor is contiguous.  Nothing is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, numpy_dtype
from schedules.core.space import ProductSpace, axis
from schedules.core.tvm import LoopRV, Schedule, tirx, tvm
from schedules.operators.conv2d_nchw32.packing import GROUP, LANES
from schedules.operators.pack_nchw32.definition import PackProblem
from schedules.operators.pack_nchw32.stages import channel_vector, staged
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, widest, widest_vector

LOADED = 8  # bytes of neighbouring pixels that a thread reads at once: with more, fewer threads fit
FLOATS = 4  # elements of the longest vector of float32 that CUDA has


@dataclass(frozen=True)
class TilesConfig(Config):
    lanes: int = 32  # channels of a thread
    pixels: int = 2  # and pixels, as far as they divide an image
    threads: int = 128  # of a block

    def pixel_vector(self, problem: PackProblem) -> int:
        """Pixels of a thread: no image begins within them."""
        return widest_vector(problem.h * problem.w, self.pixels)

    def check(self, problem: PackProblem, arch: Arch) -> str | None:
        fits = [lanes for lanes in LANES if lanes <= problem.lanes]
        if self.lanes not in fits:
            return f"lanes={self.lanes} is not {' or '.join(map(str, fits))}"
        if self.pixels not in (1, 2, 4, 8):
            return f"pixels={self.pixels} is not 1, 2, 4 or 8"
        if not 1 <= self.threads <= arch.max_threads:
            return f"threads={self.threads} is not 1 to {arch.max_threads}, the most of a block of {arch}"
        words = self.lanes * self.pixels * (numpy_dtype(problem.dtype).itemsize + 1) // 4
        if words > arch.registers_thread * 3 // 4:
            return f"lanes={self.lanes} x pixels={self.pixels} need {words} registers; use fewer pixels"
        return None


def graph(problem: PackProblem, config: TilesConfig, arch: Arch) -> tirx.PrimFunc:
    return staged(problem, channel_vector(problem, config.lanes))


def schedule(problem: PackProblem, config: TilesConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, scale, output."""
    p = problem
    vector, pixels = channel_vector(p, config.lanes), config.pixel_vector(p)
    sch = Schedule(graph(p, config, arch))
    fetched, tile, output = (sch.get_sblock(name) for name in ("fetched", "tile", "output"))
    next_step(sch, "A thread for a few pixels of some channels; what it reads and what it makes of it in registers")
    for block in (fetched, tile):
        sch.set_scope(block, 0, "local")
    n, g, pixel, block, lane = sch.get_loops(output)
    po, pi = sch.split(pixel, [None, pixels])
    bo, bi = sch.split(block, [None, config.lanes // vector])
    outer = (n, po, g, bo) if p.channels_last else (n, g, po, bo)  # parts of a pixel's sector side by side
    sch.reorder(*outer, pi, bi, lane)
    # of a loop of one, TVM 0.27 forgets at the way out that other threads have no pixels
    every = p.n * p.extents["gi"] * (p.lanes // config.lanes) * (p.h * p.w // pixels)
    block, thread = sch.split(sch.fuse(*outer), [None, min(config.threads, every)])
    bind(sch, (block, "blockIdx.x"), (thread, "threadIdx.x"))

    next_step(sch, "Neighbours are read and written by vectors: channels of what is packed, else what lies together")
    packed = min(config.lanes, widest("int8"))
    for stage in (tile, fetched):
        sch.compute_at(stage, thread, preserve_unit_loops=True)
    _along(sch, tile, False, 1)
    packed_on = config.lanes == p.lanes  # neighbouring pixels of what is packed follow each other
    # without bfloat16's own instructions what is moved is float32 on its way
    most = FLOATS if p.dtype == "bfloat16" and arch.kind == "cuda" and "bf16" not in arch.features else GROUP
    plain = pixels if not p.channels_last else vector
    for stage, is_packed in ((fetched, p.unpack), (output, not p.unpack)):
        if is_packed and packed_on:
            last = sch.fuse(*sch.get_loops(stage)[-3:])
            _unroll(sch, [], last, widest_vector(pixels * p.lanes, widest("int8")))
        else:
            _along(sch, stage, not is_packed and not p.channels_last, packed if is_packed else min(plain, most))
    return sch.mod


def _along(sch: Schedule, block: tvm.s_tir.schedule.SBlockRV, pixels: bool, vector: int) -> None:
    """Unroll a stage of one thread, with vectors along its pixels or its channels."""
    pi, bi, lane = sch.get_loops(block)[-3:]
    channel = sch.fuse(bi, lane)
    if pixels:
        sch.reorder(channel, pi)
    outer, last = (channel, pi) if pixels else (pi, channel)
    _unroll(sch, [outer], last, min(vector, widest(str(sch.get(block).writes[0].source.dtype))))


def _unroll(sch: Schedule, outer: Sequence[LoopRV], last: LoopRV, vector: int) -> None:
    last, lane = sch.split(last, [None, vector])
    if vector > 1:
        sch.vectorize(lane)
    for loop in (*outer, last):
        sch.unroll(loop)


def default(problem: PackProblem, arch: Arch) -> TilesConfig:
    """A vector of what is packed, of as many pixels as LOADED holds, so that neighbouring threads have whole sectors of
    it; on the way back to channels that are last, one of theirs for a few pixels."""
    item = numpy_dtype(problem.dtype).itemsize
    most = min(widest("int8"), problem.lanes)
    if problem.channels_last:
        return TilesConfig(min(max(4, channel_vector(problem)), most) if problem.unpack else most, 4)
    return TilesConfig(most, max(LOADED // item, widest("int8") // most))


def space(problem: PackProblem, arch: Arch) -> ProductSpace[TilesConfig]:
    return ProductSpace(
        TilesConfig,
        axis("lanes", LANES),
        axis("pixels", (1, 2, 4, 8)),
        axis("threads", (64, 128, 256)),
    )


SCHEDULE = ScheduleSpec(
    name="tiles",
    summary="a thread turns a few pixels of a few channels in registers; no shared memory",
    kinds=("cuda", "rocm"),
    config=TilesConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
