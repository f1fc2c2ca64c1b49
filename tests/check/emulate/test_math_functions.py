from __future__ import annotations

import math

import numpy as np
import pytest

from schedules.check.emulate import Emulator

INTEGERS = [
    ("__dp4a((int)0x01ff7f80, (int)0x02030405, 10)", 10 + 2 - 3 + 127 * 4 - 128 * 5),
    ("(int)__dp4a(0x01ff7f80u, 0x02030405u, 10u)", 10 + 2 + 255 * 3 + 127 * 4 + 128 * 5),
    ("({ int d; asm volatile(\"dp4a.s32.u32 %0, %1, %2, %3;\""
     " : \"=r\"(d) : \"r\"(0xffffffff), \"r\"(0x01010180), \"r\"(1)); d; })", 1 - 3 - 128),
    ("max(3, 5) * 100 + min(3u, 5u)", 503),
    ("(int)max(1.5f, __builtin_nanf(\"\")) * 10 + (int)fminf(-2.0f, 3.0f)", 8),
    ("__float2int_rn(2.5f) * 100 + __float2int_rz(-2.7f) + __float2int_rn(1e20f) / 2147483647", 199),
    ("__popc(0xf0f0) * 1000 + __clz(1) * 10 + __ffs(8)", 8314),
    ("(int)__byte_perm(0x03020100, 0x07060504, 0x7210)", 0x07020100),
    ("__umulhi(0x80000000u, 6u) + (__brev(1u) >> 31)", 4),
    ("__float_as_int(1.0f)", 0x3F800000),
    ("(int)(sizeof(exp(1.5f)) * 100 + sizeof(abs(-1.5f)) * 10 + sizeof(abs(-1.5)))", 448),
    ("abs(-3) + (int)abs(-3L) * 10 + (int)(abs(-1.5f) * 200) + (int)(abs(-2.5) * 400)", 1333),
    ("isnan(__builtin_nanf(\"\")) * 100 + isinf(__builtin_inf()) * 10 + isfinite(1.0f)", 111),
    ("({ int v = 5; atomicAdd(&v, 3) * 100 + v; })", 508),
    ("({ unsigned v = 5; atomicMax(&v, 9) * 100 + atomicCAS(&v, 9, 1) * 10 + v; })", 591),
    ("({ float v = 1; atomicAdd(&v, 2); (int)v; })", 3),
]  # fmt: skip
FLOATS = [
    ("expf(1.5f)", math.exp(1.5)), ("__expf(1.5f)", math.exp(1.5)), ("exp2f(1.5f)", 2**1.5), ("exp10f(1.5f)", 10**1.5),
    ("logf(3.0f)", math.log(3)), ("__logf(3.0f)", math.log(3)), ("log2f(3.0f)", math.log2(3)),
    ("rsqrtf(3.0f)", 3**-0.5), ("tanhf(0.5f)", math.tanh(0.5)), ("erff(0.5f)", math.erf(0.5)),
    ("__fdividef(1.0f, 3.0f)", 1 / 3), ("powf(2.0f, 0.5f)", 2**0.5), ("__powf(2.0f, 0.5f)", 2**0.5),
    ("__ldg(in) + __sinf(1.0f)", 0.25 + math.sin(1)), ("__int_as_float(0x40490fdb)", math.pi),
    ("({ float r; asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(r) : \"f\"(0.5f)); r; })", 2**0.5),
    ("({ float r; asm volatile(\"{.reg .pred p;\\n setp.ne.b32 p, %2, 0;\\n @!p mov.b32 %0, 0;\\n"
     " @p ld.global.nc.f32 %0, [%1];}\\n\" : \"=f\"(r) : \"l\"((void*)in), \"r\"((int)1)); r; })", 0.25),
]  # fmt: skip


@pytest.fixture(scope="module")
def values(emulator: Emulator) -> tuple[np.ndarray, np.ndarray]:
    statements = [f"ints[{i}] = {text};" for i, (text, _) in enumerate(INTEGERS)]
    statements += [f"floats[{i}] = {text};" for i, (text, _) in enumerate(FLOATS)]
    source = f"""extern "C" __global__ void k(const float* in, int* ints, float* floats) {{
      {" ".join(statements)}
    }}"""
    arrays = [np.full(1, 0.25, "float32"), np.zeros(len(INTEGERS), "int32"), np.zeros(len(FLOATS), "float32")]
    ints, floats = emulator.launch(source, "k", (1, 1, 1), (1, 1, 1), arrays, [1, 2])
    return ints, floats


@pytest.mark.parametrize("index", range(len(INTEGERS)), ids=[text for text, _ in INTEGERS])
def test_integer_functions(index: int, values: tuple[np.ndarray, np.ndarray]) -> None:
    assert values[0][index] == INTEGERS[index][1]


@pytest.mark.parametrize("index", range(len(FLOATS)), ids=[text for text, _ in FLOATS])
def test_float_functions(index: int, values: tuple[np.ndarray, np.ndarray]) -> None:
    assert values[1][index] == pytest.approx(FLOATS[index][1], rel=1e-6)
