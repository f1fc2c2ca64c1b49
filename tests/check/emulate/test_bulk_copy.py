"""Bulk copies against NumPy models of boxes, swizzles and out-of-bounds fill."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator, TensorMap
from schedules.check.emulate.tensor_map import encode_tiled
from schedules.core.errors import EmulationError
from tests.check.emulate.hopper import EARLY, LATE, MODES, run, swizzle, tensor_map, tiled_load


def random_tensor(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(-100, 100, shape).astype(dtype)


def load_source(rank: int, coordinates: tuple[int, ...], bytes_: int) -> str:
    """Loads one box and copies the shared memory out as it lies there."""
    return f"""extern "C" __global__ void k(const char* in, char* out, const __grid_constant__ CUtensorMap map) {{
      extern __shared__ __align__(1024) char tile[];
      __shared__ alignas(8) uint64_t bar;
      int t = threadIdx.x;
      if (t == 0) {{ bar_init(&bar, 1); fence_init(); }}
      __syncthreads();
      if (t == 0) {{
        expect(&bar, {bytes_});
        load_tensor(tile, &map, {", ".join(map(str, coordinates))}, &bar);
      }}
      wait(&bar, 0);
      for (int i = t; i < {bytes_}; i += 128) out[i] = tile[i];
    }}"""


CASES: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = [
    ("float16", (40, 128), (0, 0), (64, 16), (1, 1), 128),
    ("float16", (40, 128), (64, 36), (64, 16), (1, 1), 128),  # rows past the end
    ("float16", (5, 6, 64), (0, -1, -2), (64, 4, 4), (1, 1, 1), 128),
    ("float16", (5, 6, 40), (32, -1, 3), (32, 4, 4), (1, 1, 1), 64),  # the innermost dimension ends inside
    ("int8", (3, 2, 7, 9, 32), (0, -1, 5, 1, 2), (32, 4, 4, 2, 2), (1, 1, 1, 1, 1), 32),
    ("float32", (9, 12, 8), (0, 1, -1), (8, 9, 8), (1, 2, 3), 32),  # every second and third element
    ("float16", (3, 4, 9, 24), (8, -1, 0, 1), (16, 8, 3, 2), (1, 2, 1, 1), 0),
    ("int32", (20, 16), (-4, -3), (12, 8), (1, 1), 0),
    ("uint8", (3, 48), (16, 0), (32, 3), (1, 1), 0),
]


@pytest.mark.parametrize("dtype, shape, coordinates, box, steps, span", CASES)
def test_tensor_loads(
    dtype: str, shape: tuple[int, ...], coordinates: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...],
    span: int, emulator: Emulator,
) -> None:  # fmt: skip
    tensor = random_tensor(shape, dtype)
    model = tiled_load(tensor, coordinates, box, steps).astype(dtype)
    laid_out = np.zeros(model.nbytes, "uint8")
    laid_out[swizzle(np.arange(model.nbytes), span)] = np.ascontiguousarray(model).view("uint8").reshape(-1)
    maps = [tensor_map(0, tensor, box, element_strides=steps, swizzle=span)]
    source = load_source(len(box), coordinates, model.nbytes)
    for mode in (LATE, EARLY):
        (result,) = run(emulator, source, [tensor, np.zeros(model.nbytes, "uint8")], mode=mode, maps=maps)
        assert (result == laid_out).all()


def test_nan_fill(emulator: Emulator) -> None:
    tensor = random_tensor((4, 64), "float16")
    maps = [tensor_map(0, tensor, (64, 2), nan_fill=True)]
    (result,) = run(emulator, load_source(2, (0, 3), 256), [tensor, np.zeros((2, 64), "float16")], maps=maps)
    assert (result[0] == tensor[3]).all() and np.isnan(result[1]).all()


def test_float32_to_tf32(emulator: Emulator) -> None:
    """Rounded to nearest, to even of two; infinities and NaN left alone."""
    one = 0x3F800000
    words = {
        one + 0x0FFF: one, one + 0x1000: one, one + 0x1001: one + 0x2000, one + 0x3000: one + 0x4000,
        0xBF7FFFFF: 0xBF800000, 0x7F7FFFFF: 0x7F800000, 0x7F800000: 0x7F800000, 0x7FFFFFFF: 0x7FFFFFFF, 0x1001: 0x2000,
    }  # fmt: skip
    tensor = np.resize(np.array(list(words), "uint32"), (4, 32)).view("float32")
    maps = [tensor_map(0, tensor, (32, 4), to_tf32=True)]
    (result,) = run(emulator, load_source(2, (0, 0), 512), [tensor, np.zeros((4, 32), "uint32")], maps=maps)
    assert (result == np.resize(np.array(list(words.values()), "uint32"), (4, 32))).all()


# ---- Stores ----

STORE = """
extern "C" __global__ void k(const half* in, half* out, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) half tile[];
  int t = threadIdx.x;
  for (int round = 0; round < 2; ++round) {
    if (t == 0) bulk_wait_read(); /* the tile has been read */
    __syncthreads();
    for (int i = t; i < 64 * 8; i += 128) {
      int at = i * 2; at ^= (at >> 7 & 7) << 4;
      tile[at / 2] = in[round * 512 + i];
    }
    fence_async();
    __syncthreads();
    if (t == 0) { store_tensor2(&map, 0, round * 8 - 3, tile); bulk_commit(); }
  }
  if (t == 0) bulk_wait(); /* at the end */
}
"""


def stored(emulator: Emulator, source: str, mode: EmulationMode) -> bool:
    data = np.random.default_rng(1).standard_normal((16, 64)).astype("float16")
    target = np.full((10, 64), 7, "float16")
    maps = [tensor_map(1, target, (64, 8), swizzle=128)]
    (result,) = run(emulator, source, [data, target], mode=mode, maps=maps)
    return bool((result == data[3:13]).all())  # what lies outside is not written


@pytest.mark.parametrize("mode", MODES)
def test_tensor_stores(mode: EmulationMode, emulator: Emulator) -> None:
    assert stored(emulator, STORE, mode)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("if (t == 0) bulk_wait_read();", "", "overwritten before a wait_group let it be read"),
        ("fence_async();", "", "without a fence.proxy.async"),
        ("if (t == 0) bulk_wait(); /* at the end */", "", "exits before its bulk store has read"),
        ("bulk_commit();", "", "a bulk store that no cp.async.bulk.commit_group follows"),
        ("round * 8 - 3, tile", "round * 8 - 3, tile + 8", "not aligned to 128 bytes"),
        ("&map, 0, round", "&map, 4, round", "illegal instruction: .* innermost coordinate of 4"),
        ("store_tensor2(&map,", "store_tensor2((CUtensorMap*)in,", "not that of a tensor map"),
    ],
)
@pytest.mark.parametrize("mode", [LATE, EARLY])
def test_wrong_stores(mode: EmulationMode, old: str, new: str, message: str, emulator: Emulator) -> None:
    assert STORE.count(old) == 1
    with pytest.raises(EmulationError, match=message):
        stored(emulator, STORE.replace(old, new), mode)


# ---- Plain copies, multicast ----

PLAIN = """
extern "C" __global__ void k(const char* in, char* out) {
  __shared__ alignas(16) char a[512], b[256]; /* a: its own 256 bytes, then those of the other block */
  __shared__ alignas(8) uint64_t bar;
  int t = threadIdx.x; unsigned rank = cluster_rank(), remote, remote_bar;
  if (t == 0) { bar_init(&bar, 1); fence_init(); expect(&bar, 512); }
  cluster_sync();
  if (t == 0) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(smem(a)), "l"(in + rank * 256), "r"(256), "r"(smem(&bar)) : "memory");
    for (int i = 0; i < 256; ++i) b[i] = rank;
    fence_async();
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem(a + 384)), "r"(rank ^ 1));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_bar) : "r"(smem(&bar)), "r"(rank ^ 1));
    for (int part = 0; part < 2; ++part)
      asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(remote - 128 * part), "r"(smem(b)), "r"(128), "r"(remote_bar) : "memory");
  }
  wait(&bar, 0);
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
      :: "l"(out + rank * 512), "r"(smem(a)), "r"(512) : "memory");
    bulk_commit(); bulk_wait();
  }
  cluster_sync();
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_plain_copies(mode: EmulationMode, emulator: Emulator) -> None:
    data = np.random.default_rng(2).integers(9, 200, (2, 256)).astype("uint8")
    output = np.zeros((2, 2, 256), "uint8")
    (result,) = run(emulator, PLAIN, [data, output], mode=mode, threads=32, blocks=2, cluster=2)
    assert (result[:, 0] == data).all() and (result[:, 1] == [[1], [0]]).all()


