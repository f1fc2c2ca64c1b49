"""CUDA device functions around the PTX of sm_90, with which the tests write kernels, and NumPy models of its layouts.

The models are written down from the PTX ISA ("Tensors", "Shared Memory Matrix Layout"), independently of the emulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedules.check.emulate import EmulationMode, Emulator, TensorMap

LATE, EARLY = EmulationMode("late", "forward"), EmulationMode("early", "reverse")
MODES = [LATE, EARLY, EmulationMode("late", "strided"), EmulationMode("late", "reverse")]

_TENSOR_LOADS = "".join(
    f"""
__device__ void load_tensor{suffix}(void* to, const CUtensorMap* map, {types}, uint64_t* bar{mask}) {{
  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{multicast} "
    "[%0], [%1, {{{places}}}], [%{rank + 2}]{mask_place};"
    :: "r"(smem(to)), "l"(map), {values}, "r"(smem(bar)){mask_value} : "memory");
}}"""
    for rank in (2, 3, 4, 5)
    for multicast, suffix in (("", ""), (".multicast::cluster", "_multicast"))
    for types in [", ".join(f"int c{i}" for i in range(rank))]
    for places in [", ".join(f"%{i + 2}" for i in range(rank))]
    for values in [", ".join(f'"r"(c{i})' for i in range(rank))]
    for mask, mask_place, mask_value in [
        (", unsigned short mask", f", %{rank + 3}", ', "h"(mask)') if multicast else ("", "", "")
    ]
)

PRELUDE = (
    """
#include <cuda.h>
__device__ unsigned smem(const void* p) { return __cvta_generic_to_shared(p); }
__device__ void bar_init(uint64_t* bar, unsigned count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(smem(bar)), "r"(count) : "memory");
}
__device__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(smem(bar)) : "memory");
}
__device__ void arrive_in(uint64_t* bar, unsigned rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem(bar)), "r"(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
}
__device__ void expect(uint64_t* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(smem(bar)), "r"(bytes) : "memory");
}
__device__ void wait(uint64_t* bar, int parity) {
  asm volatile(
    "{\\n"
    ".reg .pred                P1;\\n"
    "LAB_WAIT:\\n"
    "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 P1, [%0], %1, %2;\\n"
    "@P1                       bra.uni DONE;\\n"
    "bra.uni                   LAB_WAIT;\\n"
    "DONE:\\n"
    "}\\n"
    :: "r"(smem(bar)), "r"(parity), "r"(0x989680) : "memory");
}
__device__ unsigned cluster_rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r) :); return r; }
__device__ void cluster_sync() { asm("barrier.cluster.arrive.aligned;"); asm("barrier.cluster.wait.aligned;"); }
__device__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;"); }
__device__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void store_tensor2(const CUtensorMap* map, int c0, int c1, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
    :: "l"(map), "r"(c0), "r"(c1), "r"(smem(from)) : "memory");
}
__device__ uint64_t descriptor(const void* p, int leading, int stride, int layout) {
  return (smem(p) & 0x3ffff) >> 4 | uint64_t(leading) << 16 | uint64_t(stride) << 32 | uint64_t(layout) << 62;
}
__device__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
"""
    + _TENSOR_LOADS
)


def mma_function(
    n: int, kind: str, *, transposed: tuple[int, int] = (0, 0), signs: str = "1, 1", a_registers: bool = False
) -> str:
    """A device function `mma` for m64n{n}: the accumulators, A (a descriptor or four registers), B, scale-d."""
    element = "int" if kind in ("s8", "u8") else "float"
    count = n // 2
    sums, letter, depth = ("s32", "r", 32) if element == "int" else ("f32", "f", 8 if kind == "tf32" else 16)
    a_names = ["a0", "a1", "a2", "a3"] if a_registers else ["a"]
    a_type, a_letter = ("const unsigned&", "r") if a_registers else ("uint64_t", "l")
    a_text = ", ".join(f"%{count + i}" for i in range(len(a_names)))
    d_text = ", ".join(f"%{i}" for i in range(count))
    last = count + len(a_names)
    suffix = ""
    if element == "float":
        flags = transposed[1:] if a_registers else transposed
        suffix = "".join(f", {flag}" for flag in (signs, *([] if kind == "tf32" else flags)))
    return f"""
