"""The constants of a Hopper kernel, and what they may be whatever the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, TypeVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.problem import Config, Problem, numpy_dtype
from schedules.core.space import axis
from schedules.core.tvm import tirx
from schedules.tirx import BARRIER_PAIR_BYTES

WARPGROUP = 128  # threads
WARPS = WARPGROUP // 32  # of them
ROWS = 64  # of one wgmma
K_BYTES = 32  # of the reduction in one wgmma
# 32-bit registers of a thread of (producer, consumers) by (consumers, blocks of a multiprocessor), after setmaxnreg; at
# the launch all threads have the same.  Two warpgroups of 255 need no redistribution.
REGISTERS: dict[tuple[int, int], tuple[int, int]] = {
    (1, 1): (0, 255),
    (1, 2): (24, 232),
    (2, 1): (40, 232),
    (3, 1): (56, 152),
}
# where the producer turns
TURNING = {(1, 1): (0, 255), (1, 2): (104, 152), (2, 1): (136, 184), (3, 1): (80, 144)}
COPYING = {(1, 1): (0, 255), (1, 2): (72, 184), (2, 1): (72, 216), (3, 1): (80, 144)}  # where the producer copies
INSTRUCTION = 26  # registers beside its sums that ptxas wants for a wgmma, of those a thread has at the launch
SUM_BYTES = 4
STAGING = 16 * 1024  # most bytes in which a consumer's results wait for their store
CLUSTER_SIZES = (1, 2, 4, 8)  # blocks

C = TypeVar("C", bound="HopperConfig")


@lru_cache(maxsize=256)
def work_of(problem: Problem, config: HopperConfig) -> Any:
    """`config.work`, made once for all who look at it: the check, and the estimate of what was found legal."""
    return config.work(problem)


@dataclass(frozen=True)
class HopperConfig(Config):
    """Rows m and columns n of the output tile of a block, and how it is worked on."""

    needs: ClassVar[Sequence[str]] = ("tma", "wgmma")  # features of an arch
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")  # of a problem
    granule: ClassVar[int] = 16  # columns that results are stored by
    k_steps: ClassVar[Sequence[int]] = (1, 2, 4, 8)  # of wgmma that a stage may have
    registers: ClassVar[dict[tuple[int, int], tuple[int, int]]] = REGISTERS
    # a consumer's rows are sixteens of its warps: rows from one of a warp to its next, and from warp to warp
    sixteens: ClassVar[tuple[int, int]] = (ROWS, 16)
    row_cycles: ClassVar[float] = 16  # that shared memory takes to give operand a of ROWS rows of a product
    row_of_taps: ClassVar[bool] = False  # whether a stage has the filters of all taps along a row
    multiplies_apart: ClassVar[bool] = False  # whether a warp beside the producer multiplies, and not the consumers
    # whether consumers' threads read a stage themselves: each warp says when it has
    by_threads: ClassVar[bool] = False
    whole_images: ClassVar[bool] = False  # whether tiles are of whole images, whose results leave together
    addressing: ClassVar[int] = 48  # registers of a consumer's thread beside its sums, about
    addends: ClassVar[int] = 1  # numbers of 16 bits that each of an operand's is the sum of: see `hopper.split`
    promoted: ClassVar[bool] = False  # whether the sums of a stage are added to a tile's on CUDA cores

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64  # of the reduction in shared memory at a time, within one kernel tap
    num_stages: int = 4  # such tiles in shared memory at once
    consumers: int = 2  # warpgroups that multiply, each block_m / consumers rows
    cluster_m: int = 2  # blocks along m that share tiles of the operand along n
    cluster_n: int = 1  # blocks along n that share tiles of the operand along m
    grid: int = 0  # blocks at most, each of which computes tile after tile; 0 makes one for each tile
    blocks_sm: int = 1  # blocks that a multiprocessor holds: one finishes a tile while the other multiplies
    split_k: int = 1  # blocks of a cluster that take turns at the stages of one tile, for grids of few tiles

    # each consumer has tiles of its own, of block_m x block_n: one finishes its tile while another multiplies
    ping_pong: bool = False
    # operand b, the filters of a tile's whole reduction, is loaded with a block's first tile and stays in shared memory
    stationary: bool = False

    def work(self, problem: Any) -> Any:
        """What a kernel of this config does for `problem` (`geometry.Work`); None if there are no such tiles."""
        raise NotImplementedError

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    @property
    def cta_group(self) -> int:
        """Blocks side by side along m that multiply together, of whose columns of operand b each holds a part."""
        return 1

    @property
    def held_n(self) -> int:
        """Columns of operand b in a block's shared memory."""
        return self.block_n // self.cta_group

    @property
    def loaders_b(self) -> int:
        """Blocks that each load a part of what all of them hold of operand b."""
        return self.cluster_m // self.cta_group

    @property
    def consumers_n(self) -> int:
        """Consumers side by side along n; the rows of the tile are dealt out among the others."""
        return 1

    @property
    def parts(self) -> int:
        """Consumers that share an output tile."""
        return 1 if self.ping_pong else self.consumers

    @property
    def rows(self) -> int:
        """Rows of the output tile that a consumer computes."""
        return self.block_m // (self.parts // self.consumers_n)

    @property
    def columns(self) -> int:
        """Columns of the output tile that a consumer computes."""
        return self.block_n // self.consumers_n

    @property
    def accumulators(self) -> int:
        """32-bit accumulators of a consumer's thread for one product."""
        return self.rows * self.columns // WARPGROUP

    @property
    def beside(self) -> int:
        """Warpgroups that do not multiply."""
        return 1

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + self.beside)

    @property
    def shares(self) -> tuple[int, int] | None:
        """32-bit registers of a thread of those warpgroups, 0 where it has what the launch gives, and of a consumer's;
        None where there is no such block."""
        return self.registers.get((self.consumers, self.blocks_sm))

    @property
    def frees(self) -> int:
        """Arrivals by which a block says that it has read a stage."""
        return self.parts * (WARPS if self.by_threads else 1)

    @property
    def overlaps(self) -> bool:
        """Whether a block multiplies one tile while it finishes another."""
        return self.ping_pong

    @property
    def barrier_bytes(self) -> int:
        """Bytes of shared memory of barriers that are neither the ring's nor those of an exchange."""
        return self.consumers * BARRIER_PAIR_BYTES if self.ping_pong else 0

    @property
    def slices(self) -> int:
        """Slices of a consumer's columns that different blocks of a tile may finish."""
        slices = self.split_k
        while slices > 1 and self.columns % (slices * self.granule):
            slices //= 2
        return slices

    def blocks(self, tiles: int) -> int:
        """Blocks of the launch for `tiles` output tiles, whole clusters."""
        clusters = -(-tiles // self.cluster)
        return self.cluster * (min(clusters, self.grid // self.cluster) if self.grid else clusters)

    def launched(self, clusters: Any) -> Any:
        """Clusters of the launch for as many `clusters` of tiles, which may be an expression."""
        if isinstance(clusters, int) or not self.grid:
            return clusters if not self.grid else min(clusters, self.grid // self.cluster)
        return tirx.min(clusters, self.grid // self.cluster)

    def filling(self: C, device: Device) -> C:
        """The same with as many blocks as `device` holds at once."""
        return replace(self, grid=device.resident(self.cluster) * self.blocks_sm)

    @classmethod
    def unfit(cls, problem: Any, arch: Arch) -> str | None:
        if problem.dtype not in cls.dtypes:
            return f"dtype={problem.dtype} is not {' or '.join(cls.dtypes)}"
        missing = [feature for feature in cls.needs if feature not in arch.features]
        return f"{arch} has no {' and no '.join(missing)}; choose another --schedule" if missing else None

    def check_block(self, dtype: str, arch: Arch, sums: int = 1, more: int = 0) -> str | None:
        """Why the tile is illegal for operands of `dtype` on `arch`, whatever the problem; `sums` is the sets of
        accumulators, `more` the registers that are needed beside what every kernel needs."""
        for name, value in self.to_json().items():
            if not isinstance(value, bool) and value < (name != "grid"):
                return f"{name}={value} must be at least {int(name != 'grid')}"
        if self.shares is None:
            known = ", ".join(f"{consumers} and {blocks_sm}" for consumers, blocks_sm in self.registers)
            return f"consumers={self.consumers} and blocks_sm={self.blocks_sm} are not {known}"
        if self.ping_pong:
            reason = self._check_ping_pong()
            if reason:
                return reason
        if self.parts % self.consumers_n:
            return f"consumers_n={self.consumers_n} does not divide consumers={self.consumers}"
        consumers_m = self.parts // self.consumers_n
        if self.block_m % (ROWS * consumers_m):
            return f"block_m={self.block_m} gives each of {consumers_m} consumers no multiple of {ROWS} rows"
        step = (32 if dtype == "int8" else self.granule) * self.consumers_n
        if self.block_n % step or self.columns > 256:
            return f"block_n={self.block_n} is not a multiple of {step} up to {256 * self.consumers_n}"
        k = K_BYTES // numpy_dtype(dtype).itemsize
        *others, most = (steps * k for steps in self.k_steps)
        if self.block_k not in (*others, most):
            return f"block_k={self.block_k} is not {', '.join(map(str, others))} or {most}"
        if self.num_stages < 2:
            return f"num_stages={self.num_stages} must be at least 2"
        if self.cluster not in CLUSTER_SIZES:
            sizes = " x ".join(f"{name}={getattr(self, name)}" for name in ("cluster_m", "cluster_n", "split_k"))
            return f"{sizes} is not {', '.join(map(str, CLUSTER_SIZES[:-1]))} or {CLUSTER_SIZES[-1]} blocks"
        if self.grid and self.grid < self.cluster:
            return f"grid={self.grid} is less than a cluster of {self.cluster}"
        return self.check_sums(arch, sums, self.addressing + more)

    def check_sums(self, arch: Arch, sums: int, addressing: int) -> str | None:
        """Why a block has no room for its sums; None if it has."""
        assert self.shares
        most = self.shares[1]
        needed = sums * self.accumulators + addressing
        if needed > most:
            return f"block_m={self.block_m} x block_n={self.block_n} needs about {needed} registers, there are {most}"
        at_launch = arch.registers_sm // (self.threads * self.blocks_sm) // 8 * 8
        needed = self.columns // 2 + INSTRUCTION
        if needed > at_launch:
            return f"block_n={self.block_n} needs {needed} registers for one wgmma, the launch gives {at_launch}"
        return None

    def _check_ping_pong(self) -> str | None:
        if self.consumers == 1:
            return "ping_pong=true is for consumers that take turns, consumers=1 has none to take them with"
        if self.consumers_n > 1:
            return f"ping_pong=true gives each consumer whole tiles, consumers_n={self.consumers_n} shares them out"
        if self.split_k > 1:
            return f"ping_pong=true has no way to add sums of other blocks, split_k={self.split_k} must be 1"
        return None


# (block_m, block_n, consumers) that searches try and defaults are chosen from, widest first
SHAPES = (
    (128, 256, 2),
    (256, 128, 2),
    (192, 192, 3),
    (128, 160, 2),
    (192, 128, 3),
    (128, 192, 2),
    (256, 64, 2),
    (128, 128, 2),
    (64, 256, 1),
    (64, 192, 1),
    (128, 96, 2),
    (128, 64, 2),
    (64, 128, 1),
    (256, 32, 2),
    (128, 32, 2),
    (64, 64, 1),
    (64, 32, 1),
    (256, 16, 2),
    (128, 16, 2),
    (64, 16, 1),
)
# and (block_m, block_n, consumers) for consumers with tiles of their own
PING_PONG = (
    (128, 128, 2),
    (64, 256, 2),
    (128, 160, 2),
    (256, 64, 2),
    (64, 192, 2),
    (64, 192, 3),
    (128, 96, 2),
    (64, 128, 2),
    (64, 128, 3),
    (128, 64, 2),
    (128, 64, 3),
    (128, 32, 2),
)
OWN, OWN_ROWS = 128 * 160, 128  # results of such a tile, and rows, at most
PLAIN = ((128, 128, 2), (64, 64, 1), (64, 32, 1), (64, 16, 1))  # those that `plain` takes the first of
# what `fitting` tries: (block_m, consumers), columns, results of a tile, blocks that share a reduction
K_STEPS = (2, 4, 8)  # of wgmma in a stage that searches try
HEIGHTS = ((64, 1), (128, 2), (192, 3), (256, 2))
NARROWEST, WIDEST, SPLITS, FITTING = 64, 128 * 128, (1, 2, 4), 4
BORDER, EXCHANGE = 48, 2.7e6  # products in the time of an operand's row, and of blocks that exchange sums, about
STAGES = tuple(range(2, 9))
DEPTHS = axis("num_stages", STAGES)
# (cluster_m, cluster_n, split_k)
CLUSTERS = (
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (4, 1, 1),
    (1, 4, 1),
    (2, 2, 1),
    (1, 1, 2),
    (2, 1, 2),
    (1, 2, 2),
    (1, 1, 4),
    (2, 1, 4),
    (1, 2, 4),
    (1, 1, 8),
    (2, 2, 2),
)


def fitting(
    rows: Callable[[int], int],
    columns: int,
    reduction: int,
    device: Device,
    heights: Sequence[tuple[int, int]] = HEIGHTS,
) -> tuple[tuple[int, int, int], ...]:
    """The few shapes beside `SHAPES` that leave less of `device` idle, or fewer columns of a tile without use, than
    all of those, whether blocks may share a reduction or not: as wide as equal parts of `columns`; `rows` says how many
    tiles of so many rows there are, of which some of `heights` have consumers."""

    tiles_along = {m: rows(m) for m in {m for m, *_ in (*SHAPES, *heights)}}

    def cost(shape: tuple[int, int, int], splits: Sequence[int]) -> float:
        m, n, _ = shape
        tiles, loaded = tiles_along[m] * -(-columns // n), BORDER * (m + n)
        own = {k: -(-tiles * k // device.resident(k)) * (m * n + loaded) / k for k in splits}
        return min(time + (k > 1) * EXCHANGE / reduction for k, time in own.items())

    widths = {-(-columns // (16 * parts)) * 16 for parts in range(1, columns // NARROWEST + 2)}
    tried = {(m, n, c) for m, c in heights for n in widths if NARROWEST <= n <= WIDEST // m * 2 and n <= 256}
    found: list[tuple[int, int, int]] = []
    for splits in (SPLITS, (1,)):
        least = min(cost(shape, splits) for shape in SHAPES)
        better = sorted((cost(shape, splits), shape) for shape in tried - {*SHAPES} if cost(shape, splits) < least)
        found += [shape for _, shape in better[:FITTING]]
    return tuple(dict.fromkeys(found))


def clusters(blocks_sm: int, device: Device) -> list[dict[str, Any]]:
    """Fields of every cluster, and of the grid that `device` holds of its blocks."""
    return [
        dict(cluster_m=m, cluster_n=n, split_k=k, grid=device.resident(m * n * k) * blocks_sm, blocks_sm=blocks_sm)
        for m, n, k in CLUSTERS
    ]


@lru_cache
def blocks(
    dtype: str,
    device: Device,
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    filters: bool = False,
    own_pixels: bool = False,
    k_steps: Sequence[int] = K_STEPS,
    ping_pong: Sequence[tuple[int, int, int]] = PING_PONG,
) -> tuple[Mapping[str, Any], ...]:
    """Fields of every config worth trying on `device` for operands of `dtype`, legal or not, but its stages (`DEPTHS`);
    `filters` says that operand b is, and may stay, `own_pixels` that blocks do not share operand a; a stage has as many
    wgmma as one of `k_steps`."""
    found = _blocks(dtype, device, shapes, filters, k_steps, ping_pong)
    return tuple(words for words in found if not own_pixels or words["cluster_n"] == 1)


def _blocks(
    dtype: str,
    device: Device,
    shapes: Sequence[tuple[int, int, int]],
    filters: bool,
    k_steps: Sequence[int],
    ping_pong: Sequence[tuple[int, int, int]],
) -> Iterator[dict[str, Any]]:
    k = K_BYTES // numpy_dtype(dtype).itemsize
    clustered = [words for blocks_sm in (1, 2) for words in clusters(blocks_sm, device)]
    ways = _ways_of(shapes, filters, ping_pong)
    for shape, block_k, words in product(ways, [steps * k for steps in k_steps], clustered):
        whole = words["split_k"] == 1
        alone = whole and words["cluster_m"] == words["blocks_sm"] == 1  # what is loaded but once need not be shared
        if (
            (shape["consumers"], words["blocks_sm"]) in REGISTERS
            and (whole or "ping_pong" not in shape)
            and (alone or "stationary" not in shape)
        ):
            yield dict(shape, block_k=block_k, **words)


def _ways_of(
    shapes: Sequence[tuple[int, int, int]], filters: bool, ping_pong: Sequence[tuple[int, int, int]]
) -> Iterator[dict[str, Any]]:
    """Fields of `shapes` and of those for ping-pong, which those of `shapes` that not every problem has may be, too;
    and whether operand b stays, which it may if it is `filters`."""
    fits = [shape for shape in shapes if shape not in SHAPES]
    own = [(m, n, 2) for m, n, _ in fits if m <= OWN_ROWS and m * n <= OWN]
    for found, fields in ((shapes, {}), (tuple(dict.fromkeys((*ping_pong, *own))), dict(ping_pong=True))):
        for m, n, consumers in found:
            shape = dict(block_m=m, block_n=n, consumers=consumers, **fields)
            yield shape
            if filters:
                yield dict(shape, stationary=True)


def stage_channels(channels: int, most: int, least: int) -> int:
    """`most` channels for a stage, halved while all `channels` fit in it, to no less than `least`."""
    while most > least and most // 2 >= channels:
        most //= 2
    return most


def first_legal(configs: Iterable[C], problem: Problem, arch: Arch) -> C:
    """The first legal one; where none is, the first of all, whose check says what is wrong."""
    first = None
    for config in configs:
        if config.check(problem, arch) is None:
            return config
        first = first or config
    assert first is not None  # there is one
    return first


def plain(base: C, problem: Problem, arch: Arch) -> C:
    """`base` with the first tile of a few that is legal, alone and with few stages, and as many blocks as the device
    holds: what a search may begin at, not what is fast."""
    tiles = ((m, n, consumers, stages) for m, n, consumers in PLAIN for stages in (4, 2))
    return first_legal(
        (
            replace(base, block_m=m, block_n=n, num_stages=stages, consumers=c, cluster_m=1).filling(arch.device)
            for m, n, c, stages in tiles
        ),
        problem,
        arch,
    )
