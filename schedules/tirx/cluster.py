"""The shared memory of a cluster's blocks: addresses in other blocks, and waiting for what these write."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder


def in_block(pointer: Any, rank: Any) -> Any:
    """The address of the same place of another block's shared memory."""
    at = T.alloc_local((1,), "uint32")
    IRBuilder.name("in_block", at)
    T.evaluate(T.ptx.mapa.shared__cluster.u32(at[0], T.cuda.cvta_generic_to_shared(pointer), T.Cast("uint32", rank)))
    return at[0]


def wait_in_cluster(barrier: Any, parity: Any) -> None:
    """Wait for the phase of an mbarrier of this block, behind which what other blocks wrote is seen."""
    T.evaluate(T.cuda.mbarrier_wait_acquire_cluster(barrier, parity))


def say_begun() -> None:
    """Have the other blocks of the cluster know that this one has begun, and set up what `fence.mbarrier_init` made
    ready; nothing else is seen behind it, and so nothing is waited for."""
    T.evaluate(T.ptx.barrier.cluster.arrive.relaxed.aligned())


def wait_until_begun() -> None:
    """Wait until all blocks of the cluster have said so, whose shared memory may be written from then on."""
    T.evaluate(T.ptx.barrier.cluster.wait.acquire.aligned())
