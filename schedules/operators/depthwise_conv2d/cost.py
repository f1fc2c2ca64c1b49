"""How long a config takes, estimated: the schedules' defaults, and the choice between them, are what takes least.

`scripts/fit_depthwise.py` fits the constants to the trials kept in ``tuning_logs/nvidia-h200/depthwise_conv2d``.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.core.arch import Arch
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem

LINE, SECTOR = 128, 32  # bytes that the first-level cache reads in a clock, that memory gives at least


@dataclass(frozen=True)
class Costs:
    """Clocks of a multiprocessor and instructions of a warp, if nothing else is said.

    Fitted to 1,224 trials of 114 layers on an H200: of a layer's trials the one chosen takes 7% longer than the best.
    """

    clock: float = 1.7  # GHz
    reached: float = 1.57  # of the memory's bandwidth, beside what else a kernel does
    overlap: float = 1.4  # the norm's exponent: 1 if nothing overlapped, infinite if everything did
    launch: float = 1690.0  # clocks of a launch
    chain: float = 2.39  # clocks from an instruction of a warp to its next
    # of `windows`
    fetch: float = 1.24  # for a load with its tests
    rest: float = 5.13  # for what else a thread does
    latency: float = 687.0  # clocks from loads to their use
    farther: float = 2.05  # of a byte from memory, for one from the second-level cache
    cached: float = 0.7  # clocks of a line
    # of `bands`
    block: float = 1240.0  # clocks of a block that wait for memory, three times
    piece: float = 47.2  # for a piece of data
    element: float = 43.0  # for an element that passes through registers
    store: float = 13.7  # for a vector of results
    multiply: float = 1.61  # clocks of a product of 16 x 8 x 16, of four schedulers
    result: float = 6.16  # for a lane's result
    band: float = 6.21  # for a word of the bands
    l2: float = 18.4  # bytes that a multiprocessor has of the second-level cache in a clock


COSTS = Costs()


def us(costs: Costs, *parts: float) -> float:
    """Microseconds of a kernel whose `parts`, in clocks, overlap as `costs` say."""
    clocks = costs.launch + sum(part**costs.overlap for part in parts) ** (1 / costs.overlap)
    return clocks / costs.clock / 1000


def memory(problem: DepthwiseProblem, arch: Arch, costs: Costs, more: float = 0.0) -> float:
    """Clocks in which memory moves the tensors, and `more` bytes."""
    bandwidth = costs.reached * (arch.device.bandwidth or 2000)
    return (problem.min_bytes + more) / bandwidth * costs.clock
