"""What a kernel of softmax costs, about: what the rule that chooses a schedule compares.

A kernel takes the time of three things, which overlap in part where a multiprocessor has several blocks: its bytes,
those of rows that it reads again at the rate of L2 where they lie there; its lines of 128 bytes, of which a
multiprocessor's load and store unit takes one a clock, so that accesses of neighbouring threads that are apart cost
more than ones side by side; and its instructions.  Fewer blocks than multiprocessors use as many of these, and as much
of the bandwidth as these can draw.  To it comes what nothing overlaps: barriers, a cluster's exchange, a second kernel.

The constants give the order, and about the distances, that trials on an H200 found (tuning_logs/nvidia-h200/
softmax.jsonl, softmax_by_schedule); of `tiles` and `parts`, and of other devices, they are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedules.core.arch import Arch
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.packs import PACK, Frame
from schedules.operators.softmax.rows import itemsize

CLOCK = 1750.0  # of a multiprocessor, a microsecond
LANES = 128  # instructions of a thread that a multiprocessor begins in a clock
LINE = 128  # bytes that a load and store unit takes in a clock
DRAWN = 2.0  # of the share of the bandwidth that is a multiprocessor's own, what one alone can draw
BANDWIDTH = 3000.0  # GB/s, of devices whose bandwidth is not known
L2_BYTES = 32 * 2**20
OVERLAP = 2.0  # the norm's exponent where blocks fill each other's waits: 1 if nothing overlapped
# instructions of a thread: beside its elements; for packs that hold elements of other rows; of an element, where an
# exponential counts as eight; of a load and a store of global memory, and of shared memory
FIXED, EDGES, ELEMENT, ACCESS, TURN = 60, 150, 16, 12, 3
PARTS = 8  # stores of a row's packs that hold elements of other rows, about
BARRIER, EXCHANGE, SECOND, OVERLAPPED = 0.05, 0.7, 2.6, 1.6  # microseconds
DELAY = 0.02  # microseconds that each element of a thread delays its row


@dataclass(frozen=True)
class Work:
    """What the kernels of one call do.  Lines and instructions are those of a row, with those of lanes that idle."""

    blocks: float
    lines: float  # of one load and one store
    instructions: float
    elements: float  # that a thread has
    reads: float = 1.0  # times that a row is read
    alone: float = 0.0  # microseconds that nothing overlaps


def microseconds(problem: SoftmaxProblem, schedule: str, config: Any, arch: Arch) -> float:
    """What `schedule` with a legal config takes, beyond the launch."""
    device, work = arch.device, _work(problem, schedule, config, arch)
    tensors = [argument for argument in problem.arguments() if len(argument.shape) == 2]
    inputs = sum(not argument.output for argument in tensors)
    nbytes = problem.rows * problem.cols * itemsize(problem)
    again = (work.reads - 1) * (0.5 if nbytes * inputs < (device.l2_bytes or L2_BYTES) / 2 else 1)
    share = min(1.0, work.blocks / device.multiprocessors)
    rate = (device.bandwidth or BANDWIDTH) * 1000 * min(1.0, DRAWN * share)  # bytes a microsecond
    memory = nbytes * (len(tensors) + again * inputs) / rate
    clocks = CLOCK * device.multiprocessors * share / problem.rows
    lines = work.lines * len(tensors) / 2 / clocks
    issued = work.instructions / LANES / clocks
    norm = OVERLAP if work.blocks > device.multiprocessors else 1.0
    together: float = sum(part**norm for part in (memory, lines, issued)) ** (1 / norm)
    return work.alone + DELAY * work.elements + together


def _work(problem: SoftmaxProblem, schedule: str, config: Any, arch: Arch) -> Work:
    row_bytes = problem.cols * itemsize(problem)
    if schedule == "tiles":
        frame, rounds = Frame.of_row(problem, config.access), config.rounds(problem)
        # of shared memory, where neighbouring rows meet in banks
        turned = 2 * frame.most * max(4, config.access) / LINE
        instructions = config.threads * (FIXED + rounds * (frame.pack * ELEMENT + TURN)) + row_bytes / PACK * ACCESS
        elements = rounds * frame.pack
        return Work(problem.rows / config.rows, 2 * (2 * row_bytes / LINE + turned), instructions, elements, 1, BARRIER)
    on_packs = schedule in ("frames", "cluster", "parts")
    frame = Frame.of_row(problem, config.access if on_packs else config.vector * itemsize(problem))
    edges = not frame.aligned
    blocks, threads, reads, alone = float(problem.rows), config.threads, 1, 0.0
    reductions = 1 if problem.is_grad else 2
    if schedule in ("warp", "frames"):
        blocks /= config.groups * config.rows_per_group
    elif schedule == "cluster":
        blocks, threads, alone = blocks * config.cluster, threads * config.cluster, EXCHANGE
    elif schedule in ("split", "parts"):
        parts = config.parts(problem) if schedule == "parts" else config.packing(problem).parts
        alone = OVERLAPPED if schedule == "parts" and "cluster" in arch.features else SECOND
        blocks, threads, reads = blocks * parts, threads * parts, 2
    elif schedule == "block_streaming":
        reads = reductions + 1
    if threads > arch.wave:
        alone += 2 * reductions * BARRIER
    rounds = -(-frame.most // threads)
    run = min(threads, frame.most) * frame.access  # bytes side by side
    lines = 2 * frame.most * frame.access * (1 / LINE + (run < row_bytes or edges) * bool(run % LINE or edges) / run)
    instructions = threads * (
        FIXED + EDGES * edges + rounds * (frame.pack * ELEMENT * (1 + reads) / 2 + reads * ACCESS)
    )
    if schedule == "block_shared":
        lines += (reductions + 2) * row_bytes / LINE
    elements = rounds * frame.pack * (reads if schedule == "block_streaming" else 1)
    return Work(blocks, lines + PARTS * edges, instructions, elements, reads, alone)
