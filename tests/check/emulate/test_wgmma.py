"""wgmma against NumPy models of the shared memory layouts and fragments."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import EmulationMode, Emulator
from schedules.core.errors import EmulationError
from tests.check.emulate.hopper import LATE, MODES, accumulator_index, k_major, mma_function, place, run

LAYOUT = {0: 0, 128: 1, 64: 2, 32: 3}  # bits 62 and 63 of a descriptor
SIZES = {"s8": 1, "u8": 1, "tf32": 4}  # bytes of an element, of others 2
A_BYTES = 16 << 10  # of shared memory in front of B


def mn_major(operand: np.ndarray, span: int) -> tuple[np.ndarray, int, int]:
    """Shared memory that holds [rows, k] with the rows contiguous, in chunks as wide as the swizzle."""
    rows, k = np.indices(operand.shape)
    wide = (span or 16) // 2
    chunk, group = operand.shape[1] * (span or 16), 8 * (span or 16)
    at = rows // wide * chunk + k * (span or 16) + rows % wide * 2
    # Without a swizzle the stride is that between chunks of rows, the leading offset that between groups of eight k.
    leading, stride = (chunk, group) if span else (group, chunk)
    return place(operand, at, span), leading // 16, stride // 16


def product_source(
    n: int, kind: str, a: tuple[int, int, int], b: tuple[int, int, int], steps: int, step_a: int, step_b: int,
    transposed: tuple[int, int] = (0, 0), scale: str = "s > 0", signs: str = "1, 1",
) -> str:  # fmt: skip
    """Copies both operands to shared memory and adds up `steps` instructions; a and b: leading, stride, layout."""
    element = "int" if kind in ("s8", "u8") else "float"
    count = n // 2
    return (
        mma_function(n, kind, transposed=transposed, signs=signs)
        + f"""
    extern "C" __global__ void k(const uint4* in, {element}* out) {{
      extern __shared__ __align__(1024) char tile[];
      int t = threadIdx.x;
      {element} d[{count}];
      for (int i = t; i < 4096; i += 128) ((uint4*)tile)[i] = in[i];
      for (int i = 0; i < {count}; ++i) d[i] = 3;
      fence_async();
      __syncthreads();
      uint64_t a = descriptor(tile, {a[0]}, {a[1]}, {a[2]}), b = descriptor(tile + {A_BYTES}, {b[0]}, {b[1]}, {b[2]});
      mma_fence();
      for (int s = 0; s < {steps}; ++s) mma(d, a + s * {step_a}, b + s * {step_b}, {scale});
      mma_commit();
      mma_wait();
      for (int i = 0; i < {count}; ++i) out[t * {count} + i] = d[i];
    }}"""
    )


def operands(kind: str, n: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """A of 64 rows and B of n columns, both [rows, k]."""
    rng = np.random.default_rng(n)
    shapes = (64, depth), (n, depth)
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        a, b = (rng.integers(low, high, shape).astype("int8" if kind == "s8" else "uint8") for shape in shapes)
        return a, b
    if kind == "tf32":  # eighths, and below them bits that the tensor cores leave out
        a, b = ((rng.integers(-32, 32, shape) / 8).astype("float32") for shape in shapes)
        return tuple((x.view("uint32") | rng.integers(0, 1 << 13, x.shape, dtype="uint32")).view("float32")
                     for x in (a, b))  # fmt: skip
    dtype = "float16" if kind == "f16" else pytest.importorskip("ml_dtypes").bfloat16
    a, b = ((rng.integers(-32, 32, shape) / 8).astype(dtype) for shape in shapes)
    return a, b


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A times B of what the tensor cores take of their elements."""
    a, b = ((x.view("uint32") & 0xFFFFE000).view("float32") if x.itemsize == 4 else x for x in (a, b))
    return a.astype("float64") @ b.astype("float64").T