__device__ void mma({element}* d, {", ".join(f"{a_type} {name}" for name in a_names)}, uint64_t b, int scale) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{last + 1}, 0; "
    "wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{sums}.{kind}.{kind} "
    "{{{d_text}}}, {"{" + a_text + "}" if a_registers else a_text}, %{last}, p{suffix}; }}"
    : {", ".join(f'"+{letter}"(d[{i}])' for i in range(count))}
    : {", ".join(f'"{a_letter}"({name})' for name in a_names)}, "l"(b), "r"(scale));
}}"""


def accumulator_index(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every accumulator of a warpgroup: two arrays [128 threads, n / 2]."""
    thread, register = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + thread % 4 * 2 + register % 2


def swizzle(address: np.ndarray, span: int) -> np.ndarray:
    """Byte addresses under the swizzle whose pattern is `span` bytes wide (0: none)."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    return address ^ ((address >> 7 & mask) << 4)


def k_major(operand: np.ndarray, span: int) -> tuple[np.ndarray, int, int]:
    """Shared memory that holds [rows, k] with k contiguous; leading and stride offsets in units of 16 bytes."""
    rows, k = np.indices(operand.shape)
    size, width = operand.itemsize, span or 16
    depth = operand.shape[1] * size
    # Groups of eight rows follow each other; without a swizzle so do the 16-byte columns, one after all rows.
    stride, leading = (8 * width, 16) if span else (128, operand.shape[0] * 16)
    assert not span or depth == span
    byte = k * size
    column = byte if span else byte // 16 * leading + byte % 16
    return (
        place(operand, rows // 8 * stride + rows % 8 * width + column, span),
        leading // 16 if not span else 1,
        stride // 16,
    )


def place(operand: np.ndarray, address: np.ndarray, span: int) -> np.ndarray:
    memory = np.zeros(max(int(address.max()) + operand.itemsize, operand.nbytes), "uint8")
    at = swizzle(address, span)
    for byte in range(operand.itemsize):
        memory[at + byte] = np.ascontiguousarray(operand).view("uint8").reshape(*operand.shape, -1)[:, :, byte]
    return memory


def tiled_load(tensor: np.ndarray, coordinates: Sequence[int], box: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """The box that a tensor copy loads; coordinates, box and steps run from the innermost dimension."""
    extents = [-(-extent // step) for extent, step in zip(box, steps, strict=True)][::-1]
    index = np.indices(extents).reshape(tensor.ndim, -1) * np.array(steps[::-1])[:, None]
    index += np.array(coordinates[::-1])[:, None]
    limits = np.array(tensor.shape)[:, None]
    inside = ((index >= 0) & (index < limits)).all(0)
    values = tensor[tuple(np.clip(index, 0, limits - 1))]
    return np.where(inside, values, 0).reshape(extents)


def tensor_map(argument: int, tensor: np.ndarray, box: Sequence[int], **options: object) -> TensorMap:
    """The map of a whole contiguous array."""
    dims = tensor.shape[::-1]
    strides = tuple(stride for stride in tensor.strides[-2::-1])
    return TensorMap(argument, tensor.itemsize, dims, strides, tuple(box), **options)  # type: ignore[arg-type]


def run(
    emulator: Emulator, source: str, arrays: Sequence[np.ndarray], outputs: Sequence[int] = (1,), *,
    mode: EmulationMode = LATE, threads: int = 128, blocks: int = 1, cluster: int = 1, shared: int = 64 << 10,
    maps: Sequence[TensorMap] = (),
) -> list[np.ndarray]:  # fmt: skip
    """Launches the kernel `k` of a source behind the prelude."""
    return emulator.launch(
        PRELUDE + source, "k", (blocks, 1, 1), (threads, 1, 1), arrays, outputs, dynamic_shared=shared,
        cluster=(cluster, 1, 1), tensor_maps=maps, mode=mode, timeout_s=20,
    )  # fmt: skip
