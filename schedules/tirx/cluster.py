"""The shared memory of a cluster's blocks: addresses in other blocks, and waiting for what these write."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

_IN_BLOCK = """
__device__ __forceinline__ unsigned int hopper_in_block(unsigned int shared, unsigned int rank) {
  unsigned int at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared), "r"(rank));
  return at;
}
"""
# mbarrier.try_wait as TVM emits it acquires for the block alone
_WAIT = """
__device__ __forceinline__ void hopper_wait_in_cluster(unsigned int barrier, unsigned int parity) {
  unsigned int done;
  do {
    asm volatile("{\\n.reg .pred p;\\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\\n"
      "selp.u32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
"""
_BEGUN = """
__device__ __forceinline__ void hopper_cluster_{0}() {{ asm volatile("barrier.cluster.{1}.aligned;" ::: "memory"); }}
"""


def in_block(pointer: Any, rank: Any) -> Any:
    """The address of the same place of another block's shared memory."""
    shared = T.cuda.cvta_generic_to_shared(pointer)
    return T.cuda.func_call(
        "hopper_in_block", shared, T.Cast("uint32", rank), source_code=_IN_BLOCK, return_type="uint32"
    )


def wait_in_cluster(barrier: Any, parity: Any) -> None:
    """Wait for the phase of an mbarrier of this block, behind which what other blocks wrote is seen."""
    shared = T.cuda.cvta_generic_to_shared(barrier)
    T.evaluate(T.cuda.func_call("hopper_wait_in_cluster", shared, T.Cast("uint32", parity), source_code=_WAIT))


def say_begun() -> None:
    """Have the other blocks of the cluster know that this one has begun, and set up what `fence.mbarrier_init` made
    ready; nothing else is seen behind it, and so nothing is waited for."""
    T.evaluate(T.cuda.func_call("hopper_cluster_begun", source_code=_BEGUN.format("begun", "arrive.relaxed")))


def wait_until_begun() -> None:
    """Wait until all blocks of the cluster have said so, whose shared memory may be written from then on."""
    T.evaluate(T.cuda.func_call("hopper_cluster_wait", source_code=_BEGUN.format("wait", "wait.acquire")))
