"""What a device has to do for a config, in microseconds: the same few parts for every schedule.

A multiprocessor multiplies, fetches its tiles from L2, waits for what it fetched, and writes results; memory gives the
tensors once; a launch takes a while whatever it does.  The parts overlap as in `hopper.cost`.  All of it is in units of
the device (`core.device`), so that what was learned on one of an arch serves the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from schedules.core.arch import ARCHES, Arch
from schedules.core.operator import Array, ScheduleSpec
from schedules.core.problem import numpy_dtype
from schedules.hopper.config import SUM_BYTES, WARPGROUP
from schedules.hopper.cost import COPIED, NARROW, STARTED
from schedules.predict.configs import FILLED, Columns

LAUNCH = 4.5  # us of a graph with one short kernel
FILL = 1.2  # us until a block's first product, and after its last
FETCHED = 10.0  # vectors that a multiprocessor's threads load in a nanosecond, about
WORD = 4  # bytes
NORM = 2.5  # of the parts that overlap
OTHERS = 40  # registers of a thread beside its sums, about
SPILLED = 25.0  # bytes of registers that a multiprocessor writes and reads in a nanosecond
WARP = 32
SECTOR = 32  # bytes of L2
# ns that a multiprocessor takes for a sector that it writes in part, which memory is read for; and results of a plane,
# of fewer the sectors' other parts are of channels that are stored with it: fitted to the H200's trials of 2026-11-30
END, LONG = 4.0, 24
PARTIAL = 0.3  # ns for an element that is stored alone, and not a whole sector by four lanes
ROW = 64  # elements of a row of a box of TMA at most
IMAGES = 16  # of a pixel, whose multiples copies have
BUSY = 8  # warps that keep a multiprocessor's arithmetic busy where threads multiply; of fewer each waits for its own


@dataclass(frozen=True)
class Work:
    """An estimate: parts in us, and the shape of the launch."""

    parts: dict[str, Array]  # multiply, l2, memory, latency, finish, ends, launch
    tiles: Array
    waves: Array  # of blocks, not rounded
    resident: Array  # blocks of a multiprocessor
    warps: Array  # that a multiprocessor has at once
    steps: Array  # of the reduction, of one block
    used: Array  # share of the products that are of the problem

    @property
    def total(self) -> Array:
        overlapping = ("multiply", "l2", "fetch", "memory", "latency")
        together: Array = sum(self.parts[name] ** NORM for name in overlapping) ** (1 / NORM)  # type: ignore[assignment]
        return together + sum(self.parts[name] for name in ("spill", "finish", "ends", "launch", "copies"))

    def take(self, rows: Array) -> Work:
        """Those of some rows."""
        parts = {name: part[rows] for name, part in self.parts.items()}
        others = (self.tiles, self.waves, self.resident, self.warps, self.steps, self.used)
        return Work(parts, *(values[rows] for values in others))

    def limit(self, row: int) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: float(self.parts[name][row]))


def peak(arch: Arch, name: str) -> float:
    """Tera-operations in a second of the arithmetic `name`; of a device that nobody measured, those of the arch's own
    for as many multiprocessors."""
    device, own = arch.device, ARCHES[str(arch)].device
    if name in device.peaks:
        return device.peaks[name]
    return own.peaks.get(name, 60.0) * device.multiprocessors / own.multiprocessors


def operand_bytes(problem: Any, spec: ScheduleSpec) -> int:
    """Bytes of an element of an operand, or of all of its addends."""
    made = spec.arithmetic
    return numpy_dtype(made.of).itemsize * made.addends if made.addends > 1 else numpy_dtype(problem.dtype).itemsize


def work(problem: Any, spec: ScheduleSpec, columns: Columns, arch: Arch) -> Work:
    """The estimate for each row of `columns`."""
    p, device = problem.folded if spec.folded else problem, arch.device
    item = operand_bytes(p, spec)
    matrix = "block_n" in columns.fields
    tile_m, tile_n = tile_of(columns)
    lines, kernel_rows, looked_at = lines_of(p, columns)
    multiplied, tile_n = tile_n, tile_n * lines
    pixel, channel = (tile_n, tile_m) if spec.channels_along_rows else (tile_m, tile_n)
    if getattr(spec.config, "thins", False):
        pixel = pixel / p.stride[1]
    reached = pixel
    if "whole_sectors" in columns.fields:  # tiles have as many whole images as fit, or overlap in one
        plane = p.out_h * p.out_w
        shared = SECTOR // numpy_dtype(p.dtype).itemsize  # by a tile and the next
        of_image = np.ceil(np.maximum(plane - shared, 1) / np.maximum(pixel - shared, 1))
        whole = np.where(pixel < plane, plane / of_image, pixel // plane * plane)
        pixel = np.where(columns.get("whole_sectors") > 0, whole, pixel)
    # images of a pixel fill a tile's side, or, by TMA, those of a few pixels
    by_tma = FILLED in columns.fields
    apart = p.output_axes[-1] == "n" and not by_tma and "tile_h" not in columns.fields
    runs, run = (p.out_h * p.out_w, p.n) if apart else (1, p.pixels)
    # a tile's row is a tile of as many outputs along an image's row, and its points are the taps: `hopper.winograd`
    in_tiles = "tile_w" in columns.fields and "tile_h" not in columns.fields
    outputs = columns.get("tile_w") if in_tiles else 1
    if in_tiles:
        run = p.n * p.out_h * np.ceil(p.out_w / outputs)
    along, across = np.ceil(run / pixel), np.ceil(p.co / channel)
    if "tile_h" in columns.fields:  # tiles do not reach over the end of a row, nor into the next image
        along = p.n * np.ceil(p.out_h / columns.get("tile_h")) * np.ceil(p.out_w / columns.get("tile_w"))
    if spec.boxes is not None:
        along = _boxes(p, spec, pixel, columns, along)
    tiles = runs * along * across
    split, taps, channels = columns.get("split_k", 1.0), p.kh * (outputs + p.kw - 1), p.ci
    of_cluster = split if FILLED in columns.fields else 1.0  # else another kernel adds up what parts leave in memory
    block_k = columns.get("block_k" if matrix else "step", 8.0)
    if "channels_per_stage" in columns.fields:
        block_k = columns.get("channels_per_stage")
        block_k = np.where(block_k == 0, channels, block_k) * 1.0
    if matrix and "block_k" not in columns.fields:  # a row of the kernel at once
        taps, channels = p.kh, p.kw * p.ci
        block_k = np.full(columns.count, -(-channels // 16) * 16.0)
    as_they_lie = (columns.get("turned", 0.0) == 0) & (columns.get("window", 0.0) == 0)
    phases = np.where(as_they_lie, spec.phases(p), 1) if spec.phases is not None else np.ones(columns.count)
    taps, channels = taps * phases, channels / phases
    one = np.zeros(columns.count, bool)
    if spec.joined is not None:
        one = one | spec.joined(p, block_k)
        taps, channels = np.where(one, 1, taps), np.where(one, taps * channels, channels)
    steps = np.maximum(1.0, taps * np.ceil(channels / block_k) / split)
    stages = columns.get("num_stages", 0.0) + columns.get("stages", 0.0)
    threads = threads_of(columns)
    resident = _resident(columns, threads, tile_m, tile_n, block_k, stages, item, arch)
    m, n = columns.get("cluster_m", 1.0), columns.get("cluster_n", 1.0)
    held = np.full(columns.count, float(device.multiprocessors))
    for size in np.unique(m * n * of_cluster):
        held = np.where(m * n * of_cluster == size, device.resident(max(1, int(size))), held)
    units = tiles * split
    waves = units / (held * resident)
    turns = np.ceil(waves)
    products = tile_m * tile_n * block_k * steps
    dtype = (spec.arithmetic.of or p.dtype) if matrix else "float32"
    rate = peak(arch, dtype) / spec.arithmetic.products
    share = rate * 1e6 / 2 / device.multiprocessors  # multiply-adds in a microsecond
    busy = np.minimum(resident, np.ceil(units / device.multiprocessors))
    multiply = turns * busy * products / share
    warps = busy * np.ceil(threads / WARP)
    if FILLED in columns.fields:  # products of few columns wait for shared memory
        rows = getattr(spec.config, "row_cycles", 16)
        multiply *= np.maximum(1.0, (rows + multiplied / columns.get("cta_group", 1.0) / 4) / (multiplied / 2))
    if not matrix:  # lanes that a warp lacks are idle
        multiply *= np.maximum(1.0, BUSY / warps) * np.ceil(threads / WARP) * WARP / threads
    real = channels / (np.ceil(channels / block_k) * block_k)  # of a step's channels; zeros are not loaded
    loaded = (tile_m / n + tile_n * looked_at / m) * block_k * real * steps * item
    if spec.turned is not None:
        found = by_pairs(partial(spec.turned, p), tile_m, block_k)
        loaded = (found[:, 1] / taps + tile_n / m * item) * block_k * real * steps
    loaded = loaded + tile_m * tile_n * item * len(p.epilogue.of_axis("element"))
    given = np.full(columns.count, device.timings.loaded)
    if FILLED in columns.fields and p.output_axes[-1] == "n":  # rows of boxes: images, or channels
        row = np.where(columns.get("turned", 0.0) > 0, np.minimum(block_k, ROW), min(-(-p.n // 16) * 16, ROW)) * item
        given = np.minimum(given, device.timings.loaded_narrow * row / NARROW)
        given = np.where(phases > 1, given * row / (row + 2 * SECTOR), given)  # rows begin within sectors
    l2 = turns * busy * loaded / (given * 1000)
    # what threads load, and not TMA, they load in vectors as long as lie in one
    data, filters = _vectors(p, spec, one, 16 // item)
    vectors = (pixel / data + channel / filters) * block_k * (FILLED not in columns.fields)
    fetch = turns * busy * vectors * real * steps / FETCHED / 1000
    # sums and what they are made of that do not fit into the registers that so many blocks leave: out and in again
    least = np.maximum(1.0, columns.get("min_blocks", 1.0))
    bound = np.minimum(arch.registers_thread, arch.registers_sm / (least * np.ceil(threads / WARP) * WARP))
    needed = tile_m * tile_n / threads + OTHERS + vectors / threads  # each vector has its address
    lacking = np.maximum(0.0, needed - bound) * (FILLED not in columns.fields)
    spill = turns * busy * threads * lacking * 8 * steps * np.ceil(block_k / 16) / SPILLED / 1000
    latency = turns * steps / kernel_rows * device.timings.latency / 1000 / np.maximum(1.0, stages - 1)
    finish = turns * busy * tile_m * tile_n * device.timings.finish / 1000 / np.minimum(of_cluster, 2) / 2 + FILL
    finish = finish * outputs + (of_cluster > 1) * turns * device.timings.exchange / 1000  # of each tile
    moves = phases - 1 + columns.get("phases", 0.0) * (p.kw - 1)  # of all sums
    finish = finish + turns * busy * tile_m * tile_n * moves * device.timings.moved / 1000
    if "tile_h" in columns.fields and p.output_axes[-1] == "x":  # sums leave as they lie, in parts of sectors
        stored = math.gcd(SECTOR // 4 // item, p.out_w)
        finish = finish + (4 * stored * item < SECTOR) * turns * busy * tile_m * tile_n * PARTIAL / stored / 1000
    copied = columns.get("gathered", 0.0) * 2.0 * p.pixels * p.ci * p.kh * p.kw  # elements, by a kernel before
    copied = copied + columns.get("turned", 0.0) * 2.0 * p.n * p.h * p.w * p.ci
    if by_tma and p.output_axes[-1] == "n" and p.n % (16 // item):  # or with more images, since TMA wants whole vectors
        padded = (p.n + -(-p.n // IMAGES) * IMAGES) * p.h * p.w * p.ci
        copied = np.where((copied > 0) | (phases > 1), copied, padded)
    copied = copied + (split > of_cluster) * 2.0 * split * p.pixels * p.co * SUM_BYTES / item
    ones = np.ones(columns.count)
    parted = not getattr(spec.config, "whole_images", False)
    # blocks that share a tile's reduction store a part of its channels each
    ends = parted * _ends(p, columns, reached, pixel) * channel / of_cluster * turns * busy * END / 1000
    parts = {
        "multiply": multiply,
        "l2": l2,
        "fetch": fetch,
        "memory": ones * p.min_bytes / ((device.bandwidth or 1000) * 1e3),
        "latency": latency,
        "spill": spill,
        "finish": finish,
        "ends": ends * ones,
        "launch": ones * LAUNCH,
        "copies": np.where(copied > 0, STARTED + copied * item / COPIED / 1000, 0.0),
    }
    used = (run / (along * pixel)) * (p.co / (across * channel)) * real
    return Work(parts, tiles * ones, waves, resident * ones, warps, steps * ones, used * ones)


def _ends(p: Any, columns: Columns, reached: Array, pixel: Array) -> Array | float:
    """Sectors that a tile of `reached` pixels, `pixel` of which are its own, writes in part of each output channel:
    where its runs of pixels begin and end, which a consumer stores for itself.  Of planes of a part of a sector's
    length some begin with one."""
    plane, sector = p.out_h * p.out_w, SECTOR // numpy_dtype(p.dtype).itemsize
    if FILLED not in columns.fields or p.output_axes[-1] != "x":
        return 0.0
    within = (1 - math.gcd(plane, sector) / sector) * min(1.0, plane / LONG)  # of sectors
    parts = np.where(columns.get("ping_pong", 0.0) > 0, 1.0, columns.get("consumers", 1.0))
    apart = 2 * (reached / plane + parts)
    joined = np.where(pixel < plane, 2 * pixel / plane, 0.0)
    return within * np.where(columns.get("whole_sectors", 0.0) > 0, joined, apart)


def by_pairs(of: Callable[[int, int], tuple[int, int] | int | None], first: Array, second: Array) -> Array:
    """What `of` says of each row of both columns, a number or two as two columns, infinity where that is None; of equal
    rows once."""
    rows, number = distinct(first, second)
    found = (of(a, b) for a, b in rows)
    return np.array([(math.inf, math.inf) if each is None else each for each in found])[number]


def distinct(*columns: Array) -> tuple[list[tuple[int, ...]], Array]:
    """The rows of `columns` of small whole numbers, each once, and the number of each row among them."""
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    kind = np.ravel_multi_index([column.astype(np.intp) for column in columns], sizes)
    found = np.flatnonzero(np.bincount(kind))
    number = np.zeros(math.prod(sizes), np.intp)
    number[found] = np.arange(len(found))
    rows = zip(*(axis.tolist() for axis in np.unravel_index(found, sizes)), strict=True)
    return list(rows), number[kind]


def _boxes(p: Any, spec: ScheduleSpec, pixels: Array, columns: Columns, along: Array) -> Array:
    """`along` as the boxes of so many `pixels` make it, of clusters with blocks side by side along them."""
    assert spec.boxes is not None
    turned, lines, blocks = (
        columns.get("turned", 0.0),
        columns.get("lines", 1.0),
        columns.get("cluster_n" if spec.channels_along_rows else "cluster_m", 1.0),
    )
    rows, number = distinct(pixels / lines, blocks, turned, lines)
    counts = [
        spec.boxes(p, size, beside, bool(inside), **({"lines": of_tile} if of_tile > 1 else {})) or np.nan
        for size, beside, inside, of_tile in rows
    ]
    found = np.array(counts)[number]
    return np.where(np.isnan(found), along, found)


def _vectors(p: Any, spec: ScheduleSpec, joined: Array, most: int) -> tuple[Array | int, Array | int]:
    """Elements of data and of filters that a thread loads at once, where steps of taps and channels as one axis are
    `joined`."""
    data, filters = (math.gcd(most, p.extents[axes[-1]]) for axes in (p.data_axes, p.filter_axes))
    if p.data_axes[-1] == "ci":
        return np.where(joined, 1, data), filters
    if p.data_axes[-1] == "w" and spec.joined is not None:  # taps shift pixels off every alignment
        plain = (p.kh, p.kw, p.stride, p.pad) == (1, 1, (1, 1), (0, 0))
        data = data if plain else 1
        filters = math.gcd(most, p.ci * p.kh * p.kw) if p.filter_axes[-1] == "kw" else filters
    return data, filters


def waiting(problem: Any, spec: ScheduleSpec, columns: Columns) -> Array:
    """Elements of a step that a thread of a TE kernel loads one by one, as they are less than the word that an
    asynchronous copy moves: they wait in its registers while those of the step before are multiplied."""
    p, item = problem.folded if spec.folded else problem, operand_bytes(problem, spec)
    (m, n), block_k = tile_of(columns), columns.get("block_k")
    pixel, channel = (n, m) if spec.channels_along_rows else (m, n)
    joined = spec.joined(p, block_k) if spec.joined is not None else np.zeros(columns.count, bool)
    data, filters = _vectors(p, spec, joined, 16 // item)
    several = np.where(joined, p.kh * p.kw * p.ci > block_k, (p.kh * p.kw > 1) | (p.ci > block_k))
    single = (data * item < WORD) * pixel + (filters * item < WORD) * channel
    found: Array = several * single * block_k / threads_of(columns)
    return found


def lines_of(problem: Any, columns: Columns) -> tuple[Array, Array, Array]:
    """Lines of pixels of a tile that are products of their own; kernel rows that a stage then has, and the lines that
    it has for them by those that it would have row by row."""
    p, lines = problem, columns.get("lines", 1.0)
    rows = np.where(lines > 1, p.kh, 1.0)
    return lines, rows, ((lines - 1) * p.stride[0] + (rows - 1) * p.dilation[0] + 1) / (lines * rows) ** (lines > 1)


def tile_of(columns: Columns) -> tuple[Array, Array]:
    """Rows and columns of the output that a block computes."""
    known = columns.fields
    if "block_m" in known:
        return known["block_m"], known["block_n"]
    if "tile_h" in known:
        return known["tile_h"] * known["tile_w"], known["block_n"]
    if "tile_m" in known:  # of a warp's threads, eight by four
        return known["tile_m"] * columns.get("warps_m", 1.0) * 8, known["tile_n"] * columns.get("warps_n", 1.0) * 4
    if "filters" in known:  # of a thread that has no others; pixels of an image
        return known["block.0"] * known["block.1"], known["filters"]
    if "tile.0" in known and "num_thread.0" in known:
        return known["tile.0"] * known["num_thread.0"], known["tile.1"] * known["num_thread.1"]
    return columns.get("block.0", 64.0), columns.get("block.1", 64.0)


def threads_of(columns: Columns) -> Array:
    """Threads of a block."""
    known = columns.fields
    if "consumers" in known:
        return WARPGROUP * (known["consumers"] + (columns.get("pairs", 1.0) + 1) // 2)
    if "warps_m" in known:
        return WARP * known["warps_m"] * columns.get("warps_n", 1.0)
    if "block_m" in known:  # warpgroups, which have 64 rows each
        return 2 * known["block_m"]
    if "num_thread.0" in known:
        return known["num_thread.0"] * known["num_thread.1"]
    each = "pixels" if "pixels.0" in known else "tile"  # outputs of a thread
    return np.maximum(1.0, math.prod(known[f"block.{i}"] / columns.get(f"{each}.{i}", 8.0) for i in (0, 1)))


def _resident(
    columns: Columns, threads: Array, tile_m: Array, tile_n: Array, block_k: Array, stages: Array, item: int, arch: Arch
) -> Array:
    """Blocks that a multiprocessor holds."""
    if "blocks_sm" in columns.fields:
        return columns.get("blocks_sm")
    shared = np.maximum(np.maximum(stages, 1) * (tile_m + tile_n) * block_k, tile_m * tile_n) * item
    least = np.maximum(1.0, columns.get("min_blocks", 1.0))
    registers = np.minimum(tile_m * tile_n / threads * 1.3 + 60, arch.registers_thread)
    by_registers = np.maximum(np.floor(arch.registers_sm / (registers * threads)), least)
    by_shared = np.floor(arch.shared_sm / (shared + arch.shared_reserved))
    found: Array = np.maximum(1.0, np.minimum(np.minimum(by_registers, by_shared), np.floor(arch.threads_sm / threads)))
    return found
