"""About how long a Hopper kernel takes on a device: what its configs are ranked by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from schedules.core.arch import Arch
from schedules.core.device import Device, Timings
from schedules.hopper.boxes import TurnedData
from schedules.hopper.config import K_BYTES, ROWS, HopperConfig, work_of
from schedules.hopper.geometry import Operand, Work
from schedules.hopper.images import Images
from schedules.hopper.lines import Lines
from schedules.hopper.spans import Spans

NARROW = 32  # bytes of a row of a box, of which TMA loads no more than `Timings.loaded_narrow`; and of a sector

TURNED = 64.0  # bytes that the producer's threads turn in a nanosecond, about
# of a kernel before: microseconds until the next starts, and bytes that it reads or writes in a nanosecond
STARTED, COPIED = 2.0, 2500.0
# cycles for each sum that a thread adds, and as many sums as it could in what passes from a stage's last product to
# the next one's first; bytes that shared memory takes in in a cycle
PROMOTED, ADDED, SHARED = 2.5, 200, 128

W = TypeVar("W", bound=Work)


def product_cycles(config: HopperConfig, rows: float = 0) -> float:
    """Of a product of ROWS rows: half of one for each column, unless shared memory takes longer to give its operands,
    of b a block's part, and `rows` of it more for operand a."""
    return max(config.block_n / 2, config.row_cycles + rows + config.held_n / 4)


def _row_cycles(operand: Operand) -> float:
    """Cycles that shared memory takes longer for operand a of a wgmma than for 128 bytes in each: of lines and
    images it gives a word, or half of one, to each thread, after it has taken them in."""
    if not isinstance(operand.source, Lines | Images):
        return 0
    return 4 * (4 if operand.source.paired else 8)


def _rate(operand: Operand, timings: Timings) -> float:
    """Bytes of an operand that a multiprocessor gets from L2 in a nanosecond."""
    if isinstance(operand.source, Spans | TurnedData):
        return min(timings.loaded, TURNED)
    if isinstance(operand.source, Lines | Images):
        return timings.loaded
    line = operand.tile.swizzle
    rate = timings.loaded_narrow if line <= NARROW else timings.loaded
    # L2 reads whole sectors, of which a line that begins within one has parts too much
    apart = any(stride % NARROW for stride in operand.source.strides)
    return rate * line / (line + 2 * NARROW) if apart else rate


def rounds(config: HopperConfig, clusters: int, device: Device) -> int:
    """Tiles of the busiest block of `device`, of `clusters` tiles of a whole cluster."""
    return -(-clusters // max(1, device.resident(config.cluster) * config.blocks_sm // config.cluster))


def microseconds(work: Work, device: Device) -> float:
    """About how long the kernel takes on `device`, to compare configs by.

    A multiprocessor multiplies, all of them load from L2, and a stage is loaded, takes a while to arrive, however
    small, and is multiplied before its memory is free: the three overlap the better the more the longest of them stands
    out (a norm), and each tile's results are finished after it.  `Timings` says what the constants were fitted to.
    What `split_k` costs and what `ping_pong` and `stationary` save are estimates, and all of it for Blackwell.
    """
    config, stages, t = work.config, work.mean_taps * work.chunks, device.timings
    nbytes = work.a.tile.k * work.a.tile.item * len(work.products)
    waves = rounds(config, work.clusters, device)
    own = math.ceil(stages / config.split_k)
    cycles = product_cycles(config, _row_cycles(work.a)) * t.cycle
    multiply = waves * own * config.blocks_sm * config.block_m / ROWS * nbytes / K_BYTES * cycles
    if work.outputs > 1:
        # a consumer adds its sums to each while others multiply, but not while it does; and shared memory gives wgmma
        # its operands while it takes in those of other stages
        promoted = PROMOTED * (work.outputs * config.accumulators / work.together + ADDED)
        alone = multiply / (config.consumers * config.blocks_sm) + waves * own * promoted * t.cycle
        given = multiply / product_cycles(config) * (config.row_cycles + config.held_n / 4)
        taken = waves * own * config.blocks_sm * (work.a.loaded + work.b.loaded) / SHARED * t.cycle
        multiply = max(multiply, alone, given + taken)
    used = waves if config.stationary else 1  # times that operand b is, once loaded
    each = work.a.loaded / config.cluster_n / _rate(work.a, t)
    each += work.b.loaded / config.cluster_m / used / _rate(work.b, t)
    load = work.clusters * config.cluster / device.multiprocessors * own * each
    if work.added:
        load += waves * config.parts * work.added.nbytes / t.loaded
    # a stage is loaded, arrives and is multiplied before it is loaded again
    turn = (multiply + load + waves * own * t.latency) / config.num_stages
    results = config.block_m * config.block_n * work.leaving
    finish = results * t.finish / min(config.split_k, config.consumers)
    if work.shifts:
        finish += results * (work.shifts.phases - 1) * t.moved
    if config.split_k > 1:
        finish += t.exchange + results * t.sent * (config.split_k - 1) / config.split_k
    overlapped = sum(part**t.overlap for part in (multiply, load, turn)) ** (1 / t.overlap)
    if config.overlaps:
        alone = finish * config.consumers / config.parts
        return max(overlapped + alone, waves * finish) / 1000
    return (overlapped + waves * finish) / 1000


def before(work: Work) -> float:
    """About how many microseconds the kernel before takes, which fills the workspace."""
    copied = 2 * sum(argument.nbytes for argument in work.workspace)
    return STARTED + copied / COPIED / 1000 if copied else 0.0


def estimate_of(estimate: Callable[[Any, Device], float] = microseconds) -> Callable[[Any, Any, Arch], float]:
    """A schedule's `estimate`, of the work of a problem and a legal config."""

    def time(problem: Any, config: HopperConfig, arch: Arch) -> float:
        work = work_of(problem, config)
        assert work is not None  # legal
        return before(work) + estimate(work, arch.device)

    return time
