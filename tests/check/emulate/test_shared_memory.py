from __future__ import annotations

import numpy as np
import pytest

from schedules.check.emulate import Emulator
from schedules.core.errors import EmulationError


def run(emulator: Emulator, body: str, dynamic: int = 0, blocks: int = 1) -> np.ndarray:
    source = f"""extern "C" __global__ void k(float* out) {{
      int t = threadIdx.x;
      {body}
    }}"""
    arrays = [np.zeros(64, "float32")]
    return emulator.launch(source, "k", (blocks, 1, 1), (32, 1, 1), arrays, [0], dynamic_shared=dynamic)[0]


def test_every_block_starts_with_poison(emulator: Emulator) -> None:
    body = "__shared__ alignas(64) float s[32]; out[blockIdx.x * 32 + t] = s[t]; s[t] = 1;"
    assert np.isnan(run(emulator, body, blocks=2)).all()
    body = "extern __shared__ float d[]; out[blockIdx.x * 32 + t] = d[t]; d[t] = 1;"
    assert np.isnan(run(emulator, body, dynamic=128, blocks=2)).all()


def test_forms_of_declaration(emulator: Emulator) -> None:
    body = """extern __shared__ __align__(16) unsigned char raw[];
      __shared__ volatile float a[2][32], b;
      volatile __shared__ float c[32];
      __shared__ alignas(16) unsigned short d[64];
      float* dynamic = (float*)raw;
      dynamic[t] = t; a[1][t] = 2 * t; b = 5; c[t] = 7; d[t] = 11;
      out[t] = dynamic[t] + a[1][t] + b + c[t] + d[t];"""
    assert (run(emulator, body, dynamic=128)[:32] == 3 * np.arange(32) + 23).all()


def test_kernels_of_one_source_share_nothing(emulator: Emulator) -> None:
    source = "".join(
        f"""extern "C" __global__ void k{i}(float* out) {{
          __shared__ float s[{size}]; int t = threadIdx.x;
          s[t] = {i}; __syncthreads(); out[t] = s[31 - t]; }}"""
        for i, size in enumerate((32, 48))
    )
    for i in range(2):
        (result,) = emulator.launch(source, f"k{i}", (1, 1, 1), (32, 1, 1), [np.zeros(32, "float32")], [0])
        assert (result == i).all()


@pytest.mark.parametrize(
    "body, dynamic, message",
    [
        ("__shared__ float s[32]; s[t + 1] = 0;", 0, "0 bytes past the end of a shared variable of 128 bytes"),
        ("__shared__ float s[32]; __shared__ float q[32]; q[t] = s[t + 32];  out[t] = q[t];", 0, "memory fault"),
        ("extern __shared__ float d[]; d[t + 1024] = 0;", 4096, "past the end of a shared variable of 4096 bytes"),
        ("extern __shared__ float d[]; d[t] = 0;", 0, "launched with none"),
        ("__shared__ float s[60000]; s[t] = 0;", 0, "240000 bytes of shared memory"),
        ("out[t] = __cvta_generic_to_shared(out);", 0, "not in shared memory"),
        (
            '__shared__ float s[4]; unsigned a = __cvta_generic_to_shared(s);\n unsigned x;'
            ' asm volatile("ld.shared.u32 %0, [%1+16];" : "=r"(x) : "r"(a));',
            0,
            "ld.shared: 4 bytes at shared address .* outside",
        ),
    ],
)  # fmt: skip
def test_overruns_are_errors(body: str, dynamic: int, message: str, emulator: Emulator) -> None:
    with pytest.raises(EmulationError, match=message):
        run(emulator, body, dynamic)
