"""Softmax with a row in registers, as the packs of 16 bytes that it lies in: any width at 16 bytes an access.

As `warp` and `block_registers`: `threads` threads share a row, which is read once by ordinary loads, all of a thread's
in flight before the first is used, and is written from registers.  But packs are those of memory, not of the row (see
`packs`), so rows need not be whole packs.  Only the tensor's last pack, where that is not whole, is
read element by element.

No shared memory but what warps of a row exchange, so that the L1 cache is large, and no cache hints.
Sources: packs and functors are OneFlow's; with `online` the maximum and the sum of each warp are combined at once
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.tvm import tvm
from schedules.lowering.annotations import check_streaming, default_streaming
from schedules.operators.softmax.cost import cheapest
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.frames_config import FramesConfig
from schedules.operators.softmax.packs import PACK, Frame, widest
from schedules.operators.softmax.rows import itemsize

ELEMENTS = 8  # of a thread, at least, where rows that share packs are not read by these


def schedule(problem: SoftmaxProblem, config: FramesConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows."""
    from schedules.operators.softmax.frames_program import program

    return program(problem, config, redux="redux" in arch.features)


def default(problem: SoftmaxProblem, arch: Arch) -> FramesConfig:
    """Of `plain` ones what is said to cost least."""
    return cheapest(problem, "frames", plain(problem, arch), arch)


def plain(problem: SoftmaxProblem, arch: Arch) -> Iterator[FramesConfig]:
    """Whole packs, or the widest access that short rows consist of; up to sixteen to a thread, of which at least half
    have one; blocks of a row, or of 64 to 256 threads."""
    streaming = default_streaming(arch)
    accesses = {PACK, widest(problem)} if problem.cols <= ELEMENTS * arch.max_threads else {PACK}
    # ptxas spills to come under 32 registers, unless it is told that one block is enough
    yield FramesConfig(1024, min_blocks=1, streaming=streaming)
    for access, threads in product(sorted(accesses), (1 << k for k in range(11))):
        most = Frame.of_row(problem, access).most
        if not most <= 16 * threads < 32 * most:
            continue
        blocks = (64, 128, 256) if threads <= 32 else (threads,)
        onlines = (False, True) if threads > 32 and not problem.is_grad else (False,)
        min_blocks = 1024 // threads if threads >= 512 else 0
        for block, kept, online in product(blocks, keeps(problem), onlines):
            yield FramesConfig(threads, block // threads, 1, min_blocks, kept, online, access, streaming)


def keeps(problem: SoftmaxProblem) -> tuple[str, ...]:
    """Of `frames_config.KEPT`, what is worth trying for the problem: the numerators of softmax are it widened."""
    if problem.function == "softmax":
        return ("packed", "numerators")
    return ("packed", "widened") if itemsize(problem) < 4 else ("packed",)


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[FramesConfig]:
    """Up to sixteen packs to a thread, blocks of 32 to 256 threads or one row, up to two rows to a group."""
    accesses = sorted({PACK, widest(problem)})
    streams = [streaming for streaming in ("no", "evict_last") if check_streaming(streaming, arch) is None]
    for access, threads in product(accesses, (1 << k for k in range(11))):
        most = Frame.of_row(problem, access).most
        if not most <= 16 * threads < 32 * most:
            continue
        wide = threads > 32
        blocks = (threads,) if wide else (32, 64, 128, 256)
        onlines = (False, True) if wide and not problem.is_grad else (False,)
        kepts = [kept for kept in keeps(problem) if kept != "widened" or not wide]  # long rows want the registers
        for block, per_group, kept, online, streaming in product(blocks, (1, 2), kepts, onlines, streams):
            for threads_sm in (0, 512, 1024, 1536, 2048):
                if threads_sm % block == 0:
                    held_sm = threads_sm // block
                    yield FramesConfig(threads, block // threads, per_group, held_sm, kept, online, access, streaming)


SCHEDULE = ScheduleSpec(
    name="frames",
    summary="a row in registers as the packs of 16 bytes that it lies in, at any width; no shared memory to speak of",
    kinds=("cuda",),
    config=FramesConfig,
    apply=schedule,
    default=default,
    space=space,
    tirx=WrittenInTirx(
        reason="rows are read and kept as the packs of 16 bytes they lie in, which neighbours share; packs of the "
        "schedule language start where rows start, and what registers hold is left to the compiler",
        siblings=("block_registers", "warp"),
    ),
)
