"""Sums of a tile whose reduction several blocks of a cluster share: from block to block through their shared memory.

Consumer c of all of them is finished by block c % split_k along the reduction, so that each finishes some; the others
write their sums into its shared memory, thread by thread as they lie in the registers.  Two mbarriers of a consumer:
`arrived` in the block that finishes it, and `free` in those that send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.backend.cuda.lang.pipeline import MBarrier
from tvm.script import tirx as T

from schedules.hopper.config import SUM_BYTES, WARPGROUP
from schedules.hopper.geometry import ClusterPlace, Member, Work
from schedules.tirx.cluster import in_block, wait_in_cluster
from schedules.tirx.values import named

if TYPE_CHECKING:
    from schedules.tirx.types import Buffer, Expr, Index

_VECTOR = 4  # sums that move at once
_ARRIVE = """
__device__ __forceinline__ void hopper_arrive_in_cluster(unsigned int barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
"""
_SEND = """
__device__ __forceinline__ void hopper_send({0} a, {0} b, {0} c, {0} d, unsigned int at) {{
  asm volatile("st.shared::cluster.v4.{1} [%0], {{%1, %2, %3, %4}};"
    :: "r"(at), "{2}"(a), "{2}"(b), "{2}"(c), "{2}"(d) : "memory");
}}
"""
_ADD = """
__device__ __forceinline__ void hopper_add({0}& a, {0}& b, {0}& c, {0}& d, const void* at) {{
  {0}4 got = *(const {0}4*)at;
  a += got.x; b += got.y; c += got.z; d += got.w;
}}
"""
_TYPES = {"float32": ("float", "f32", "f"), "int32": ("int", "s32", "r")}


class Exchange:
    """The memory and the barriers of a block of `work`, whose sums are `dtype`, in shared memory from `pool`."""

    def __init__(self, work: Work, dtype: str, pool: T.SMEMPool, leader: Expr) -> None:
        config = work.config
        self.split, self.apart = config.split_k, config.cluster_m * config.cluster_n  # blocks of a tile, ranks between
        self.types, self.count = _TYPES[dtype], work.sums * config.accumulators
        self.others = self.split - 1
        self.memory = pool.alloc((work.exchange_bytes,), "uint8", align=16)
        self.arrived = MBarrier(pool, config.consumers, leader=leader)
        self.free = MBarrier(pool, config.consumers, leader=leader)

    def init(self) -> None:
        """Set the barriers up: all threads of a consumer arrive, of each block that sends, or of the one that reads."""
        self.arrived.init(self.others * WARPGROUP)
        self.free.init(WARPGROUP)

    def finishes(self, consumer: Expr, rank_k: Index) -> Expr:
        """Whether block `rank_k` along the reduction finishes the consumer's rows."""
        return T.truncmod(consumer, self.split) == rank_k

    def send(self, sums: Buffer, member: Member, at: ClusterPlace, turn: Expr) -> None:
        """Write the consumer's sums to the block that finishes it, when what went there before has been read."""
        kind, suffix, constraint = self.types
        owner = named("owner", T.truncmod(member.consumer, self.split))
        rank = named("owner_rank", self._rank(owner, at))
        slot = self._slot(member.consumer, _number_of(at.rank_k, owner))
        to = named("to", in_block(self.memory.ptr_to([slot + member.thread * (_VECTOR * SUM_BYTES)]), rank))
        wait_in_cluster(self.free.ptr_to([member.consumer]), T.bitwise_xor(turn, 1))
        source = _SEND.format(kind, suffix, constraint)
        for i, four in enumerate(self._vectors(sums)):
            target = to + T.uint32(i * WARPGROUP * _VECTOR * SUM_BYTES)
            T.evaluate(T.cuda.func_call("hopper_send", *four, target, source_code=source))
        _arrive(self.arrived, member.consumer, rank)

    def receive(self, sums: Buffer, member: Member, at: ClusterPlace, turn: Expr) -> None:
        """Add the sums of the other blocks, in their order, and say that their memory is free."""
        wait_in_cluster(self.arrived.ptr_to([member.consumer]), turn)
        source = _ADD.format(self.types[0])
        for other in range(self.others):
            for i, four in enumerate(self._vectors(sums)):
                begin = self._slot(member.consumer, other) + (member.thread + i * WARPGROUP) * (_VECTOR * SUM_BYTES)
                T.evaluate(T.cuda.func_call("hopper_add", *four, self.memory.ptr_to([begin]), source_code=source))
        for other in range(self.others):
            _arrive(self.free, member.consumer, self._rank(_sender(other, at.rank_k), at))

    def _slot(self, consumer: Expr, other: Index) -> Expr:
        """Bytes to the sums of the consumer that sender number `other` writes."""
        return (T.truncdiv(consumer, self.split) * self.others + other) * (self.count * WARPGROUP * SUM_BYTES)

    def _rank(self, rank_k: Expr, at: ClusterPlace) -> Expr:
        """In the cluster, of block `rank_k` of those that share the tile of the block at `at`."""
        return rank_k * self.apart + at.rank_mn

    def _vectors(self, sums: Buffer) -> list[list[Expr]]:
        return [[sums[i + j] for j in range(_VECTOR)] for i in range(0, self.count, _VECTOR)]


def _number_of(sender: Expr, owner: Expr) -> Expr:
    """Which of those that send to `owner` the sender is, both blocks along the reduction."""
    return T.Select(sender < owner, sender, sender - 1)


def _sender(number: int, owner: Expr) -> Expr:
    """The block that `_number_of` gives the `number`."""
    return T.Select(owner <= number, number + 1, number)


def _arrive(barrier: MBarrier, number: Expr, rank: Expr) -> None:
    at = in_block(barrier.ptr_to([number]), rank)
    T.evaluate(T.cuda.func_call("hopper_arrive_in_cluster", at, source_code=_ARRIVE))
