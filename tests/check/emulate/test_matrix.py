"""Fragment layouts written down from the PTX ISA, independently of the emulator's."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import Emulator
from schedules.core.errors import EmulationError

LANE = np.arange(32)
GROUP, MEMBER = LANE // 4, LANE % 4  # groupID and threadID_in_group of the ISA


def fragment_a(i: int, per: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of element i of A in every lane; `per` elements to a register."""
    register, within = divmod(i, per)
    row = GROUP + (8 if m == 16 and register % 2 else 0)
    return row, MEMBER * per + within + 4 * per * (register // (2 if m == 16 else 1))


def fragment_b(i: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    register, within = divmod(i, per)
    return MEMBER * per + within + 4 * per * register, GROUP


def fragment_c(i: int) -> tuple[np.ndarray, np.ndarray]:
    return GROUP + 8 * (i // 2), MEMBER * 2 + i % 2


def pack(values: np.ndarray) -> np.ndarray:
    """[32 lanes, elements] to 32-bit registers."""
    return np.ascontiguousarray(values).view("uint32")


def round_tf32(values: np.ndarray) -> np.ndarray:
    return (values.astype("float32").view("uint32") & 0xFFFFE000).view("float32")


SHAPES = [
    ("m16n8k16", "f16", "f32"), ("m16n8k16", "f16", "f16"), ("m16n8k8", "f16", "f32"), ("m16n8k8", "f16", "f16"),
    ("m16n8k16", "bf16", "f32"), ("m16n8k8", "bf16", "f32"), ("m16n8k8", "tf32", "f32"), ("m16n8k4", "tf32", "f32"),
    ("m16n8k32", "s8", "s32"), ("m16n8k32", "u8", "s32"), ("m16n8k16", "s8", "s32"), ("m16n8k16", "u8", "s32"),
    ("m8n8k16", "s8", "s32"), ("m8n8k16", "u8", "s32"),
]  # fmt: skip


def random_inputs(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    if kind in ("s8", "u8"):
        return rng.integers(-128 if kind == "s8" else 0, 128 if kind == "s8" else 256, shape).astype(
            "int8" if kind == "s8" else "uint8"
        )
    values = rng.integers(-64, 64, shape) / 8
    if kind == "bf16":
        return values.astype(pytest.importorskip("ml_dtypes").bfloat16)
    return round_tf32(values) if kind == "tf32" else values.astype("float16")


def operands(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"


@pytest.mark.parametrize("shape, kind, sums", SHAPES)
def test_mma_against_numpy(shape: str, kind: str, sums: str, emulator: Emulator) -> None:
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(0)
    a, b = random_inputs(rng, kind, (m, k)), random_inputs(rng, kind, (k, n))
    sum_type = {"f32": "float32", "f16": "float16", "s32": "int32"}[sums]
    c = rng.integers(-50, 50, (m, n)).astype(sum_type)
    per = 4 // a.itemsize
    a_elements, b_elements, c_elements = m * k // 32, k * n // 32, m * n // 32
    registers_a = pack(np.stack([a[fragment_a(i, per, m)] for i in range(a_elements)], 1))
    registers_b = pack(np.stack([b[fragment_b(i, per)] for i in range(b_elements)], 1))
    registers_c = pack(np.stack([c[fragment_c(i)] for i in range(c_elements)], 1))
    counts = [registers_c.shape[1], registers_a.shape[1], registers_b.shape[1]]
    d_count, a_count, b_count = counts
    constraint, c_type = ("f", "float") if sums == "f32" else ("r", "unsigned")
    text = ", ".join(
        [operands(0, d_count), operands(d_count, a_count), operands(d_count + a_count, b_count),
         operands(d_count + a_count + b_count, d_count)]
    )  # fmt: skip
    outputs = ", ".join(f'"={constraint}"(d[{i}])' for i in range(d_count))
    inputs = [f'"r"(a[t * {a_count} + {i}])' for i in range(a_count)]
    inputs += [f'"r"(b[t * {b_count} + {i}])' for i in range(b_count)]
    inputs += [f'"{constraint}"((({c_type}*)c)[t * {d_count} + {i}])' for i in range(d_count)]
    source = f"""extern "C" __global__ void k(unsigned* a, unsigned* b, unsigned* c, {c_type}* out) {{
      int t = threadIdx.x; {c_type} d[4];
      __asm__ __volatile__(
        "mma.sync.aligned.{shape}.row.col.{sums}.{kind}.{kind}.{sums}"
        "{text};\\n"
        : {outputs} : {", ".join(inputs)});
      for (int i = 0; i < {d_count}; ++i) out[t * {d_count} + i] = d[i];
    }}"""
    arrays = [registers_a, registers_b, registers_c, np.zeros_like(registers_c)]
    (packed,) = emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), arrays, [3])
    elements = packed.view(sum_type).reshape(32, c_elements)
    result = np.zeros((m, n), sum_type)
    for i in range(c_elements):
        result[fragment_c(i)] = elements[:, i]
    exact = a.astype("float64") @ b.astype("float64") + c
    assert (result == exact.astype(sum_type)).all()


def test_float_sums_are_cut_off_towards_zero(emulator: Emulator) -> None:
    """1 + 16 x 1.5 x 2^-28 lies three quarters of the way to the next float32."""
    source = """extern "C" __global__ void k(float* out) {
      unsigned one = 0x3f803f80, small = 0x31c031c0, minus = 0xb1c0b1c0;
      float c = 1.0f, e = -1.0f, d[4];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, "
        "{%6,%6,%6,%6};" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(one), "r"(small), "f"(c));
      out[threadIdx.x] = d[0];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, "
        "{%6,%6,%6,%6};" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(one), "r"(minus), "f"(e));
      out[32 + threadIdx.x] = d[0];
    }"""
    (result,) = emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), [np.zeros(64, "float32")], [0])
    assert (result == np.repeat(np.float32([1, -1]), 32)).all()


def test_saturation_and_wrapping(emulator: Emulator) -> None:
    for modifier, expected in ((".satfinite", 2**31 - 1), ("", -(2**31) + 16 * 4 - 1)):
        source = f"""extern "C" __global__ void k(int* out) {{
          int a = 0x01010101, c = 0x7fffffff, d0, d1, d2, d3;
          asm volatile("mma.sync.aligned.m16n8k32.row.col{modifier}.s32.s8.s8.s32 {{%0,%1,%2,%3}}, {{%4,%4,%4,%4}}, "
            "{{%5,%5}}, {{%6,%6,%6,%6}};" : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3) : "r"(a), "r"(2 * a), "r"(c));
          out[threadIdx.x] = d0;
        }}"""
        (result,) = emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), [np.zeros(32, "int32")], [0])
        assert (result == expected).all()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, transpose: bool, emulator: Emulator) -> None:
    outputs = ", ".join(f'"=r"(d[{i}])' for i in range(count))
    modifier = ".trans" if transpose else ""
    source = f"""extern "C" __global__ void k(const short* in, unsigned* out) {{
      __shared__ alignas(16) short s[32 * 24];
      int t = threadIdx.x; unsigned d[4];
      for (int i = 0; i < 24; ++i) s[t * 24 + i] = in[t * 24 + i];
      __syncthreads();
      unsigned addr = __cvta_generic_to_shared(s + (31 - t) * 24 + 8);
      asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {operands(0, count)}, [%{count}];"
        : {outputs} : "r"(addr));
      for (int i = 0; i < {count}; ++i) out[t * {count} + i] = d[i];
    }}"""
    data = np.arange(32 * 24, dtype="int16").reshape(32, 24)
    arrays = [data, np.zeros((32, count), "uint32")]
    (packed,) = emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), arrays, [1])
    result = packed.view("int16").reshape(32, count, 2)
    rows = data[::-1, 8:16]  # the row that each lane points at
    for matrix in range(count):
        tile = rows[8 * matrix : 8 * matrix + 8]
        tile = tile.T if transpose else tile
        for i in range(2):
            assert (result[:, matrix, i] == tile[GROUP, MEMBER * 2 + i]).all()


