"""Sums of a tile whose reduction several blocks of a cluster share: from block to block through their shared memory.

Consumer c of all of them is finished by block c % split_k along the reduction, so that each finishes some; the others
write their sums into its shared memory, thread by thread as they lie in the registers.  Two mbarriers of a consumer:
`arrived` in the block that finishes it, and `free` in those that send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.backend.cuda.lang.pipeline import MBarrier
from tvm.script import tirx as T

from schedules.hopper.config import SUM_BYTES, WARPGROUP
from schedules.hopper.work import Work
from schedules.tirx.cluster import in_block, wait_in_cluster

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
    """The memory and the barriers of a block of `work`, whose sums are `dtype`."""

    def __init__(self, work: Work, dtype: str, pool: Any, leader: Any) -> None:
        config = work.config
        self.config, self.types, self.count = config, _TYPES[dtype], work.sums * config.accumulators
        self.others = config.split_k - 1
        self.memory = pool.alloc((work.exchange_bytes,), "uint8", align=16)
        self.arrived = MBarrier(pool, config.consumers, leader=leader)
        self.free = MBarrier(pool, config.consumers, leader=leader)

    def init(self) -> None:
        self.arrived.init(self.others * WARPGROUP)
        self.free.init(WARPGROUP)

    def finishes(self, consumer: Any, rank_k: Any) -> Any:
        """Whether block `rank_k` along the reduction finishes the consumer's rows."""
        return T.truncmod(consumer, self.config.split_k) == rank_k

    def _slot(self, consumer: Any, other: Any) -> Any:
        """Bytes to the sums of the consumer that sender number `other` writes."""
        return (T.truncdiv(consumer, self.config.split_k) * self.others + other) * (self.count * WARPGROUP * SUM_BYTES)

    def send(self, sums: Any, consumer: Any, rank_k: Any, rank_mn: Any, thread: Any, turn: Any) -> None:
        """Write the consumer's sums to the block that finishes it, when what went there before has been read."""
        from schedules.tirx.values import named

        kind, suffix, constraint = self.types
        owner = named("owner", T.truncmod(consumer, self.config.split_k))
        rank = named("owner_rank", owner * (self.config.cluster_m * self.config.cluster_n) + rank_mn)
        slot = self._slot(consumer, T.Select(rank_k < owner, rank_k, rank_k - 1))
        to = named("to", in_block(self.memory.ptr_to([slot + thread * (_VECTOR * SUM_BYTES)]), rank))
        wait_in_cluster(self.free.ptr_to([consumer]), T.bitwise_xor(turn, 1))
        source = _SEND.format(kind, suffix, constraint)
        for i, four in enumerate(_vectors(sums, self.count)):
            at = to + T.uint32(i * WARPGROUP * _VECTOR * SUM_BYTES)
            T.evaluate(T.cuda.func_call("hopper_send", *four, at, source_code=source))
        _arrive(self.arrived, consumer, rank)

    def receive(self, sums: Any, consumer: Any, rank_k: Any, rank_mn: Any, thread: Any, turn: Any) -> None:
        """Add the sums of the other blocks, in their order, and say that their memory is free."""
        wait_in_cluster(self.arrived.ptr_to([consumer]), turn)
        source = _ADD.format(self.types[0])
        for other in range(self.others):
            for i, four in enumerate(_vectors(sums, self.count)):
                at = self._slot(consumer, other) + (thread + i * WARPGROUP) * (_VECTOR * SUM_BYTES)
                T.evaluate(T.cuda.func_call("hopper_add", *four, self.memory.ptr_to([at]), source_code=source))
        for other in range(self.others):
            sender = T.Select(rank_k <= other, other + 1, other)
            _arrive(self.free, consumer, sender * (self.config.cluster_m * self.config.cluster_n) + rank_mn)


def _vectors(sums: Any, count: int) -> list[Sequence[Any]]:
    return [[sums[i + j] for j in range(_VECTOR)] for i in range(0, count, _VECTOR)]


def _arrive(barrier: MBarrier, at: Any, rank: Any) -> None:
    T.evaluate(T.cuda.func_call("hopper_arrive_in_cluster", in_block(barrier.ptr_to([at]), rank), source_code=_ARRIVE))
