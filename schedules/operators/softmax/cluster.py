"""Softmax for Hopper with a row over the blocks of a cluster, read once: for long rows, though they be few.

Each block has a part of the row, and each of its threads `rounds` packs of 16 bytes of that, in flight all at once: the
first `in_shared` of them into shared memory (``cp.async``), where only that thread reads them, the others straight into
registers, as `frames` has it.  A block's maximum and sum, relative to its own maximum (of a gradient the sum), go to
every block of the cluster through distributed shared memory, behind one barrier of the cluster; then each part is
written from where it waits.  So a row is as long as 16 multiprocessors hold, and moves once in and once out.

With a `grid`, clusters compute row after row, and what waits in shared memory of the next row is on its way while this
one is written, each pack into the place of the one that was just read: no thread waits for another.  Without, there is
a cluster for each row, and blocks that share a multiprocessor fill each other's waits.

Sources: CUDA C++ Programming Guide, "Distributed Shared Memory"; rows over a cluster, with what their blocks came to
exchanged by way of shared memory, as in Dao-AILab/quack; the parallel form of the online softmax (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.tvm import tvm
from schedules.operators.softmax.cluster_config import CLUSTERS, ClusterConfig
from schedules.operators.softmax.cost import cheapest
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import KEPT_IN_REGISTERS, held

PACKS = 8  # of a thread, by default
NUMERATORS = 5  # packs of a thread whose numerators it keeps, by default
THREADS_SM = 1024  # on a multiprocessor, by default: with 64 registers each
IN_REGISTERS = 32  # registers of a thread for packs, by default, where shared memory does not hold two parts


def schedule(problem: SoftmaxProblem, config: ClusterConfig, arch: Arch) -> tvm.IRModule:
    """The program for x or y, dy (rows, cols), run-time rows."""
    from schedules.operators.softmax.cluster_program import program

    return program(problem, config)


def default(problem: SoftmaxProblem, arch: Arch) -> ClusterConfig:
    """Of each size of cluster the first of `preferred` that is legal; of these the one that takes least."""
    sizes = [size for size in CLUSTERS if size <= arch.cluster] or CLUSTERS
    found = (first_legal(preferred(problem, size, arch), problem, arch) for size in sizes[::-1])
    return cheapest(problem, "cluster", found, arch)


def first_legal(configs: Iterable[ClusterConfig], problem: SoftmaxProblem, arch: Arch) -> ClusterConfig:
    """The last, whose `check` says why, if none is."""
    config = ClusterConfig()
    for config in configs:
        if config.check(problem, arch) is None:
            break
    return config


def preferred(problem: SoftmaxProblem, cluster: int, arch: Arch) -> Iterator[ClusterConfig]:
    """Of few rows of which a thread has few packs, numerators in registers, and each warp sends for itself: up to
    0.4 us less on an H200 than what follows.  Then, with PACKS to a thread of 256 or 512, as many as can in shared
    memory, and as many blocks to a multiprocessor, up to six or three, as that holds, at least two.

    For longer parts two blocks with as many packs in registers as IN_REGISTERS hold, or one: estimates, not measured.
    """
    few, online = problem.rows <= arch.device.multiprocessors, not problem.is_grad
    if few and problem.function == "softmax":
        base = ClusterConfig(cluster, 256, kept="numerators", online=True, direct=True)
        if base.rounds(problem) <= NUMERATORS:
            yield base
    for threads in (256, 512):
        base = ClusterConfig(cluster, threads, online=online)
        if base.rounds(problem) <= PACKS:
            for blocks_sm in range(1536 // threads, 1, -1):
                yield replace(base, in_shared=base.whole_rounds(problem), blocks_sm=blocks_sm)
    for threads in (512, 1024):
        base = ClusterConfig(cluster, threads, 0, THREADS_SM // threads, online=online)
        fewest = max(0, base.rounds(problem) - IN_REGISTERS // held(problem, "packed"))
        for in_shared in range(fewest, max(fewest, base.whole_rounds(problem)) + 1):
            yield replace(base, in_shared=in_shared)


def space(problem: SoftmaxProblem, arch: Arch) -> Iterator[ClusterConfig]:
    """Every cluster; blocks of 128 to 1024 threads with up to sixteen packs each, of which none, half, as many as can,
    or all but those that IN_REGISTERS hold and up to two more wait in shared memory; a cluster to each row, or as many
    as are on the GPU at once."""
    for cluster, threads in product(CLUSTERS, (128, 256, 512, 1024)):
        base = ClusterConfig(cluster, threads, blocks_sm=1)
        rounds, whole = base.rounds(problem), base.whole_rounds(problem)
        if rounds > 16 or (rounds == 1 and threads > 128):
            continue
        fewest = rounds - IN_REGISTERS // held(problem, "packed")
        shares = sorted({0, rounds // 2, fewest, fewest + 1, fewest + 2, whole} & set(range(whole + 1)))
        onlines = (True,) if cluster > 4 else (False, True)
        for in_shared, threads_sm in product(shares, (512, 1024, 1536, 2048)):
            blocks_sm = threads_sm // threads
            if not blocks_sm or threads_sm % threads:
                continue
            at_once = arch.device.resident(cluster) * blocks_sm
            grids = (0, at_once) if problem.rows * cluster > at_once else (0,)
            kepts = KEPT_IN_REGISTERS if problem.function == "softmax" and not in_shared else KEPT_IN_REGISTERS[:1]
            onlines_here = (False,) if problem.is_grad else onlines
            for grid, kept, online, streaming in product(grids, kepts, onlines_here, ("no", "evict_last")):
                given = dict(blocks_sm=blocks_sm, grid=grid, kept=kept, online=online, streaming=streaming)
                yield replace(base, in_shared=in_shared, **given)


SCHEDULE = ScheduleSpec(
    name="cluster",
    summary="a row over the blocks of a Hopper's cluster, in registers and shared memory, read once",
    kinds=("cuda",),
    config=ClusterConfig,
    apply=schedule,
    default=default,
    space=space,
    tirx=WrittenInTirx(
        reason="the blocks of a cluster exchange a row's maximum and sum through distributed shared memory; the "
        "schedule language has no blocks that wait for one another",
        siblings=("split", "block_streaming"),
    ),
)