@pytest.mark.parametrize(
    "condition, address, message",
    [
        ("true", "s + 1", "ldmatrix: shared address .* not aligned to 16"),
        ("true", "s + 512", "ldmatrix: 16 bytes at shared address .* outside"),
        ("t < 16", "s", "divergent ldmatrix"),
    ],
)
def test_misused_ldmatrix(condition: str, address: str, message: str, emulator: Emulator) -> None:
    source = f"""extern "C" __global__ void k(unsigned* out) {{
      __shared__ alignas(16) short s[512]; int t = threadIdx.x;
      if ({condition}) asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%0}}, [%1];"
        : "=r"(out[t]) : "r"((unsigned)__cvta_generic_to_shared({address})));
    }}"""
    with pytest.raises(EmulationError, match=message):
        emulator.launch(source, "k", (1, 1, 1), (32, 1, 1), [np.zeros(32, "uint32")], [0])


def test_a_matrix_instruction_needs_a_whole_warp(emulator: Emulator) -> None:
    source = """extern "C" __global__ void k(unsigned* out) {
      __shared__ alignas(16) short s[512];
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
        : "=r"(out[threadIdx.x]) : "r"((unsigned)__cvta_generic_to_shared(s)));
    }"""
    with pytest.raises(EmulationError, match="divergent ldmatrix"):
        emulator.launch(source, "k", (1, 1, 1), (16, 1, 1), [np.zeros(32, "uint32")], [0])
