"""What a config of a Blackwell kernel may be, whatever the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, ClassVar, TypeVar

from schedules.core.arch import Arch
from schedules.core.device import Device
from schedules.core.problem import Problem, numpy_dtype
from schedules.hopper.config import K_BYTES, HopperConfig, first_legal
from schedules.tirx import BARRIER_PAIR_BYTES

LANES = 128  # rows of tensor memory, which are those of one tcgen05.mma of a block
COLUMNS = 512  # of tensor memory
FEWEST = 32  # columns that can be allocated; more are a power of two
PIECE = 64  # columns of sums that a consumer's thread has in registers at once
ADDRESS_BYTES = 16  # of shared memory, in which a block is told where its tensor memory begins
# as Hopper's, of (consumers, blocks of a multiprocessor): the producer's warpgroup multiplies too
REGISTERS = {(1, 1): (0, 255), (1, 2): (40, 216), (2, 1): (40, 232)}

C = TypeVar("C", bound="BlackwellConfig")


@dataclass(frozen=True)
class BlackwellConfig(HopperConfig):
    """As Hopper's, but the consumers do not multiply: each finishes LANES rows of the output tile."""

    needs: ClassVar[Sequence[str]] = ("tma", "tcgen05")
    registers: ClassVar[dict[tuple[int, int], tuple[int, int]]] = REGISTERS
    sixteens: ClassVar[tuple[int, int]] = (16, 32)
    row_cycles: ClassVar[float] = 32  # of cycles in which twice as much is multiplied
    multiplies_apart: ClassVar[bool] = True

    consumers: int = 1
    cluster_m: int = 1
    cta_group: int = 1  # blocks, neighbours along m, that multiply together, each with a part of operand b's columns

    @property
    def frees(self) -> int:
        return 1

    @property
    def overlaps(self) -> bool:
        return self.buffers > 1

    @property
    def tile_columns(self) -> int:
        """Columns of tensor memory that the sums of a tile take."""
        return self.block_m // LANES * self.block_n

    @property
    def buffers(self) -> int:
        """Tiles whose sums tensor memory holds at once: the largest tile of each of REGISTERS fits."""
        return 2 if _allocated(2 * self.tile_columns) * self.blocks_sm <= COLUMNS else 1

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory that a block allocates."""
        return _allocated(self.buffers * self.tile_columns)

    @property
    def barrier_bytes(self) -> int:
        return self.buffers * BARRIER_PAIR_BYTES + ADDRESS_BYTES

    @classmethod
    def unfit(cls, problem: Any, arch: Arch) -> str | None:
        reason = super().unfit(problem, arch)
        if reason is None and problem.dtype == "int8" and "tcgen05_i8" not in arch.features:
            return f"{arch} has no tcgen05.mma of int8; choose another --schedule"
        return reason

    def check_sums(self, arch: Arch, sums: int, addressing: int) -> str | None:
        if self.ping_pong:
            return "ping_pong=true is for consumers that multiply, here they only finish tiles; leave it out"
        if self.split_k > 1:
            return f"split_k={self.split_k} would exchange sums of tensor memory, which no block does; it must be 1"
        if self.rows != LANES:
            return f"block_m={self.block_m} gives each of {self.consumers} consumers {self.rows} rows, not {LANES}"
        if self.cta_group not in (1, 2):
            return f"cta_group={self.cta_group} is not 1 or 2"
        if self.cta_group > 1 and (self.cluster_m, self.cluster_n) != (2, 1):
            cluster = f"cluster_m={self.cluster_m} and cluster_n={self.cluster_n}"
            return f"cta_group=2 is for clusters of two blocks along m, not {cluster}; give 2 and 1"
        if self.block_n % (16 * self.cta_group):
            return f"block_n={self.block_n} is not a multiple of {16 * self.cta_group}"
        return None


def _allocated(columns: int) -> int:
    """As many columns of tensor memory as are allocated for so many."""
    return int(max(FEWEST, 2 ** (columns - 1).bit_length()))


# (block_m, block_n) of a block that searches try and defaults are chosen from, widest first; a consumer for each LANES
SHAPES = (
    (128, 256),
    (256, 128),
    (256, 256),
    (128, 192),
    (128, 128),
    (256, 64),
    (128, 96),
    (128, 64),
    (256, 32),
    (128, 32),
    (128, 16),
)
PLAIN = ((128, 128), (128, 64), (128, 32), (128, 16))  # those that `plain` takes the first of
# (cluster_m, cluster_n, cta_group)
CLUSTERS = ((1, 1, 1), (2, 1, 2), (2, 1, 1), (1, 2, 1), (4, 1, 1), (2, 2, 1))


@lru_cache
def blocks(dtype: str, device: Device, shapes: tuple[tuple[int, int], ...] = SHAPES) -> tuple[Mapping[str, Any], ...]:
    """Fields of every config worth trying on `device` for operands of `dtype`, legal or not, but its stages."""
    k = K_BYTES // numpy_dtype(dtype).itemsize
    return tuple(
        dict(
            block_m=m, block_n=n, block_k=block_k, consumers=m // LANES, cluster_m=cluster_m, cluster_n=cluster_n,
            cta_group=cta_group, grid=device.resident(cluster_m * cluster_n) * blocks_sm, blocks_sm=blocks_sm,
            stationary=stationary,
        )
        for (m, n), block_k, (cluster_m, cluster_n, cta_group), blocks_sm, stationary in product(
            shapes, (2 * k, 4 * k, 8 * k), CLUSTERS, (1, 2), (False, True)
        )
        if (m // LANES, blocks_sm) in REGISTERS and not (stationary and cluster_m * blocks_sm > 1)
    )  # fmt: skip


def plain(base: C, problem: Problem, arch: Arch) -> C:
    """`base` with the first tile of a few that is legal, alone and with few stages, and as many blocks as the device
    holds: what a search may begin at, not what is fast."""
    tiles = (
        replace(base, block_m=m, block_n=n, num_stages=stages, consumers=m // LANES).filling(arch.device)
        for m, n in PLAIN
        for stages in (4, 2)
    )
    return first_legal(tiles, problem, arch)
