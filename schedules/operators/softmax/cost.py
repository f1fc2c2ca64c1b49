"""What a kernel of softmax costs, about: what the rule that chooses a schedule compares.

A kernel takes the time of four things, which overlap in part where a multiprocessor has several blocks: its bytes,
those of rows that it reads again at the rate of L2 where they lie there; its lines of 128 bytes, of which a
multiprocessor's load and store unit takes one a clock, so that accesses of neighbouring threads that are apart, or meet
in banks of shared memory, cost more than ones side by side; its instructions; and what its blocks wait, for memory and
for what a thread does one after the other, of which only as many wait at once as a multiprocessor holds.  Fewer blocks
than multiprocessors use as many of these, and as much of the bandwidth as these can draw.  To it comes what nothing
overlaps: a launch, barriers, a cluster's exchange, a second kernel.

`scripts/fit_softmax.py` fits the constants to the trials kept in ``tuning_logs/nvidia-h200/softmax_trials``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from schedules.core.arch import Arch, occupancy
from schedules.core.problem import Config
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import PACK, Frame
from schedules.operators.softmax.rows import itemsize

C = TypeVar("C", bound=Config)

CLOCK = 1750.0  # of a multiprocessor, a microsecond
LANES = 128  # instructions of a thread that a multiprocessor begins in a clock
LINE = 128  # bytes that a load and store unit takes in a clock
BANK, BANKS = 4, 32  # bytes of shared memory that lie in one, and how many
BANDWIDTH = 3000.0  # GB/s, of devices whose bandwidth is not known
L2_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Costs:
    """Microseconds, and instructions of a thread, if nothing else is said."""

    launch: float = 3.27
    latency: float = 0.118  # from a block's loads to its stores
    delay: float = 0.0283  # of an element of a thread
    barrier: float = 0.0851
    tile: float = 0.201  # of rows by way of shared memory
    exchange: float = 0.498  # of a cluster
    second: float = 1.84  # of another kernel
    overlapped: float = 1.48  # of one that starts while the first runs
    shared: float = 0.214  # of packs that rows share
    drawn: float = 54  # of the share of the bandwidth that is a multiprocessor's own, what one alone can draw
    reached: float = 0.985  # of the bandwidth
    overlap: float = 1.92  # the norm's exponent where blocks fill each other's waits: 1 if nothing overlapped
    fixed: float = 77.9  # beside its elements
    edges: float = 123  # for packs that rows share
    element: float = 0.4  # of an element, where an exponential counts as eight
    access: float = 13.8  # of a load and a store of global memory
    turn: float = 0.0901  # of shared memory
    again: float = 4.16  # of an element that was not kept as it is used
    block: float = 0.0574  # us until a multiprocessor has begun a block
    parts: float = 38.1  # stores of a row's packs that it shares, about


COSTS = Costs()


@dataclass(frozen=True)
class Work:
    """What the kernels of one call do: numbers, or arrays of them for several."""

    resident: Any  # blocks that a multiprocessor holds at once
    waves: Any  # blocks by what the device holds of them at once
    share: Any  # of the multiprocessors that are used, at most 1
    memory: Any  # microseconds of all bytes at the device's bandwidth
    lines: Any  # clocks of a multiprocessor, if all are used; of packs that rows share, for each of `Costs.parts`
    shared_lines: Any
    threads: Any  # clocks for each instruction of all threads; of all their elements, accesses, turns in shared memory
    elements: Any
    accesses: Any
    turns: Any
    each: Any  # elements that a thread has, one after the other
    barriers: Any  # how many of what nothing overlaps
    tiles: Any
    blocks: Any  # of a multiprocessor, one after the other
    again: Any  # elements whose exponentials are computed twice
    exchanges: Any
    seconds: Any
    overlapped: Any
    edges: Any


def cheapest(problem: SoftmaxProblem, schedule: str, configs: Iterable[C], arch: Arch) -> C:
    """The legal config that takes least; the first, whose `check` says why, if none is legal."""
    first, *others = configs
    legal = [config for config in (first, *others) if config.check(problem, arch) is None]
    if not legal:
        return first
    found = works(problem, [(schedule, config) for config in legal], arch)
    return legal[int(np.argmin(estimate(found)))]


def microseconds(problem: SoftmaxProblem, schedule: str, config: Any, arch: Arch) -> float:
    """What `schedule` with a legal config takes."""
    return float(estimate(work(problem, schedule, config, arch)))


def works(problem: SoftmaxProblem, given: Iterable[tuple[str, Any]], arch: Arch) -> Work:
    """Of each schedule with its legal config."""
    each = [vars(work(problem, name, config, arch)) for name, config in given]
    return Work(**{name: np.array([found[name] for found in each]) for name in each[0]})


def estimate(work: Work, costs: Costs = COSTS) -> Any:
    """Microseconds of each."""
    memory = work.memory / np.minimum(costs.reached, costs.drawn * work.share)
    lines = (work.lines + work.shared_lines * costs.parts) / work.share / CLOCK
    issued = work.threads * (costs.fixed + costs.edges * work.edges) + work.elements * costs.element
    issued = issued + work.accesses * costs.access + work.turns * costs.turn + work.again * costs.again
    issued = issued / LANES / work.share / CLOCK
    begun = work.blocks * costs.block
    waits = np.maximum(1.0, work.waves) * (costs.latency + costs.delay * work.each)
    # blocks overlap with others of their multiprocessor, and with those of others that are at another part of the work
    norm = 1 + (costs.overlap - 1) * np.minimum(1.0, work.waves) * (1 - 1 / work.resident / np.maximum(1.0, work.waves))
    together = (memory**norm + lines**norm + issued**norm + waits**norm + begun**norm) ** (1 / norm)
    alone = costs.barrier * work.barriers + costs.tile * work.tiles + costs.exchange * work.exchanges
    alone = alone + costs.second * work.seconds + costs.overlapped * work.overlapped + costs.shared * work.edges
    return costs.launch + alone + together


def work(problem: SoftmaxProblem, schedule: str, config: Any, arch: Arch) -> Work:
    """Of `schedule` with a legal config."""
    device, item = arch.device, itemsize(problem)
    outputs = [argument.output for argument in problem.arguments() if len(argument.shape) == 2]
    tensors, inputs = len(outputs), outputs.count(False)
    row_bytes = problem.cols * item
    on_packs = schedule in ("tiles", "frames", "cluster", "parts")
    frame = Frame.of_row(problem, config.access if on_packs else config.vector * item)
    edges = not frame.aligned
    reductions = 1 if problem.is_grad or (on_packs and config.online) else 2
    blocks, threads, reads, shared_lines, turns, each = float(problem.rows), config.threads, 1, 0.0, 0.0, 1
    if schedule in ("tiles", "warp", "frames"):
        blocks /= config.groups * config.rows_per_group
        each = config.rows_per_group
    elif schedule == "cluster":
        blocks, threads = blocks * config.cluster, threads * config.cluster
    elif schedule in ("split", "parts"):
        count = config.parts(problem) if schedule == "parts" else config.packing(problem).parts
        blocks, threads, reads = blocks * count, threads * count, 2
    elif schedule == "block_streaming":
        reads = reductions + 1
    rounds = -(-frame.most // threads)
    if schedule == "tiles":
        turned = rounds * _turns(row_bytes, threads, config.access) * threads / 32
        lines, turns = 2 * (2 * row_bytes / LINE + turned), threads * rounds
        accesses = row_bytes / PACK
    else:
        run = min(threads, frame.most) * frame.access  # bytes side by side
        apart = (run < row_bytes or edges) * bool(run % LINE or edges)
        lines = 2 * frame.most * frame.access * (1 / LINE + apart / run)
        accesses, shared_lines = threads * rounds * reads, float(edges)
    elements = rounds * frame.pack
    nbytes = problem.rows * row_bytes
    again = (reads - 1) * (0.5 if nbytes * inputs < (device.l2_bytes or L2_BYTES) / 2 else 1)
    rows = problem.rows / device.multiprocessors
    second, resident = schedule in ("split", "parts"), _resident(problem, config, arch)
    share = min(1.0, blocks / device.multiprocessors)
    if schedule == "cluster":  # groups of multiprocessors hold whole ones, and some of them more than others
        share = blocks / device.multiprocessors / -(-blocks // device.resident(config.cluster))
    beside = schedule == "parts" and "cluster" in arch.features
    return Work(
        resident=resident,
        waves=blocks / device.multiprocessors / resident,
        share=share,
        memory=nbytes * (tensors + again * inputs) / (device.bandwidth or BANDWIDTH) / 1000,
        lines=rows * lines * tensors / 2,
        shared_lines=rows * shared_lines * tensors / 2,
        threads=rows * threads,
        elements=rows * threads * elements * (1 + reads) / 2,
        accesses=rows * accesses,
        turns=rows * turns,
        each=elements * each * (reads if schedule == "block_streaming" else 1),
        barriers=2 * reductions * (threads > arch.wave),
        tiles=float(schedule == "tiles"),
        blocks=blocks * (1 + second) / device.multiprocessors / share,
        again=rows * threads * elements * (getattr(config, "kept", "packed") == "packed"),
        exchanges=float(schedule == "cluster"),
        seconds=float(second and not beside),
        overlapped=float(beside),
        edges=float(edges),
    )


def _resident(problem: SoftmaxProblem, config: Any, arch: Arch) -> int:
    """Blocks that a multiprocessor holds at once, about."""
    threads = config.threads * getattr(config, "groups", 1)
    registers = config.registers(problem) if hasattr(config, "registers") else 1
    shared = config.shared_bytes(problem) if hasattr(config, "shared_bytes") else 0
    most = getattr(config, "blocks_sm", 0) or arch.blocks_sm  # the compiler takes the registers that it may
    return max(1, min(most, occupancy(arch, threads, registers, shared)[0]))


@lru_cache(maxsize=256)
def _turns(row_bytes: int, threads: int, access: int) -> int:
    """How often shared memory is read for a warp's access, `access` bytes of each thread side by side in rows of
    `threads`: as often as its fullest bank holds different words, of as many lanes as are served at once."""
    at_once = 32 * BANK // max(BANK, access)
    total = 0
    for first in range(0, 32, at_once):
        banks: dict[int, set[int]] = {}
        for lane in range(first, first + at_once):
            at = lane // threads * row_bytes + lane % threads * access
            for word in range(at // BANK, (at + access - 1) // BANK + 1):
                banks.setdefault(word % BANKS, set()).add(word)
        total += max(map(len, banks.values()))
    return total
