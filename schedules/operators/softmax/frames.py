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
from schedules.operators.softmax.packs import PACK, Frame, held, widest
from schedules.operators.softmax.rows import itemsize

ELEMENTS = 8  # of a thread, by default, where rows that share packs are not read by these


def schedule(problem: SoftmaxProblem, config: FramesConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows."""
    from schedules.operators.softmax.frames_program import program

    return program(problem, config, redux="redux" in arch.features)


def default(problem: SoftmaxProblem, arch: Arch) -> FramesConfig:
    """By whole packs; or, of rows that share packs, by the widest access that they consist of, up to ELEMENTS of them
    to a thread, where that is said to cost less: where few rows are not worth the instructions for shared packs."""
    packed, access = by_packs(problem, arch), widest(problem)
    if access == PACK or problem.cols > ELEMENTS * arch.max_threads:
        return packed
    threads = next(1 << k for k in range(11) if ELEMENTS << k >= Frame.of_row(problem, access).most)
    groups = max(1, 64 // threads) if threads <= 32 else 1
    narrow = FramesConfig(threads, groups, access=access, streaming=packed.streaming)
    return cheapest(problem, "frames", (packed, narrow), arch)


def by_packs(problem: SoftmaxProblem, arch: Arch) -> FramesConfig:
    """Two packs to a thread of up to eight, four to one of up to a warp, blocks of 64 threads, packs of 8 bytes,
    widened, where that makes them whole; then up to sixteen packs of a warp, then blocks of 128, 512 and 1024 threads
    with up to 16, 8 and 8 packs; fewer as further inputs take registers.  Two
    packs to a thread of rows that are no more than multiprocessors, behind one barrier: what a row then waits for is
    its threads (an estimate, not measured).

    Few threads with many packs each were fastest on an H200 where rows are whole packs, but up to 128 columns, where
    the fastest that searches found have two packs to a thread or one (tuning_logs/nvidia-h200/softmax.jsonl).
    """
    streaming = default_streaming(arch)
    if problem.rows <= arch.device.multiprocessors and Frame.of_row(problem).most <= 2 * arch.max_threads:
        threads = next(1 << k for k in range(11) if 2 << k >= Frame.of_row(problem).most)
        online = threads > 32 and not problem.is_grad
        return FramesConfig(threads, 1 if threads > 32 else 64 // threads, online=online, streaming=streaming)
    if _halves(problem) and not problem.has_dropout:
        packs = Frame.of_row(problem, 8).most
        threads = next((t for t in (1, 2, 4, 8, 16, 32) if t * 4 >= packs), 64)
        if threads <= 32:
            return FramesConfig(threads, 64 // threads, kept=keeps(problem)[-1], access=8, streaming=streaming)
    most = Frame.of_row(problem).most
    scale = -(-held(problem, "packed") // 4)  # registers, in those of one input
    threads = 1
    while threads < 32 and threads * (2 if threads < 8 else 4) < most:
        threads *= 2
    if most * scale <= 32 * 16:
        return FramesConfig(threads, 64 // threads, streaming=streaming)
    for threads, packs, min_blocks in ((128, 8, 0), (128, 16, 4), (512, 8, 2)):
        if most * scale <= threads * packs:
            asked = min(min_blocks, arch.threads_sm // (2 * threads)) if scale == 1 else 0
            return FramesConfig(threads, min_blocks=asked, streaming=streaming)
    # ptxas spills to come under 32 registers, unless it is told that one block is enough
    return FramesConfig(1024, min_blocks=1, streaming=streaming)


def keeps(problem: SoftmaxProblem) -> tuple[str, ...]:
    """Of `frames_config.KEPT`, what is worth trying for the problem: the numerators of softmax are it widened."""
    if problem.function == "softmax":
        return ("packed", "numerators")
    return ("packed", "widened") if itemsize(problem) < 4 else ("packed",)


def _halves(problem: SoftmaxProblem) -> bool:
    """Whether rows are whole packs of 8 bytes but not of 16."""
    return Frame.of_row(problem, 8).aligned and not Frame.of_row(problem).aligned


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
