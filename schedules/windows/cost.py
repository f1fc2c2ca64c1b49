"""How long a config takes, estimated: by it configs are ranked.

Constants are fitted to 230 trials of 21 first layers on an H200 (spread of the error 17%; of the configs tried the one
chosen is 3% slower than the best).
"""

from __future__ import annotations

import math

from schedules.core.arch import Arch
from schedules.core.problem import numpy_dtype
from schedules.windows.geometry import Windows

# clocks of a multiprocessor
MULTIPLY = 1.8  # for a mma.sync
FINISH = 6.7  # for an 8 x 8 block of sums on its way out, of each of four schedulers
WRITTEN, LOADED = 0.037, 0.013  # for a byte
COPY, ELEMENT, GATHERED = 12.0, 17.0, 7.0  # for 32 vectors, 32 elements one by one, 32 elements in vectors
LATENCY = 1340.0  # from a patch's copies to its use
BEGIN = 10400.0  # of a launch
FILTER = 48.0  # for an element of the filters of a thread
OVERLAP = 1.37  # the norm's exponent: 1 if nothing overlapped, infinite if everything did
NARROW = 0.5  # of the bytes that stores of less than 16 leave unused is felt
PARTIAL = 0.6  # for a store along a row that leaves sectors of L2 unfinished: four lanes' are less than one
SECTOR = 32  # bytes


def _norm(*parts: float) -> float:
    return float(sum(part**OVERLAP for part in parts) ** (1 / OVERLAP))


def clocks(w: Windows, arch: Arch) -> float:
    """Clocks of a multiprocessor, about."""
    p, c, multiprocessors = w.problem, w.config, arch.device.multiprocessors
    warps, pixels, steps = c.threads // 32, c.tile_h * c.tile_w, w.steps
    octets = w.pixel_octets * w.weight_octets
    item = numpy_dtype(p.epilogue.out_dtype).itemsize
    loaded = math.prod(w.patch) * w.elements * w.item
    fetch = loaded / w.item * (GATHERED if w.pixels > 1 else ELEMENT)
    if w.vector:
        fetch = loaded / w.vector * COPY
    step = 2 * w.pixel_octets + w.weight_octets + octets / 2  # instructions
    unused = max(0.0, 16 / (2 * w.run * item) - 1)
    stored = math.gcd(2 * w.run, p.out_w)
    partial = 0 if w.channels_last or 4 * stored * item >= SECTOR else PARTIAL / stored
    busy = _norm(
        pixels * c.block_n * steps / 128 * MULTIPLY,
        warps * steps * 2 * (w.pixel_octets + w.weight_octets),
        warps * (steps * step + octets * FINISH) / 4 + fetch / 32,
        pixels * c.block_n * (item * WRITTEN * (1 + NARROW * unused) + partial) + loaded * LOADED,
    )
    blocks = w.rows * w.columns
    together = min(c.blocks_sm, -(-blocks // multiprocessors))
    turns = -(-math.prod(w.tiles) // w.rows) * -(-blocks // (multiprocessors * c.blocks_sm))
    filters = p.kh * p.kw * p.ci * c.block_n / c.threads * FILTER * math.sqrt(together)
    return turns * _norm(together * busy, LATENCY + steps * step) + BEGIN + filters
