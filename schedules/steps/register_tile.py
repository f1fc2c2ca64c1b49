"""Register tiles of sums on a CPU: the inner loops of a convolution, what they cost, and who computes which.

A tile is `broadcasts` rows of `vectors` vectors.  A step of the reduction loads the vectors of one operand, broadcasts
an element of the other for each row, and multiplies and adds; the sums stay in registers until the reduction is done.
After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from schedules.core.arch import Arch, VectorUnit, vector_unit
from schedules.core.cpu import KIB, beyond_caches, last_level_cache, second_level_cache
from schedules.core.problem import Config, Conv2dProblem, numpy_dtype
from schedules.core.tvm import LoopRV, SBlockRV, Schedule, tvm
from schedules.lowering.annotations import STREAM

C = TypeVar("C", bound="Config")
T = TypeVar("T", bound="TileConfig")
LINE = 64  # bytes of a cache line
MOST_SUMS = 1024
CACHED = 3 / 4  # of a core's second-level cache: what finds there the data of a task, or the filters of a tile, again
FARTHER = 10  # a task that keeps as much takes longer by this part of its time than one that keeps little
WAYS, WAY = 8, 4 * KIB  # of the nearest cache: ways, and bytes of each
PIPE = 8  # lanes, at most, of one of the two pipes that multiply and add, as tiles are compared
LATENCY = 4  # cycles from a multiply-add to the next of the same sum
CROSSING = 1.5  # times a load costs whose vectors seldom begin with a cache line
FETCHED, LITTLE = 64, 1 / 4  # cycles of a line from memory, where all cores fetch; a share of the last cache
COPIED, STREAMED, STREAMED_BEYOND = 2, 3, 1  # elements that a core copies in a cycle, reads from afar, and from memory
MULTIPLIED = 0.78  # of what a tile's steps and way out are said to take
ACROSS = 1.2  # times that takes with vectors of pixels, which cross lines, where pipes are wider than PIPE
# of its time, and cycles, that tasks of several images have to save: a kernel of tasks of one takes any number of them
SAVED, LEAST_SAVED = 1 / 20, 30_000
LOOP, STORED, STARTED = 1, 4, 3000  # cycles of a loop's step, of a vector's way out, of a task's start
# of an element that is copied apart in vectors, by the task that reads it or out of a cache, and alone
PACKED, PACKED_NEAR, PACKED_ALONE = 2.5, 1.0, 5.0
SEGMENT = 2.0  # and of each row of the output to which some of a tile go, beside those of its vectors


@dataclass(frozen=True)
class TileConfig(Config):
    """What the schedules share: the vector, and how many register tiles a parallel task computes along the columns and
    rows of an image, the output channels and the batch.  Their fields come before those of a subclass."""

    vector: int = 16  # elements of a vector
    tiles_x: int = 1
    tiles_y: int = 1
    chunk: int = 0  # along the output channels; 0: all of them
    tiles_n: int = 1

    @property
    def sums(self) -> int:
        """Vectors of sums in a register tile."""
        raise NotImplementedError

    def check_tile(self, problem: Conv2dProblem, *sizes: str) -> str | None:
        """Why the tile is illegal; `sizes` are further fields that must be at least 1."""
        if self.vector not in (1, 2, 4, 8, 16, 32):
            return f"vector={self.vector} is not a power of two up to 32"
        for name in ("tiles_x", "tiles_y", "tiles_n", *sizes):
            if getattr(self, name) < 1:
                return f"{name}={getattr(self, name)} must be at least 1"
        if self.chunk < 0:
            return f"chunk={self.chunk} must not be negative"
        if self.tiles_n > 1 and problem.n_from:
            return f"tiles_n={self.tiles_n} is for a number of images that is known; use tiles_n=1"
        if self.vector * self.sums > MOST_SUMS:
            fields = " x ".join(f"{name}={getattr(self, name)}" for name in ("vector", *sizes))
            return f"{fields} make a register tile of over {MOST_SUMS} sums"
        return None


@dataclass(frozen=True)
class PanelConfig(TileConfig):
    """Of data with channels last: a register tile is pixels of a row by a panel of output channels."""

    block_lanes: int = 2  # vectors of output channels in a register tile
    block_x: int = 6  # pixels of a row

    @property
    def panel(self) -> int:
        """Output channels of a register tile."""
        return self.vector * self.block_lanes

    @property
    def sums(self) -> int:
        return self.block_x * self.block_lanes


def check_streaming(streaming: str, problem: Conv2dProblem, row: int, panel: int, vector: int) -> str | None:
    """Why an output in rows of `row` elements, of which a register tile has `panel` next to each other, cannot go past
    the caches as `streaming` says."""
    if streaming not in ("no", "stores"):
        return f"streaming={streaming} is not no or stores"
    size = numpy_dtype(problem.arguments()[-1].dtype).itemsize
    if streaming == "stores" and (row % panel or vector * size % LINE):
        return f"streaming={streaming} is for vectors of whole lines of {LINE} bytes, and rows of whole tiles of them"
    return None


def streamed(sch: Schedule, output: SBlockRV, streaming: str, vector: int) -> tvm.IRModule:
    """The program, with the stores of `output` past the caches if `streaming` says so."""
    if streaming == "no":
        return sch.mod
    *_, lane = sch.split(sch.get_loops(output)[-1], [None, vector])
    sch.vectorize(lane)
    return tvm.IRModule({"main": sch.mod["main"].with_attr(STREAM, streaming)})


def past_caches(config: C, problem: Conv2dProblem, arch: Arch, far: bool = False) -> C:
    """`config` with its stores past the caches, where that is legal and the output is more than they hold, or `far`
    from being kept by them.  Where few products make an element, to fetch the lines that it fills would take longer
    than all of them: then an output that leaves the last cache little room for others goes past it too."""
    p, output, past = problem, problem.arguments()[-1], replace(config, streaming="stores")  # type: ignore[call-arg]
    nbytes = math.prod(output.shape) * numpy_dtype(output.dtype).itemsize
    share = LITTLE if p.ci * p.kh * p.kw * LINE * product_cycles(vector_unit(arch)) / 4 < FETCHED else 3 / 4
    return past if (far or beyond_caches(nbytes, share)) and past.check(problem, arch) is None else config


SHARES = [
    dict(zip(("tiles_x", "tiles_y", "chunk"), each, strict=True)) for each in product((1, 4), (1, 4, 16), (0, 1, 4))
]


def around(default: T, tiles: Sequence[T], arch: Arch) -> Iterator[T]:
    """The default, and those of `tiles` of half the sums that the registers hold at least, where there are as many, in
    tasks of several sizes and as many images as the default's."""
    enough = min(vector_unit(arch).registers // 2, max(tile.sums for tile in tiles))
    shares = [{**share, "tiles_n": default.tiles_n} for share in SHARES]
    found = [replace(tile, **share) for tile in tiles if tile.sums >= enough for share in shares]
    yield from dict.fromkeys([default, *found])


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def accumulate(sch: Schedule, block: SBlockRV, reduction: LoopRV, rows: Sequence[LoopRV], lane: LoopRV) -> None:
    """Keep the sums of `block` in registers over `reduction` and the loops inside it: `rows` unrolled, `lane`
    vectorised, both in the start of the sums too."""
    for loop in rows:
        sch.unroll(loop)
    sch.vectorize(lane)
    *start, last = sch.get_loops(sch.decompose_reduction(block, reduction))[-len(rows) - 1 :]
    for loop in start:
        sch.unroll(loop)
    sch.vectorize(last)


def vectors_for(unit: VectorUnit, extent: int) -> tuple[int, ...]:
    """Vectors worth trying along an axis: whole registers, halves of them, and less where there is no more."""
    least = min(extent, unit.lanes // 2)
    return tuple(v for v in (1, 2, 4, 8, 16) if v <= unit.lanes and (2 * v > least or v == unit.lanes))


def step_cycles(unit: VectorUnit, vector: int, vectors: int, broadcasts: int) -> float:
    """About what a step of the reduction costs: two multiply-adds and two loads a cycle of up to PIPE lanes each.  A
    vector that leaves lanes of a pipe empty takes as long as one that fills them.  Of tiles that cost the same, one
    with fewer loads and more sums is better."""
    parts = max(vector, unit.pipe) / min(unit.lanes, PIPE) / 2
    loads = CROSSING * vectors * parts + broadcasts / 2
    return max(vectors * broadcasts * parts, loads, LATENCY) + loads / 8 + LOOP


def product_cycles(unit: VectorUnit) -> float:
    """Cycles of a multiply-add where all pipes are always busy."""
    return 1 / (2 * unit.pipe)


def tile_cycles(unit: VectorUnit, steps: float, stored: float, across: bool = False) -> float:
    """About what a tile takes whose `steps` take as much as `step_cycles` says, where its vectors lie `across` lines or
    not.  Those compare tiles as if no pipe were wider than PIPE lanes: on CPUs whose pipes are, their choices are
    measured to be the faster ones."""
    cycles = MULTIPLIED * (steps * min(unit.lanes, PIPE) / unit.pipe + stored)
    return ACROSS * cycles if across and unit.pipe > PIPE else cycles


def fetched(weights: int) -> float:
    """Cycles in which a tile reads its `weights` elements of filters from afar, if no nearer cache keeps them."""
    return weights / STREAMED if 4 * weights > cached() else 0.0


def packing(elements: int, whole: bool, near: bool) -> float:
    """Cycles of filters that are packed in `whole` vectors or one by one, `near` to the task that reads them or not."""
    return elements * ((PACKED_NEAR if near else PACKED) if whole else PACKED_ALONE)


def fits(unit: VectorUnit, sums: int, vectors: int, broadcasts: int = 1, ahead: int | None = None) -> bool:
    """Whether a tile leaves registers for its operands and for what the compiler moves ahead, a quarter of them or as
    many as `ahead`: of `broadcasts` those that it keeps, all where the next tap along a row multiplies them again."""
    left = unit.registers // 4 if ahead is None else ahead
    return sums <= unit.registers - left and sums + vectors + broadcasts <= unit.registers


def crowded(rows: int, apart: int) -> bool:
    """Whether rows that lie `apart` bytes from each other and are read together drive each other out of the nearest
    cache: more of them in one set than half of its ways."""
    sets = WAY // math.gcd(apart, WAY)
    return -(-rows // sets) > WAYS // 2


def shares(count: int) -> list[int]:
    """Numbers of tiles worth giving to a task, of `count` along an axis: powers of two, halves, and all."""
    halves = {-(-count // parts) for parts in (1, 2, 3, 4)}
    return sorted({1 << k for k in range(count.bit_length()) if 1 << k <= count} | halves)


@dataclass(frozen=True)
class Task:
    """What one parallel task computes, in tiles, and about what all of them take on the cores there are."""

    tiles_n: int
    tiles_y: int
    tiles_x: int
    chunk: int
    cycles: float

    def given_to(self, tile: T) -> T:
        """The config of such tasks of `tile`."""
        return replace(tile, tiles_n=self.tiles_n, tiles_y=self.tiles_y, tiles_x=self.tiles_x, chunk=self.chunk)


def cached() -> int:
    """Bytes that a core keeps of what it reads again: less than its second-level cache, through which all else goes."""
    return int(CACHED * second_level_cache())


def tasks(
    counts: tuple[int, int, int],
    batch: int,
    cores: int,
    tile: float,
    copied: Callable[[int, int], int],
    weights: int,
    *,
    together: bool = True,
    packed: Callable[[bool], float] = lambda alone: 0.0,
    begun: Callable[[int, int], int] = lambda tiles_y, tiles_x: 0,
    apart: float = 1.0,
) -> Task:
    """The best task for `counts` tiles along (rows, columns, channels) and `batch` along the images, each of
    which takes `tile` cycles; of one image, unless they may be computed `together` and that saves enough.

    Each task reads the `weights` elements of each of its channels' tiles, once for all of its pixels; `copied` is how
    many elements a task of (rows, columns) tiles copies of an image.  What it copies of all of them it reads again for
    each of its channels' tiles: from its cache, or from afar where that holds less than these and a tile's filters.
    A core's tasks come one after the other, so that the last core to finish counts.  `packed` is what packing all
    filters takes, by tasks that own all pixels, each alone with its channels, or once before them.  `begun` is how many
    elements a task could copy while it begins rows of an image, `apart` how many come from afar for each that a tile
    reads.
    """
    room, shared_room = cached(), last_level_cache() // 4

    def every() -> Iterator[Task]:
        for n, y, x in product(shares(batch) if together else (1,), shares(counts[0]), shares(counts[1])):
            whole = (y, x) == counts[:2]
            if n > 1 and not whole:
                continue  # no better than more of one image
            kept = n * copied(y, x)
            near = 4 * (kept + weights) <= room
            farther = 1 + min(1.0, 4 * kept / room) / FARTHER
            copying = (kept + n * begun(y, x)) / COPIED
            packing = packed(whole and n == batch and together) / cores
            for f in shares(counts[2]):
                shared = (n, batch), (y, counts[0]), (x, counts[1]), (f, counts[2])
                number = math.prod(-(-count // share) for share, count in shared)
                again = 0 if near else f * kept * apart / (STREAMED if 4 * kept <= shared_room else STREAMED_BEYOND)
                each = n * y * x * f * tile * farther + copying + f * weights / STREAMED + again + STARTED
                yield Task(n, y, x, f, -(-number // cores) * each + packing)

    found = list(every())
    one = min((task for task in found if task.tiles_n == 1), key=lambda task: task.cycles)
    best = min(found, key=lambda task: task.cycles)
    return best if one.cycles - best.cycles > max(SAVED * one.cycles, LEAST_SAVED) else one
