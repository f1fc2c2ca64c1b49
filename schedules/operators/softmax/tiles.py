"""Softmax of narrow rows of any width: a block brings in the packs of 16 bytes that many rows share, by way of shared
memory.

A tile of rows is one run of whole packs, which neighbouring threads load and store, whatever the rows' width; so no
access is in parts, and none is narrow.  In shared memory a row is cut as finely as its width asks: `threads` threads
take its elements, or words or pairs of these (`access` bytes), in turn, hold them in registers from the first
reduction to the output, and write each back to where it lay.  An odd number of elements, or of words, puts neighbouring
rows into different banks.

Sources: packs and functors are OneFlow's; a tile turned in shared memory is the transpose of NVIDIA's "An Efficient
Matrix Transpose in CUDA C/C++" (2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.tvm import tvm
from schedules.lowering.annotations import check_streaming, default_streaming
from schedules.operators.softmax.cost import cheapest
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import KEPT_IN_REGISTERS, PACK, Frame, row_inputs, widest
from schedules.operators.softmax.rows import itemsize
from schedules.operators.softmax.tiles_config import TilesConfig

ELEMENTS = 32  # of a thread, by default
PACKS = 4  # of a thread in flight, by default


def schedule(problem: SoftmaxProblem, config: TilesConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows."""
    from schedules.operators.softmax.tiles_program import program

    return program(problem, config)


def default(problem: SoftmaxProblem, arch: Arch) -> TilesConfig:
    """As few threads to a row as have up to ELEMENTS each, blocks of 128 threads, and rows that give each PACKS packs,
    or fewer until there are four blocks for each multiprocessor; or twice the threads, where that is said to cost less:
    where rows then meet less in banks of shared memory."""
    access = widest(problem)
    threads = 1
    while threads < 32 and threads * ELEMENTS < problem.cols:
        threads *= 2
    config = TilesConfig(threads, 128 // threads, 1, access, streaming=default_streaming(arch))
    step = config.whole(problem)
    row_bytes = problem.cols * itemsize(problem) * len(row_inputs(problem))
    wanted = min(128 * PACKS * PACK // row_bytes, problem.rows // (4 * arch.device.multiprocessors))
    config = replace(config, rows_per_group=max(1, wanted // (config.groups * step)) * step)
    if threads == 32:
        return config
    wider = replace(config, threads=2 * threads, groups=config.groups // 2)
    step = wider.whole(problem)
    wider = replace(wider, rows_per_group=max(1, config.rows // (wider.groups * step)) * step)
    return cheapest(problem, "tiles", (config, wider), arch)


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[TilesConfig]:
    """Up to sixteen accesses to a thread and few lanes without any; blocks of 64 to 256 threads; tiles of one to eight
    packs a thread."""
    packs = Frame.of_row(problem, widest(problem)).most
    streams = [streaming for streaming in ("no", "evict_last") if check_streaming(streaming, arch) is None]
    kepts = KEPT_IN_REGISTERS if problem.function == "softmax" else KEPT_IN_REGISTERS[:1]
    base = default(problem, arch)
    for threads, block in product((1, 2, 4, 8, 16, 32), (64, 128, 256)):
        if threads >= 2 * packs:
            continue
        config = replace(base, threads=threads, groups=block // threads)
        step = config.whole(problem)
        per_group = {step * times for times in (1, 2, 3, 4, 6, 8)}
        for rows, kept, streaming, threads_sm in product(sorted(per_group), kepts, streams, (0, 1024, 2048)):
            if rows * config.groups * problem.cols * itemsize(problem) <= 8 * PACK * block:
                given = dict(rows_per_group=rows, min_blocks=threads_sm // block, kept=kept, streaming=streaming)
                yield replace(config, **given)  # type: ignore[arg-type]


SCHEDULE = ScheduleSpec(
    name="tiles",
    summary="many narrow rows at once as whole packs of 16 bytes, cut into rows in shared memory, at any width",
    kinds=("cuda",),
    config=TilesConfig,
    apply=schedule,
    default=default,
    space=space,
    tirx=WrittenInTirx(
        reason="threads bring in packs that rows share and compute rows that start in the middle of them; stages of "
        "the schedule language are indexed by rows, whose packs start where rows start",
        siblings=("warp", "block_registers"),
    ),
)
