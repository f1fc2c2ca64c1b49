from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.check.emulate import Emulator


def dtype_of(name: str) -> Any:
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "nv_bfloat16" else np.dtype("float16")


@pytest.mark.parametrize("name", ["half", "nv_bfloat16"])
def test_every_value_decodes_and_rounds_as_in_numpy(name: str, emulator: Emulator) -> None:
    dtype = dtype_of(name)
    values = np.arange(65536, dtype="uint32").astype("uint16").view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype("float32")
        # halfway to the next value, just below and just above: each rounding decision
        factors = (1 + 2**-12, 1 + 2**-9, 1 - 2**-11, 1 + 2**-8, 1 - 2**-20)
        near = np.concatenate([wide * np.float32(x) for x in factors])
        expected = near.astype(dtype)
    source = f"""extern "C" __global__ void k(const {name}* in, float* wide, const float* near, {name}* narrow) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < 65536) wide[i] = (float)in[i];
      narrow[i] = ({name})near[i];
    }}"""
    arrays = [values, np.zeros_like(wide), near, np.zeros_like(expected)]
    decoded, narrow = emulator.launch(source, "k", (near.size // 1024, 1, 1), (1024, 1, 1), arrays, [1, 3])
    assert np.array_equal(decoded, wide, equal_nan=True)
    same = narrow.view("uint16") == expected.view("uint16")
    assert (same | np.isnan(near)).all()
    assert np.isnan(narrow.astype("float32")[np.isnan(near)]).all()


@pytest.mark.parametrize("name", ["half", "nv_bfloat16"])
def test_arithmetic_rounds_after_every_operation(name: str, emulator: Emulator) -> None:
    dtype = dtype_of(name)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(256).astype(dtype) for _ in range(2))
    source = f"""#include <cuda_fp16.h>
    extern "C" __global__ void k(const {name}* a, const {name}* b, {name}* out) {{
      int t = threadIdx.x;
      volatile {name} sum = a[t] + b[t];
      out[t] = sum;
      out[256 + t] = __hmul(a[t], b[t]) - a[t] / b[t];
      out[512 + t] = a[t] > b[t] ? hexp(a[t]) : __habs(-b[t]);
    }}"""
    (result,) = emulator.launch(source, "k", (1, 1, 1), (256, 1, 1), [a, b, np.zeros(768, dtype)], [2])
    x, y = a.astype("float32"), b.astype("float32")
    assert (result[:256] == (x + y).astype(dtype)).all()
    assert (result[256:512] == ((x * y).astype(dtype) - (x / y).astype(dtype))).all()
    # exp of numpy and of the C library differ in the last bit of a float
    expected = np.where(x > y, np.exp(x), np.abs(y))
    assert np.abs(result[512:].astype("float32") / expected - 1).max() < (2**-7 if name == "nv_bfloat16" else 2**-10)
