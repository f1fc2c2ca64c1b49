"""Packing on the CPU: a parallel task turns some pixels of a group of channels in a buffer that stays in cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.tvm import Schedule, tirx, tvm
from schedules.operators.conv2d_nchw32.packing import GROUP
from schedules.operators.pack_nchw32.definition import PackProblem
from schedules.operators.pack_nchw32.stages import channel_vector, staged
from schedules.steps.story import next_step
from schedules.steps.tiles import widest_vector


@dataclass(frozen=True)
class CpuConfig(Config):
    pixels: int = 16  # that are turned at once, as far as they divide an image
    tiles: int = 8  # of so many pixels, of a task

    def check(self, problem: PackProblem, arch: Arch) -> str | None:
        if self.pixels not in (1, 2, 4, 8, 16, 32):
            return f"pixels={self.pixels} is not a power of two up to 32"
        if self.tiles < 1:
            return f"tiles={self.tiles} must be at least 1"
        return None


def graph(problem: PackProblem, config: CpuConfig, arch: Arch) -> tirx.PrimFunc:
    return staged(problem, channel_vector(problem))


def schedule(problem: PackProblem, config: CpuConfig, arch: Arch) -> tvm.IRModule:
    """The scheduled program for data, scale, output."""
    p = problem
    sch = Schedule(graph(p, config, arch))
    fetched, tile, output = (sch.get_sblock(name) for name in ("fetched", "tile", "output"))
    next_step(sch, "A parallel task for some pixels of a group of channels, a tile of them at a time")
    for block in (fetched, tile):
        sch.set_scope(block, 0, "local")
    n, g, pixel, *_ = sch.get_loops(output)
    pixels = widest_vector(p.h * p.w, config.pixels)
    task, step, _ = sch.split(pixel, [None, min(config.tiles, p.h * p.w // pixels), pixels])
    sch.parallel(sch.fuse(n, g, task))
    for block in (tile, fetched):
        sch.compute_at(block, step, preserve_unit_loops=True)

    next_step(sch, "What is read and written in the plain tensor goes along it; all else along the channels")
    for block, plain in ((fetched, not p.unpack), (tile, False), (output, p.unpack)):
        inner, b, lane = sch.get_loops(block)[-3:]
        if plain and not p.channels_last:
            sch.reorder(b, lane, inner)
            sch.vectorize(inner)
        elif plain:
            sch.vectorize(lane)
        else:
            _, lane = sch.split(sch.fuse(b, lane), [None, min(p.lanes, GROUP // 2)])
            sch.vectorize(lane)
    return sch.mod


def default(problem: PackProblem, arch: Arch) -> CpuConfig:
    return CpuConfig()


def space(problem: PackProblem, arch: Arch) -> Iterator[CpuConfig]:
    for pixels in (4, 8, 16, 32):
        for tiles in (1, 4, 8, 32):
            yield CpuConfig(pixels, tiles)


SCHEDULE = ScheduleSpec(
    name="cpu",
    summary="some pixels of a group of channels are turned in cache, parallel over them",
    kinds=("llvm",),
    config=CpuConfig,
    apply=schedule,
    default=default,
    space=space,
    ranges=True,
    graph=graph,
)
