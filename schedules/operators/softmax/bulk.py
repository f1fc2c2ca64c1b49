"""Softmax for Hopper with rows that arrive ahead of their use: a persistent kernel in TIRx.

A team of threads, a block or a warp of one, takes stage after stage of `rows` rows.  Each of its `num_stages` stages in
shared memory is filled by one bulk copy of each input (``cp.async.bulk``, counted by an mbarrier) while earlier rows
are reduced and stored, so that memory has work at all times, and no thread has an address to compute for it.

A row that does not start at a multiple of 16 bytes keeps its place among them: the packs of 16 bytes from the one its
first element lies in to the one its last lies in are copied, computed and stored as they lie in memory.  Only those
two hold elements of other rows, which count as neutral and are not stored.  So any width moves 16 bytes at a time.

Sources: the ring of stages is that of `hopper`; packs and functors are OneFlow's; with `online` the maximum
and the sum of each warp are combined at once (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.operators.softmax.bulk_config import KEPT, STORES, BulkConfig
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import Frame
from schedules.operators.softmax.rows import itemsize

if TYPE_CHECKING:
    import tvm

PACKS = 4  # of a thread, by default
CHUNKS = 4  # of a row that has a multiprocessor's shared memory to itself
MOST_PACKS = 16  # of a thread, in searches
THREADS_SM = 1024  # on a multiprocessor, by default: with 64 registers each
STAGE = 2048  # bytes of a stage to a warp where it has several rows


def schedule(problem: SoftmaxProblem, config: BulkConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows; blocks take stages of rows in turn."""
    from schedules.operators.softmax.bulk_program import program

    return program(problem, config)


def keeps(problem: SoftmaxProblem) -> tuple[str, ...]:
    """Where rows of the function may be kept, what saves most work first."""
    return tuple(kept for kept in reversed(KEPT) if kept != "numerators" or problem.function == "softmax")


def default(problem: SoftmaxProblem, arch: Arch) -> BulkConfig:
    """The first of `preferred` that is legal; the last of them if none is."""
    config = BulkConfig()
    for config in preferred(problem, arch.device):
        if config.check(problem, arch) is None:
            break
    return config


def preferred(problem: SoftmaxProblem, device: Device) -> Iterator[BulkConfig]:
    """Configs with eight threads to a row, which are 128 bytes, or as many as make PACKS packs to each, THREADS_SM
    threads on a multiprocessor, or fewer where that leaves room for another stage, and a grid that fills `device`.

    Rows of up to a warp that start inside packs have blocks that compute as many of them side by side as make whole
    packs, so that all of a stage leaves by one copy.  Longer ones store their ends apart, and so do those with dropout,
    whose stages are so large that few would be left.  Estimates, not measured.
    """
    frame = Frame(problem.cols, 1, itemsize(problem))
    threads = 1
    while threads < 1024 and frame.pack * threads * (1 if threads < 8 else PACKS) < problem.cols:
        threads *= 2
    copied = threads <= 32 and not frame.aligned and not problem.has_dropout
    for (least, stages), kept in product(((768, 3), (512, 2), (1, 2), (1, 1)), keeps(problem)):
        for of_row in (threads, threads // 2) if threads > 64 and kept != "shared" else (threads,):
            shape = narrow(problem, of_row, copied) if of_row <= 32 else dict(threads=of_row)
            base = BulkConfig(**shape, kept=kept, stores="bulk" if copied else "direct")  # type: ignore[arg-type]
            blocks = range(max(1, THREADS_SM // base.block), max(1, least // base.block) - 1, -1)
            for blocks_sm in blocks:
                num_stages = stages + copied  # one is leaving
                chunks = min(CHUNKS, base.rounds(problem)) if num_stages == 1 and of_row > 32 else 1
                grid = device.resident(1) * blocks_sm
                yield replace(base, num_stages=num_stages, chunks=chunks, blocks_sm=blocks_sm, grid=grid)


def narrow(problem: SoftmaxProblem, threads: int, copied: bool) -> dict[str, int]:
    """The fields for rows of up to a warp: of teams of a warp; or, where a stage is to leave by one copy, of the
    smallest teams from four warps on whose rows make whole packs."""
    if not copied:
        return teams(problem, threads, 32)
    fitting = (team for team in (128, 256, 512) if Frame(problem.cols, team // threads, itemsize(problem)).aligned)
    return teams(problem, threads, next(fitting), 0)


def teams(problem: SoftmaxProblem, threads: int, team: int, times: int = 1) -> dict[str, int]:
    """The fields of teams of `team` threads for rows of up to a warp: the rows of a stage have about `times` STAGE
    bytes for each warp, at least one for each that is computed; teams of a warp are four to a block."""
    abreast = team // threads
    turns = round(STAGE * times * threads / (32 * problem.cols * itemsize(problem)))
    return dict(threads=threads, abreast=abreast, groups=4 if team == 32 else 1, rows=abreast * max(1, turns))


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[BulkConfig]:
    """Rows of up to a warp in teams of one warp, four or eight, longer ones in blocks of their own; shapes with up to
    sixteen packs to a thread, and 512 to 2048 threads on a multiprocessor."""
    most = Frame(problem.cols, 1, itemsize(problem)).most
    fitting = [
        threads for threads in (1 << k for k in range(11)) if most <= MOST_PACKS * threads < 2 * MOST_PACKS * most
    ]
    narrow_ones = product((threads for threads in fitting if threads <= 32), (32, 128, 256), (0, 2))
    shapes = [teams(problem, *fields) for fields in narrow_ones]
    shapes += [dict(threads=threads) for threads in fitting if threads > 32]
    shapes = [shape for k, shape in enumerate(shapes) if shape not in shapes[:k]]
    for shape, threads_sm, num_stages in product(shapes, (512, 768, 1024, 1536, 2048), (1, 2, 3, 4)):
        base = BulkConfig(**shape, num_stages=num_stages)  # type: ignore[arg-type]
        if threads_sm % base.block:
            continue
        blocks_sm = threads_sm // base.block
        base = replace(base, blocks_sm=blocks_sm, grid=arch.device.resident(1) * blocks_sm)
        for kept, stores, streaming in product(keeps(problem), STORES, ("no", "evict_last")):
            if stores == "bulk" and num_stages < 3:  # one leaves while another is computed
                continue
            long = base.threads > 32
            onlines = (False, True) if long and not problem.is_grad else (False,)
            for online, chunks in product(onlines, (1, CHUNKS) if long and num_stages < 3 else (1,)):
                yield replace(base, chunks=chunks, kept=kept, stores=stores, streaming=streaming, online=online)


SCHEDULE = ScheduleSpec(
    name="bulk",
    summary="rows copied ahead by the Hopper's bulk copies, in packs of 16 bytes at any width; persistent blocks",
    kinds=("cuda",),
    config=BulkConfig,
    apply=schedule,
    default=default,
    space=space,
    tirx=WrittenInTirx(
        reason="bulk copies, counted by an mbarrier, bring rows, as the 16-byte packs they lie in, while others are "
        "computed; the schedule language has no mbarriers, and its packs start where rows start",
        siblings=("block_shared", "block_registers"),
    ),
)
