"""Softmax with a row cut into parts of whole packs of 16 bytes, a block to a part: for rows too few to fill the GPU.

Two kernels.  The first leaves in workspace what each part's reductions come to, relative to the part itself: of a
forward function its maximum, and the sum of exp(v - that maximum); of a gradient its sum.  In the second a block writes
the same part of the output, from the numbers of all parts of the row, which it combines for itself.  On Hopper the
second starts while the first runs, and has its part in registers before it waits for the first to end: one reads memory
beside the other, and what is left of the second is the combination and the stores.  No block waits for another of its
kernel.

`cluster` is one kernel, whose row is on 16 multiprocessors at most; these parts are on all of them.
Source: the parallel form of the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.tvm import tvm
from schedules.lowering.annotations import check_streaming, default_streaming
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.parts_config import SHARES, PartsConfig

PACKS = 8  # of a thread, by default, at most


def schedule(problem: SoftmaxProblem, config: PartsConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows; rows * parts blocks of each kernel."""
    from schedules.operators.softmax.parts_program import program

    return program(problem, config, overlapped="cluster" in arch.features, redux="redux" in arch.features)


def default(problem: SoftmaxProblem, arch: Arch) -> PartsConfig:
    """The longest parts, up to PACKS packs of 256 threads, that are three for each two multiprocessors, as searches
    for `split` found them on an H200 (tuning_logs/nvidia-h200/softmax.jsonl); longer ones for rows of more parts than
    can be combined."""
    config = PartsConfig(packs=PACKS, streaming=default_streaming(arch))
    while config.packs > 1 and 2 * problem.rows * config.parts(problem) < 3 * arch.device.multiprocessors:
        config = replace(config, packs=config.packs // 2)
    while config.packs > 1 and config.registers(problem) > 128:
        config = replace(config, packs=config.packs // 2)
    while config.threads < arch.max_threads and config.parts(problem) > SHARES * config.threads:
        config = replace(config, threads=2 * config.threads)
    return config


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[PartsConfig]:
    streams = [streaming for streaming in ("no", "evict_last") if check_streaming(streaming, arch) is None]
    for threads, packs, threads_sm, streaming in product((64, 128, 256, 512, 1024), (1, 2, 4, 8), (0, 1024), streams):
        yield PartsConfig(threads, packs, threads_sm // threads, streaming)


SCHEDULE = ScheduleSpec(
    name="parts",
    summary="a row cut into parts of packs at any width, a block to a part; a second kernel that overlaps the first",
    kinds=("cuda",),
    config=PartsConfig,
    apply=schedule,
    default=default,
    space=space,
    tirx=WrittenInTirx(
        reason="the second kernel starts while the first runs and waits for it between its loads and its stores; the "
        "schedule language has no kernels that overlap, and its packs start where rows start",
        siblings=("split", "block_streaming"),
    ),
)
