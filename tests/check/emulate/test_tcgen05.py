"""tcgen05 and tensor memory against NumPy, and what a kernel must not do with them."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import Emulator
from schedules.core.errors import EmulationError
from tests.check.emulate.hopper import LATE, MODES, k_major, run

LAYOUT = {0: 0, 128: 2, 64: 4, 32: 6}  # bits 61 to 63 of a descriptor
TYPES = {"f16": 0, "bf16": 1, "u8": 0, "s8": 1}  # of an operand in an instruction descriptor, by its kind
A_BYTES = 16 << 10  # of shared memory in front of B
N = 32  # columns of B in a block
# what `how` says: the instruction and its descriptors, then what is done
NAMES = (
    "shape", "int8", "steps", "a_leading", "a_stride", "b_leading", "b_stride", "layout", "columns", "lane", "alloc",
    "commit", "wait", "after", "wait_load", "before", "dealloc", "relinquish", "change", "both",
)  # fmt: skip
SOURCE = """
__device__ uint64_t operand(const void* p, int leading, int stride, int layout) {
  return (smem(p) & 0x3ffff) >> 4 | uint64_t(leading) << 16 | uint64_t(stride) << 32 | uint64_t(1) << 46 |
         uint64_t(layout) << 61;
}
__device__ void multiply(unsigned d, uint64_t a, uint64_t b, unsigned shape, int add, int int8) {
  if (int8) asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; "
    "tcgen05.mma.cta_group::GROUP.kind::i8 [%0], %1, %2, %3, p; }"
    :: "r"(d), "l"(a), "l"(b), "r"(shape), "r"(add) : "memory");
  else asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; "
    "tcgen05.mma.cta_group::GROUP.kind::f16 [%0], %1, %2, %3, p; }"
    :: "r"(d), "l"(a), "l"(b), "r"(shape), "r"(add) : "memory");
}
__device__ void load_wide(unsigned* d, unsigned at) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {%0, %1, %2, %3}, [%4 + 1048576];"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at));
}
__device__ void load_own(unsigned* d, unsigned at) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at));
}
extern "C" __global__ void k(const uint4* in, unsigned* out, const unsigned* how_all) {
  extern __shared__ __align__(1024) char tile[];
  __shared__ uint64_t bar;
  __shared__ unsigned at;
  struct How { unsigned FIELDS; } how = *(const How*)how_all;
  int t = threadIdx.x, rank = cluster_rank();
  for (int i = t; i < 2048; i += 128) ((uint4*)tile)[i] = in[rank * 2048 + i];
  if (t == 0) { bar_init(&bar, 1); fence_init(); }
  if (CLUSTER > 1) cluster_sync();
  if (t < 32 && how.alloc) {
    asm volatile("tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%0], %1;"
      :: "r"(smem(&at)), "r"(how.columns));
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;");
    if (how.relinquish == 2)
      asm volatile("tcgen05.alloc.cta_group::GROUP.sync.aligned.b32 [%0], %1;"
        :: "r"(smem(&at)), "r"(how.columns));
  }
  fence_async();
  if (CLUSTER > 1) cluster_sync();
  __syncthreads();
  unsigned begin = how.alloc ? at : 0;
  if (t == 0 && (rank == 0 || how.both)) {
    uint64_t a = operand(tile, how.a_leading, how.a_stride, how.layout);
    uint64_t b = operand(tile + A_OFFSET, how.b_leading, how.b_stride, how.layout);
    for (int i = 0; i < how.steps; ++i) multiply(begin, a + 2 * i, b + 2 * i, how.shape, i > 0, how.int8);
    if (how.commit && CLUSTER == 1)
      asm volatile("tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster.b64 [%0];"
        :: "r"(smem(&bar)) : "memory");
    if (how.commit && CLUSTER > 1)
      asm volatile("tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%0], %1;"
        :: "r"(smem(&bar)), "h"((unsigned short)3) : "memory");
    if (how.change) tile[0] ^= 1;
  }
  if (how.wait) wait(&bar, 0);
  if (how.after) asm volatile("tcgen05.fence::after_thread_sync;");
  unsigned lanes = (how.lane ? how.lane - 1 : t / 32 * 32) << 16, own[4], wide[4];
  for (int c = 0; c < N_COLUMNS; c += 4) {
    load_own(own, begin + lanes + c);
    if (how.wait_load) asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int i = 0; i < 4; ++i) out[(rank * 256 + t) * N_COLUMNS + c + i] = own[i];
  }
  for (int c = 0; c < N_COLUMNS; c += 8) {
    load_wide(wide, begin + lanes + c);
    if (how.wait_load) asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int i = 0; i < 4; ++i) out[(rank * 256 + 128 + t) * N_COLUMNS + c / 2 + i] = wide[i];
  }
  if (!how.wait_load) asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  if (how.before) asm volatile("tcgen05.fence::before_thread_sync;");
  if (CLUSTER > 1) cluster_sync();
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;");
  if (t < 32 && how.dealloc)
    asm volatile("tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %0, %1;"
      :: "r"(begin), "r"(how.columns / (how.dealloc == 2 ? 2 : 1)));
}
"""
GOOD = dict(
    steps=1, columns=64, lane=0, alloc=1, commit=1, wait=1, after=1, wait_load=1, before=1, dealloc=1, relinquish=1,
    change=0, both=0,
)  # fmt: skip


def source(group: int) -> str:
    """The kernel, for one block or two together."""
    words = {
        "GROUP": group, "CLUSTER": group, "N_COLUMNS": N * group, "A_OFFSET": A_BYTES, "FIELDS": ", ".join(NAMES),
    }  # fmt: skip
    text = SOURCE
    for name, value in words.items():
        text = text.replace(name, str(value))
    return text


def operands(kind: str, depth: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """A of 128 rows and B of N columns of each block, both [rows, k]."""
    rng, shapes = np.random.default_rng(depth), ((128 * group, depth), (N * group, depth))
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        a, b = (rng.integers(low, high, shape).astype("int8" if kind == "s8" else "uint8") for shape in shapes)
    else:
        dtype = "float16" if kind == "f16" else pytest.importorskip("ml_dtypes").bfloat16
        a, b = ((rng.integers(-32, 32, shape) / 8).astype(dtype) for shape in shapes)
    return a, b


def shape_of(kind: str, group: int, m: int = 128, n: int = N) -> int:
    total = 2 if kind in ("s8", "u8") else 1
    return total << 4 | TYPES[kind] << 7 | TYPES[kind] << 10 | n * group // 8 << 17 | m * group // 16 << 24


def product(
    emulator: Emulator, kind: str = "f16", span: int = 64, group: int = 1, mode: object = LATE, **how: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the kernel gives by either load, and what it should: [rows, columns]."""
    size = 1 if kind in ("s8", "u8") else 2
    depth = (span or 32) // size
    a, b = operands(kind, depth, group)
    data, numbers = np.zeros((group, 32 << 10), "uint8"), dict(GOOD)
    for rank in range(group):
        (a_bytes, *a_offsets), (b_bytes, *b_offsets) = (
            k_major(each[rank * rows : (rank + 1) * rows], span) for each, rows in ((a, 128), (b, N))
        )
        data[rank, : len(a_bytes)], data[rank, A_BYTES : A_BYTES + len(b_bytes)] = a_bytes, b_bytes
    numbers |= dict(zip(("a_leading", "a_stride", "b_leading", "b_stride"), (*a_offsets, *b_offsets), strict=True))
    numbers |= dict(shape=shape_of(kind, group), int8=int(size == 1), steps=depth * size // 32, layout=LAYOUT[span])
    numbers |= how
    given = np.array([numbers[name] for name in NAMES], "uint32")
    out = np.zeros((group, 256, N * group), "uint32")
    (out,) = run(
        emulator, source(group), [data, out, given], mode=mode, blocks=group, cluster=group, shared=32 << 10
    )  # fmt: skip
    found = out.view("int32" if size == 1 else "float32")
    own, wide = found[:, :128].reshape(-1, N * group), found[:, 128:, : N * group // 2]
    thread, register = np.arange(128)[:, None], np.arange(N * group // 2)[None, :]
    rows = thread // 32 * 32 + 16 + thread % 32 // 4 + 8 * (register // 2 % 2)  # the lower half of a warp's lanes
    columns = register // 4 * 8 + thread % 4 * 2 + register % 2
    halves = np.full_like(own, 0).reshape(group, 128, -1)
    for rank in range(group):
        halves[rank][rows, columns] = wide[rank]
    return own, halves.reshape(own.shape), a.astype("float64") @ b.astype("float64").T


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind, span", [("f16", 128), ("f16", 0), ("bf16", 64), ("s8", 32), ("s8", 128), ("u8", 64)])
def test_products(kind: str, span: int, group: int, emulator: Emulator) -> None:
    lower = np.arange(128 * group) % 32 >= 16
    for mode in MODES[:2]:
        own, halves, expected = product(emulator, kind, span, group, mode)
        assert (own == expected).all() and (halves[lower] == expected[lower]).all()


FAULTS: dict[str, tuple[dict[str, int], str]] = {
    "no alloc": (dict(alloc=0), "columns 0 to 31 of tensor memory are not of one allocation"),
    "columns of no power of two": (dict(columns=48), "alloc of 48 columns"),
    "columns beyond the allocation": (dict(shape=shape_of("f16", 1, n=80)), "columns 0 to 79 .* not of one allocation"),
    "alloc after relinquish": (dict(relinquish=2), "alloc after a tcgen05.relinquish_alloc_permit"),
    "no dealloc": (dict(dealloc=0), "without a tcgen05.dealloc"),
    "dealloc of a part": (dict(dealloc=2), "without a tcgen05.dealloc"),
    "lanes of another warp": (dict(lane=1), "lanes 0 to 31 of tensor memory, of which warp 1 reads 32 to 63"),
    "no commit": (dict(commit=0), "deadlock"),
    "no wait": (dict(wait=0), "columns that a tcgen05.mma under way writes"),
    "no fence after the wait": (dict(after=0), "no tcgen05.fence::after_thread_sync"),
    "no fence before the end": (dict(before=0), "no tcgen05.fence::before_thread_sync"),
    "an operand that changes": (dict(change=1), "an operand in shared memory changed"),
    "rows that are not known": (dict(shape=shape_of("f16", 1, m=64)), "no instruction descriptor that the emulator"),
    "another type of sums": (dict(shape=shape_of("s8", 1)), "no instruction descriptor that the emulator knows"),
    "a layout that is not known": (dict(layout=1), "no shared memory descriptor"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, emulator: Emulator) -> None:
    how, message = FAULTS[name]
    with pytest.raises(EmulationError, match=message):
        product(emulator, **how)


def test_loads_are_poison_until_waited_for(emulator: Emulator) -> None:
    own, halves, expected = product(emulator, wait_load=0)
    assert np.isnan(own).all() and np.isnan(halves[16:32]).all() and not np.isnan(expected).any()


def test_two_blocks_are_led_by_the_first(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match="in the second of two blocks"):
        product(emulator, group=2, both=1)
    with pytest.raises(EmulationError, match="no instruction descriptor that the emulator knows for .cta_group::2"):
        product(emulator, group=2, shape=shape_of("f16", 1))