STORED = """
extern "C" __global__ void k(const char*, unsigned* out) {
  __shared__ alignas(16) unsigned got[8];
  __shared__ alignas(8) uint64_t bar;
  int t = threadIdx.x; unsigned rank = cluster_rank(), to, to_bar;
  if (t == 0) { bar_init(&bar, 1); fence_init(); expect(&bar, 32); }
  cluster_sync();
  if (t < 2) {
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(smem(got + 4 * rank)), "r"(t));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_bar) : "r"(smem(&bar)), "r"(t));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
      :: "r"(to), "r"(10 + rank), "r"(20 + rank), "r"(to_bar) : "memory");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
      :: "r"(to + 8), "l"(rank + (7ull << 32)), "r"(to_bar) : "memory");
  }
  wait(&bar, 0);
  if (t < 8) out[rank * 8 + t] = got[t];
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_asynchronous_stores(mode: EmulationMode, emulator: Emulator) -> None:
    arguments = [np.zeros(1, "uint8"), np.zeros((2, 8), "uint32")]
    (result,) = run(emulator, STORED, arguments, mode=mode, threads=32, blocks=2, cluster=2)
    assert (result == [10, 20, 0, 7, 11, 21, 1, 7]).all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("got + 4 * rank", "got + 4 * rank + 1", "st.async: shared address .* is not aligned to 8 bytes"),
        ('"r"(smem(&bar)), "r"(t)', '"r"(smem(&bar)), "r"(t ^ 1)', "the mbarrier is not in the block"),
        ("wait(&bar, 0);", "", "exits while a copy into its shared memory is under way|reads? "),
        ("cluster_sync();", "", "st.async: block . of the cluster.* may not have begun"),
    ],
)
def test_wrong_asynchronous_stores(old: str, new: str, message: str, emulator: Emulator) -> None:
    assert STORED.count(old) == 1
    arguments = [np.zeros(1, "uint8"), np.zeros((2, 8), "uint32")]
    with pytest.raises(EmulationError, match=message):
        run(emulator, STORED.replace(old, new), arguments, mode=LATE, threads=32, blocks=2, cluster=2)


MULTICAST = """
extern "C" __global__ void k(const half* in, half* out, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) half tile[];
  __shared__ alignas(8) uint64_t bar;
  int t = threadIdx.x; unsigned rank = cluster_rank();
  if (t == 0) { bar_init(&bar, 1); fence_init(); expect(&bar, 2048); }
  cluster_sync();
  if (t == 0) load_tensor_multicast(tile + rank * 512, &map, 0, rank * 8, &bar, 3);
  wait(&bar, 0);
  for (int i = t; i < 1024; i += 128) out[rank * 1024 + i] = tile[i];
  cluster_sync();
}
"""


def test_multicast(emulator: Emulator) -> None:
    data = random_tensor((16, 64), "float16")
    for mode in MODES:
        arguments = [data, np.zeros((2, 16, 64), "float16")]
        (result,) = run(
            emulator, MULTICAST, arguments, mode=mode, blocks=2, cluster=2, maps=[tensor_map(0, data, (64, 8))]
        )
        assert (result == data).all()


# ---- A pipeline ----

PIPELINE = """
extern "C" __global__ void k(const half* in, half* out, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) half stages[];
  __shared__ alignas(8) uint64_t full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) for (int i = 0; i < 2; ++i) { bar_init(&full[i], 1); bar_init(&empty[i], 128); }
  fence_init();
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 6; ++i) {
        wait(&empty[i % 2], i / 2 % 2 ^ 1);
        expect(&full[i % 2], 1024);
        load_tensor(stages + i % 2 * 512, &map, 0, i * 8, &full[i % 2]);
      }
  } else {
    for (int i = 0; i < 6; ++i) {
      wait(&full[i % 2], i / 2 % 2);
      for (int j = t; j < 512; j += 128) out[i * 512 + j] = stages[i % 2 * 512 + (j ^ 7)];
      arrive(&empty[i % 2]); /* the stage has been read */
    }
  }
}
"""


def pipeline(emulator: Emulator, source: str, mode: EmulationMode) -> bool:
    data = random_tensor((48, 64), "float16")
    maps = [tensor_map(0, data, (64, 8))]
    (result,) = run(emulator, source, [data, np.zeros_like(data)], mode=mode, threads=160, maps=maps)
    return bool((result.reshape(-1) == data.reshape(-1)[np.arange(data.size) ^ 7]).all())


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_is_correct_in_every_mode(mode: EmulationMode, emulator: Emulator) -> None:
    assert pipeline(emulator, PIPELINE, mode)


@pytest.mark.parametrize(
    "old, new, seen_by",
    [
        ("wait(&full[i % 2], i / 2 % 2);", "", LATE),
        ("wait(&full[i % 2], i / 2 % 2);", "wait(&full[i % 2], i / 2 % 2 ^ 1);", LATE),
        ("wait(&empty[i % 2], i / 2 % 2 ^ 1);", "", EARLY),
        ("i / 2 % 2 ^ 1", "i / 2 % 2", LATE),
        ("fence_init();", "", LATE),
        ("expect(&full[i % 2], 1024);", "expect(&full[i % 2], 512);", LATE),
        ("expect(&full[i % 2], 1024);", "expect(&full[i % 2], 2048);", LATE),
        ("expect(&full[i % 2], 1024);", "arrive(&full[i % 2]);", LATE),
        ("&map, 0, i * 8", "&map, 4, i * 8", LATE),
        ("full[i % 2]);\n      }", "full[0]);\n      }", LATE),
        ("i < 6; ++i) {\n        wait", "i < 7; ++i) {\n        wait", LATE),
        ("i < 6; ++i) {\n        wait", "i < 5; ++i) {\n        wait", LATE),
    ],
)
def test_wrong_pipelines_are_seen(old: str, new: str, seen_by: EmulationMode, emulator: Emulator) -> None:
    assert PIPELINE.count(old) == 1
    try:
        assert not pipeline(emulator, PIPELINE.replace(old, new), seen_by)
    except EmulationError as error:
        assert "\n" not in str(error) and "still running" not in str(error)


# ---- Maps ----

GOOD: dict[str, Any] = {"argument": 0, "element_bytes": 2, "dims": (64, 8), "strides": (128,), "box": (64, 8)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (8,) * 6}, "rank 6"),
        ({"strides": (120,)}, "multiples of 16 bytes"),
        ({"strides": ()}, "with 0 strides"),
        ({"box": (64, 257)}, "at most 256"),
        ({"box": (4, 8)}, "rows of 8 bytes"),
        ({"element_strides": (2, 1)}, "element strides"),
        ({"swizzle": 64}, "rows of 128 bytes in a swizzle of 64"),
        ({"box": (16, 8), "swizzle": 64}, "not emulated"),
        ({"swizzle": 48}, "a swizzle of 48"),
        ({"dims": (0, 8)}, "dimensions"),
        ({"to_tf32": True}, "elements of 2 bytes to TF32"),
    ],
)
def test_maps_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorMap(**{**GOOD, **change}).encode(1024)


def test_the_arguments_of_the_host_function() -> None:
    expected = TensorMap(0, 2, (64, 8, 3), (128, 1024), (64, 4, 1), (1, 2, 1), 128).encode(4096)
    numbers = [64, 8, 3, 128, 1024, 64, 4, 1, 1, 2, 1, 0, 3, 2, 0]
    assert encode_tiled(16, 3, 4096, numbers) == expected
    assert len(expected) == 128
    expected = TensorMap(0, 4, (64, 8, 3), (128, 1024), (32, 4, 1), (1, 2, 1), 128, to_tf32=True).encode(4096)
    assert encode_tiled(32, 3, 4096, [*numbers[:5], 32, *numbers[6:], 11]) == expected
    for wrong, message in (
        (numbers[:-1], "with 14 numbers"),
        ([*numbers, 12], "with 16 numbers"),
        ([*numbers[:11], 1, 3, 2, 0], "interleave 1"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_tiled(16, 3, 4096, wrong)
    with pytest.raises(ValueError, match="not 16-byte aligned"):
        encode_tiled(16, 3, 4104, numbers)
