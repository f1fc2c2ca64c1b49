"""Sums of a tile whose reduction several blocks of a cluster share: from block to block through their shared memory.

A consumer's columns are ``work.slices`` slices.  Slice j of consumer c of all blocks is finished by block (c * slices +
j) % split_k along the reduction; the others write their sums of it into that one's shared memory, thread by thread as
they lie in the registers.  Two mbarriers of a consumer: `arrived` counts the bytes of the sums that this block
finishes; `free`, where blocks have more than one tile, says that all have been read which they sent last.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T

from schedules.hopper.config import SUM_BYTES, WARPGROUP, WARPS
from schedules.hopper.geometry import ClusterPlace, Member, Work
from schedules.hopper.ring import FILLS
from schedules.tirx.cluster import in_block, wait_in_cluster
from schedules.tirx.types import Buffer, Expr, Index
from schedules.tirx.values import named

_VECTOR = 4  # sums that move at once
_ARRIVE = """
__device__ __forceinline__ void hopper_arrive_in_cluster(unsigned int barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
"""
# four sums to another block, whose mbarrier counts the bytes: no fence and no arrival beside them
_SEND = """
__device__ __forceinline__ void hopper_send({0} a, {0} b, {0} c, {0} d, unsigned int at, unsigned int barrier) {{
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.{1} [%0], {{%1, %2, %3, %4}}, [%5];"
    :: "r"(at), "{2}"(a), "{2}"(b), "{2}"(c), "{2}"(d), "r"(barrier) : "memory");
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
        self.slices, self.groups = work.slices, config.columns // (8 * work.slices)  # eights of columns of a slice
        self.types, self.count = _TYPES[dtype], work.sums * config.accumulators
        self.others = self.split - 1
        self.memory = pool.alloc((work.exchange_bytes,), "uint8", align=16)
        self.arrived = TMABar(pool, config.consumers, leader=leader)
        self.free = MBarrier(pool, config.consumers, leader=leader) if work.again else None

    @property
    def nbytes(self) -> int:
        """Of the sums of a slice of a consumer."""
        return self.count // self.slices * WARPGROUP * SUM_BYTES

    def init(self) -> None:
        """Set the barriers up: the block that finishes a slice arrives with the bytes that it expects; each warp of the
        blocks that have read."""
        self.arrived.init(FILLS)
        if self.free:
            self.free.init(self.slices * WARPS)

    def slice(self, consumer: Expr, rank_k: Index) -> Expr:
        """The slice of the consumer's columns that block `rank_k` along the reduction finishes; none if there are not
        as many."""
        if self.slices == self.split:
            return T.int32(0) + rank_k
        return T.truncmod(rank_k + self.split - T.truncmod(consumer * self.slices, self.split), self.split)

    def send(self, sums: Buffer, member: Member, at: ClusterPlace, turn: Expr) -> None:
        """Write the consumer's sums to the blocks that finish them, when what went there before has been read."""
        kind, suffix, constraint = self.types
        source = _SEND.format(kind, suffix, constraint)
        if self.free:
            wait_in_cluster(self.free.ptr_to([member.consumer]), T.bitwise_xor(turn, 1))
        for j in range(self.slices):
            owner = named("owner", self._owner(member.consumer, j))
            with T.If(owner != at.rank_k), T.Then():
                rank = named("owner_rank", self._rank(owner, at))
                slot = self._slot(member.consumer, _number_of(at.rank_k, owner))
                to = named("to", in_block(self.memory.ptr_to([slot + member.thread * (_VECTOR * SUM_BYTES)]), rank))
                arrived = named("there", in_block(self.arrived.ptr_to([member.consumer]), rank))
                for i, first in enumerate(self._vectors(j)):
                    four = [sums[first + k] for k in range(_VECTOR)]
                    target = to + T.uint32(i * WARPGROUP * _VECTOR * SUM_BYTES)
                    T.evaluate(T.cuda.func_call("hopper_send", *four, target, arrived, source_code=source))

    def receive(self, sums: Buffer, member: Member, at: ClusterPlace, number: Expr, turn: Expr) -> None:
        """Add the sums of the other blocks, in their order, to those of slice `number`, which go where those of the
        first slice lie; and say that the memory is free."""
        first_slice = list(self._vectors(0))
        with T.If(member.thread == 0), T.Then():
            self.arrived.arrive(member.consumer, self.others * self.nbytes)
        for j in range(1, self.slices):
            with T.If(number == j), T.Then():
                for first, own in zip(first_slice, self._vectors(j), strict=True):
                    for k in range(_VECTOR):
                        T.buffer_store(sums, sums[own + k], [first + k])
        wait_in_cluster(self.arrived.ptr_to([member.consumer]), turn)
        source = _ADD.format(self.types[0])
        for other in range(self.others):
            for i, first in enumerate(first_slice):
                four = [sums[first + k] for k in range(_VECTOR)]
                begin = self._slot(member.consumer, other) + (member.thread + i * WARPGROUP) * (_VECTOR * SUM_BYTES)
                T.evaluate(T.cuda.func_call("hopper_add", *four, self.memory.ptr_to([begin]), source_code=source))
        if self.free:
            T.evaluate(T.cuda.warp_sync())
            with T.If(member.lane < self.split), T.Then():
                at_free = in_block(self.free.ptr_to([member.consumer]), self._rank(member.lane, at))
                T.evaluate(T.cuda.func_call("hopper_arrive_in_cluster", at_free, source_code=_ARRIVE))

    def _owner(self, consumer: Expr, number: int) -> Expr:
        """The block along the reduction that finishes slice `number` of the consumer's columns."""
        if self.slices == self.split:
            return T.int32(number)
        return T.truncmod(consumer * self.slices + number, self.split)

    def _slot(self, consumer: Expr, other: Index) -> Expr:
        """Bytes to the sums of the consumer that sender number `other` writes."""
        mine = T.truncdiv(consumer * self.slices, self.split)
        return (mine * self.others + other) * self.nbytes

    def _rank(self, rank_k: Expr, at: ClusterPlace) -> Expr:
        """In the cluster, of block `rank_k` of those that share the tile of the block at `at`."""
        return rank_k * self.apart + at.rank_mn

    def _vectors(self, number: int) -> Iterator[int]:
        """The first of each four sums of slice `number`: those of 64 rows and a group of eight columns."""
        for first in range(0, self.count, self.slices * self.groups * _VECTOR):
            for group in range(self.groups):
                yield first + (number * self.groups + group) * _VECTOR


def _number_of(sender: Expr, owner: Expr) -> Expr:
    """Which of those that send to `owner` the sender is, both blocks along the reduction."""
    return T.Select(sender < owner, sender, sender - 1)
