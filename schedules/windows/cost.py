"""How long a config takes, estimated: by it the default is chosen."""

from __future__ import annotations

import math

from schedules.core.arch import Arch
from schedules.core.problem import numpy_dtype
from schedules.windows.geometry import OCTET, Windows

# of a multiprocessor's clocks, about
MULTIPLY = 1.6  # for a mma.sync
BANDWIDTH = 17.0  # bytes of the output in a clock
L2_BANDWIDTH = 34.0  # bytes of patches
LATENCY = 1500.0  # from a patch's loads to the last store, beside what is busy
BEGIN = 4000.0  # of a block, until its filters are there


def clocks(w: Windows, arch: Arch) -> float:
    """Clocks of a multiprocessor, about."""
    p, c = w.problem, w.config
    warps, pixels = c.threads // 32, c.tile_h * c.tile_w
    octets = w.pixel_octets * w.weight_octets
    multiply = pixels * c.block_n * w.steps / 128 * MULTIPLY
    shared = warps * w.steps * 2 * (w.pixel_octets + w.weight_octets)
    written = pixels * c.block_n * numpy_dtype(p.epilogue.out_dtype).itemsize
    loaded = math.prod(w.patch) * p.ci * w.item
    elements = loaded / w.item
    if w.vector:
        fetch = loaded / w.vector * 8
    else:  # through registers
        fetch = elements * 2 + elements / (w.pixels * p.ci) * 24 if w.pixels > 1 else elements * 24
    issue = warps * w.steps * (2 * w.pixel_octets + w.weight_octets + octets / 2) / 4
    issue += warps * octets * 6 / 4 + fetch / 32 / 4
    busy = max(multiply, shared, issue, written / BANDWIDTH + loaded / L2_BANDWIDTH)
    blocks = w.rows * w.columns
    together = min(c.blocks_sm, -(-blocks // arch.device.multiprocessors))
    turns = -(-math.prod(w.tiles) // w.rows) * -(-blocks // (arch.device.multiprocessors * c.blocks_sm))
    return turns * max(together * busy, LATENCY + busy + w.steps * 2 * OCTET) + BEGIN + w.weight_words * 4 / 8
