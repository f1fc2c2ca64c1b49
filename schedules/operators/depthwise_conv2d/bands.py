"""Depthwise convolution on tensor cores: a kernel row as a band of a matrix, multiplied by windows in shared memory.

A block brings `images` x `tile_h` rows of outputs' inputs of `channels` channels, whole rows of the image, into shared
memory, with zeros around them.  There `together` channels of a pixel lie side by side, then the pixels of a row, the
rows, and the groups of channels.  8 / `together` neighbouring outputs of such a group, a position, are the eight
columns of ``mma.sync``; the inputs under them along a row are its k, and the filter is a band in the matrix between:
of sixteen inputs a 7x7 kernel uses fourteen where planes are apart, eight pixels of four channels where they are not.
Sixteen positions, of any rows and images, are the rows of a fragment, which ``ldmatrix`` reads as they lie.  A warp has
the bands of one group in registers, and of each position `rows` outputs, one below the other, so that each row of
inputs is read once for all the kernel rows that meet it.

Zeros of the matrix meet data of neighbours, up to seven columns or channels away: an infinity or a NaN there would
make a NaN here, so that a sum that is NaN is made again, product by product (`bands_program`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from schedules.core.arch import Arch, occupancy
from schedules.core.operator import ScheduleSpec, WrittenInTirx
from schedules.core.problem import numpy_dtype
from schedules.core.space import ProductSpace
from schedules.core.tvm import tvm
from schedules.operators.depthwise_conv2d.bands_tile import Bands, BandsConfig
from schedules.operators.depthwise_conv2d.cost import COSTS, SECTOR, Costs, memory, us
from schedules.operators.depthwise_conv2d.definition import DepthwiseProblem

MOST_ROWS = 14  # of a thread that are tried
WASTE = 1.15  # rows computed for one of the output, of tiles that are tried


def _apply(problem: DepthwiseProblem, config: BandsConfig, arch: Arch) -> tvm.IRModule:
    from schedules.operators.depthwise_conv2d.bands_program import program

    return program(problem, config)


def estimate(problem: DepthwiseProblem, config: BandsConfig, arch: Arch, costs: Costs = COSTS) -> float:
    """A block brings its data, multiplies, and stores, one after the other, while others do something else."""
    p, c, b, item = problem, config, Bands(problem, config), numpy_dtype(problem.dtype).itemsize
    high, wide = b.tiles
    busiest = -(-(-(-p.n // c.images) * high * wide) // arch.device.multiprocessors)
    loaded, stored = c.images * c.channels * b.in_rows * p.w, c.images * c.channels * b.out_rows * p.out_w
    moves = (loaded / b.piece * (costs.piece if b.piece > 1 else costs.element) + stored / b.stored * costs.store) / 32
    steps = -(-b.octets // 2)
    products = c.rows * p.kh * steps
    fragment = products + 2 * ((c.rows - 1) * p.stride[0] + p.kh) * steps + 4 * c.rows * costs.result
    bands = p.kh * b.octets * costs.band * (1 if c.together > 1 else 2)
    of_warp = b.groups // c.warps_c * (bands + -(-b.fragments // c.warps_m) * fragment)
    warps = c.warps_c * c.warps_m
    issued = (moves + warps * of_warp) / 4
    run = c.channels if p.channels_last else b.out_rows * p.w * (c.channels if b.whole else 1)
    moved = (loaded + stored) * item * max(1.0, SECTOR / (run * item)) / costs.l2
    multiplied = b.groups * b.fragments * products * costs.multiply
    resident = max(1, occupancy(arch, c.threads, b.registers, b.shared_bytes)[0])
    turns = -(-busiest // resident)
    waited = turns * (costs.block + costs.chain * (of_warp + moves / warps))
    return us(costs, busiest * issued, busiest * moved, busiest * multiplied, memory(p, arch, costs), waited)


@lru_cache
def default(problem: DepthwiseProblem, arch: Arch) -> BandsConfig:
    """The config that takes least by the estimate; where none is legal, one that says why."""
    legal = (config for config in space(problem, arch) if config.check(problem, arch) is None)
    return min(legal, key=lambda config: estimate(problem, config, arch), default=BandsConfig())


def space(problem: DepthwiseProblem, arch: Arch) -> Sequence[BandsConfig]:
    p = problem
    rows = [t for t in range(1, MOST_ROWS + 1) if -(-p.out_h // t) * t <= p.out_h * WASTE or t == 1][-5:]
    tiles = [
        dict(rows=t, tile_h=tall, images=images)
        for t in rows
        for tall in sorted({t * j for j in (1, 2, 4, -(-p.out_h // t)) if t * j < p.out_h + t})
        for images in ((1, 2, 4, 8, 16) if tall >= p.out_h else (1,))
        if images < 2 * p.n
    ]
    together = [b for b in (2, 4, 8) if p.ci % b == 0] if p.channels_last else []
    parts = [  # a warp has one group, whose bands are on their way while data are
        dict(together=b, channels=b * count, warps_c=count, warps_m=m)
        for b in together or [1]
        for count in (1, 2, 4, 8, 16)
        for m in (1, 2, 4)
        if 4 <= count * m <= 16 and 8 <= b * count <= 64 and b * count < max(16, 2 * p.ci)
    ]
    return ProductSpace(BandsConfig, tiles, parts)


SCHEDULE = ScheduleSpec(
    name="bands",
    summary="kernel rows as bands of matrices on tensor cores: ldmatrix, mma.sync, rows of inputs read once",
    kinds=("cuda",),
    config=BandsConfig,
    apply=_apply,
    default=default,
    space=space,
    ranges=True,
    tirx=WrittenInTirx(
        reason="a matrix of a kernel row's taps is made in registers, and windows are read at addresses of each lane; "
        "the schedule language tensorizes operands that are tensors",
        siblings=("windows",),
    ),
)
