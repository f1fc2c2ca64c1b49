"""The tutorial's GPU schedule with its constants drawn, for the auto-scheduler's space "template".

The stages and their places are those of the hand-written schedule, see there; tiles, vectors and unrolling are
decisions of the trace, and MetaSchedule's postprocessor deals the fetches out to the threads that were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.core.arch import Arch
from schedules.core.operator import SampledSchedule
from schedules.core.tvm import Schedule, te
from schedules.definitions.implicit import textbook
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.steps.story import next_step
from schedules.steps.tiles import bind, bind_grid, inline_if_present, widest, widest_vector

LARGEST = {"ci": 8, "co": 32, "n": 32}  # extents are rounded up to a power of two, at most this, that tiles divide
UNROLL = (0, 16, 64, 512)


def program(problem: HwcnProblem) -> Sequence[te.Tensor]:
    """The TE graph with extents that have factors to draw."""

    def multiple(extent: int, largest: int) -> int:
        return min(largest, 1 << (extent - 1).bit_length())

    return textbook(problem, {name: multiple(getattr(problem, name), largest) for name, largest in LARGEST.items()})


def steps(sch: Schedule, problem: HwcnProblem, arch: Arch) -> None:
    """Schedule data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n)."""
    conv, output = sch.get_sblock("conv"), sch.get_sblock("output")

    next_step(sch, "Memory hierarchy: operands go through shared memory into registers, the sums stay in registers")
    shared = [sch.cache_read(conv, operand, "shared") for operand in (0, 1)]
    local = [sch.cache_read(conv, operand, "local") for operand in (0, 1)]
    sch.set_scope(conv, 0, "local")
    inline_if_present(sch, "padded", "weights")

    next_step(sch, "Blocks, virtual threads, threads: extents drawn as [block, vthread, thread, elements of a thread]")
    y, x, f, n, ry, rx, rc = sch.get_loops(conv)
    tile_f, tile_n = (sch.sample_perfect_tile(loop, n=4, max_innermost_factor=16) for loop in (f, n))
    step = sch.sample_perfect_tile(rc, n=2, max_innermost_factor=32)
    pixel = sch.fuse(y, x)
    block_f, vf, tf, f = sch.split(f, tile_f)
    block_n, vn, tn, n = sch.split(n, tile_n)
    rco, rci = sch.split(rc, step)
    sch.reorder(pixel, block_f, block_n, vf, vn, tf, tn, rco, ry, rx, rci, f, n)
    bind_grid(sch, pixel, block_f, block_n)
    bind(sch, (vf, "vthread.y"), (vn, "vthread.x"), (tf, "threadIdx.y"), (tn, "threadIdx.x"))
    sch.annotate(conv, "meta_schedule.thread_extent_low_inclusive", arch.wave)
    sch.annotate(conv, "meta_schedule.thread_extent_high_inclusive", arch.max_threads)

    next_step(sch, "Where each stage lives, and how wide the vectors are in which all threads fetch it")
    sch.reverse_compute_at(output, tn, preserve_unit_loops=True)
    for stage in local:
        sch.compute_at(stage, rci, preserve_unit_loops=True)
    for stage, row in zip(shared, (problem.n, problem.co), strict=True):
        sch.compute_at(stage, rx, preserve_unit_loops=True)
        # as wide as rows keep aligned
        sch.fuse(*sch.get_loops(stage)[-4:])
        vectors = [1 << power for power in range(widest_vector(row, widest(problem.dtype)).bit_length())]
        vector = sch.sample_categorical(vectors, [1 / len(vectors)] * len(vectors))
        sch.annotate(stage, "meta_schedule.cooperative_fetch", vector)
    unroll = sch.sample_categorical(UNROLL, [1 / len(UNROLL)] * len(UNROLL))
    sch.annotate(sch.get_sblock("root"), "meta_schedule.unroll_explicit", unroll)


SAMPLED = SampledSchedule(definition=program, apply=steps)