def product(
    emulator: Emulator,
    source: str,
    n: int,
    memory: tuple[np.ndarray, np.ndarray],
    dtype: str,
    mode: EmulationMode = LATE,
) -> np.ndarray:
    data = np.zeros(64 << 10, "uint8")
    for begin, part in zip((0, A_BYTES), memory, strict=True):
        data[begin : begin + len(part)] = part
    (registers,) = run(emulator, source, [data, np.zeros((128, n // 2), dtype)], mode=mode)
    result = np.zeros((64, n), dtype)
    result[accumulator_index(n)] = registers
    return result


@pytest.mark.parametrize(
    "kind, span, n",
    [("f16", 128, 256), ("f16", 64, 72), ("f16", 32, 8), ("f16", 0, 72), ("bf16", 128, 24), ("s8", 128, 72),
     ("s8", 64, 8), ("s8", 32, 256), ("s8", 0, 40), ("u8", 64, 72), ("tf32", 128, 40), ("tf32", 32, 8)],
)  # fmt: skip
def test_k_major_operands(kind: str, span: int, n: int, emulator: Emulator) -> None:
    size = SIZES.get(kind, 2)
    depth = (span or 32) // size
    a, b = operands(kind, n, depth)
    (a_memory, *a_offsets), (b_memory, *b_offsets) = k_major(a, span), k_major(b, span)
    layout = LAYOUT[span]
    source = product_source(n, kind, (*a_offsets, layout), (*b_offsets, layout), depth * size // 32, 2, 2)
    dtype = "int32" if size == 1 else "float32"
    result = product(emulator, source, n, (a_memory, b_memory), dtype)
    assert (result == exact_product(a, b)).all()


@pytest.mark.parametrize("span", [128, 64, 32, 0])
@pytest.mark.parametrize("transposed", [(1, 1), (0, 1), (1, 0)])
def test_mn_major_operands(span: int, transposed: tuple[int, int], emulator: Emulator) -> None:
    n, depth = 128, (span or 32) // 2
    a, b = operands("f16", n, depth)
    parts = [mn_major(x, span) if flag else k_major(x, span) for x, flag in zip((a, b), transposed, strict=True)]
    steps = [16 * (span or 16) // 16 if flag else 2 for flag in transposed]
    offsets = [(leading, stride, LAYOUT[span]) for _, leading, stride in parts]
    source = product_source(n, "f16", *offsets, depth // 16, *steps, transposed)
    result = product(emulator, source, n, (parts[0][0], parts[1][0]), "float32")
    assert (result == a.astype("float64") @ b.astype("float64").T).all()


def test_scale_and_signs(emulator: Emulator) -> None:
    a, b = operands("f16", 16, 64)
    parts = k_major(a, 128), k_major(b, 128)
    exact = a.astype("float64") @ b.astype("float64").T
    last = a[:, 48:].astype("float64") @ b[:, 48:].astype("float64").T
    for scale, signs, expected in (("1", "1, 1", 3 + exact), ("0", "1, 1", last), ("1", "-1, 1", 3 - exact),
                                   ("1", "-1, -1", 3 + exact)):  # fmt: skip
        source = product_source(16, "f16", (1, 64, 1), (1, 64, 1), 4, 2, 2, scale=scale, signs=signs)
        assert (product(emulator, source, 16, (parts[0][0], parts[1][0]), "float32") == expected).all()


@pytest.mark.parametrize("kind", ["f16", "s8", "tf32"])
def test_a_in_registers(kind: str, emulator: Emulator) -> None:
    n, size = 64, SIZES.get(kind, 2)
    a, b = operands(kind, n, 32 // size)
    memory, leading, stride = k_major(b, 32)
    per, thread = 4 // size, np.arange(128)
    row, first = thread // 32 * 16 + thread % 32 // 4, thread % 4 * per
    words = [
        a[(row + 8 * (word % 2))[:, None], (first + word // 2 * 4 * per)[:, None] + np.arange(per)] for word in range(4)
    ]
    fragments = np.ascontiguousarray(np.stack(words, 1)).view("uint32")
    element = "int" if kind == "s8" else "float"
    source = (
        mma_function(n, kind, a_registers=True)
        + f"""
    extern "C" __global__ void k(const uint4* in, {element}* out, const unsigned* fragments) {{
      extern __shared__ __align__(1024) char tile[];
      int t = threadIdx.x; {element} d[32]; const unsigned* a = fragments + 4 * t;
      for (int i = t; i < {b.nbytes} / 16; i += 128) ((uint4*)tile)[i] = in[i];
      fence_async();
      __syncthreads();
      mma_fence();
      mma(d, a[0], a[1], a[2], a[3], descriptor(tile, {leading}, {stride}, 3), 0);
      mma_commit();
      mma_wait();
      for (int i = 0; i < 32; ++i) out[t * 32 + i] = d[i];
    }}"""
    )
    arrays = [memory, np.zeros((128, 32), "int32" if kind == "s8" else "float32"), fragments]
    (registers,) = run(emulator, source, arrays)
    assert (registers == exact_product(a, b)[accumulator_index(n)]).all()
    early = source.replace("mma_commit();", "mma_commit(); if (t == 77) ((unsigned*)a)[2] ^= 1u << 31;")
    with pytest.raises(EmulationError, match="a register of A changed before a wgmma.wait_group"):
        run(emulator, early, arrays)


def test_what_tf32_has_not(emulator: Emulator) -> None:
    """wgmma takes no MN-major operands of 32 bits, so that the instruction has no immediates for them."""
    source = product_source(8, "tf32", (1, 16, 3), (1, 16, 3), 1, 2, 2).replace("p, 1, 1;", "p, 1, 1, 0, 0;")
    memory = np.zeros(4096, "uint8")
    with pytest.raises(EmulationError, match="wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32"):
        product(emulator, source, 8, (memory, memory), "float32")


# ---- Synchronisation ----

A, B = operands("f16", 64, 64)
GOOD = product_source(64, "f16", (1, 64, 1), (1, 64, 1), 4, 2, 2)


def correct(emulator: Emulator, source: str, mode: EmulationMode) -> bool:
    result = product(emulator, source, 64, (k_major(A, 128)[0], k_major(B, 128)[0]), "float32", mode)
    return bool((result == A.astype("float64") @ B.astype("float64").T).all())


@pytest.mark.parametrize("mode", MODES)
def test_correct_in_every_mode(mode: EmulationMode, emulator: Emulator) -> None:
    assert correct(emulator, GOOD, mode)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("mma_fence();\n", "\n", "wgmma.mma_async without a wgmma.fence before it"),
        ("fence_async();\n", "\n", "ordinary stores wrote to shared memory without a fence.proxy.async"),
        ("mma_wait();\n", "\n", "exits before its wgmma.mma_async is waited for"),
        ("mma_commit();\n", "\n", "exits before its wgmma.mma_async is waited for"),
        ("mma_commit();\n", "mma_commit(); __syncthreads(); tile[t] = 0;\n", "in shared memory changed before"),
        ("mma_wait();\n", 'if (t < 96) mma_wait();\n', "exits before its wgmma.mma_async"),
        ("mma_wait();\n", "mma_wait(); d[0] = 1; mma(d, a, b, 1); mma_commit(); mma_wait();\n", "was written without"),
        ("mma(d, a + s", "if (t < 96) mma(d, a + s", "32 of 128 threads of the warpgroup have not issued"),
        ("mma(d, a + s", "mma(d, a + t / 64 + s", "differ in the instruction or its descriptors"),
        ("descriptor(tile, 1", "descriptor(tile + (60 << 10), 1", "outside the block's shared memory"),
    ],
)  # fmt: skip
def test_wrong_synchronisation(old: str, new: str, message: str, emulator: Emulator) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(EmulationError, match=message):
        correct(emulator, GOOD.replace(old, new), LATE)


def test_accumulators_keep_their_values_until_the_wait(emulator: Emulator) -> None:
    early = GOOD.replace("mma_wait();\n", "").replace("out[t * 32 + i] = d[i];", "out[t * 32 + i] = d[i]; mma_wait();")
    assert not correct(emulator, early, LATE)


def test_a_block_without_a_warpgroup(emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match="the block has 96 threads, not a whole number of warpgroups"):
        run(emulator, GOOD, [np.zeros(64 << 10, "uint8"), np.zeros((128, 32), "float32")], threads=96)


# ---- stmatrix ----


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count: int, transpose: bool, emulator: Emulator) -> None:
    registers = "{" + ", ".join(f"%{i + 1}" for i in range(count)) + "}"
    inputs = ", ".join(f'"r"(in[t * {count} + {i}])' for i in range(count))
    source = f"""extern "C" __global__ void k(const unsigned* in, short* out) {{
      __shared__ alignas(16) short s[32 * 8];
      int t = threadIdx.x;
      asm volatile("stmatrix.sync.aligned.m8n8.x{count}{".trans" if transpose else ""}.shared.b16 [%0], {registers};"
        :: "r"(smem(s + (31 - t) * 8)), {inputs} : "memory");
      __syncthreads();
      for (int i = 0; i < 8; ++i) out[t * 8 + i] = s[(31 - t) * 8 + i];
    }}"""
    data = np.arange(32 * count * 2, dtype="int16").reshape(32, count, 2)
    (result,) = run(emulator, source, [data.view("uint32"), np.zeros((32, 8), "int16")], threads=32)
    lane = np.arange(32)
    for matrix in range(count):
        tile = np.zeros((8, 8), "int16")
        for i in range(2):
            tile[lane // 4, lane % 4 * 2 + i] = data[:, matrix, i]
        assert (result[8 * matrix : 8 * matrix + 8] == (tile.T if transpose else tile)).all()
    assert (result[8 * count :] == -1).all()
