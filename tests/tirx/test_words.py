from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from schedules.check.emulate import Emulator
from schedules.tirx.words import pack_8

LIMITS = (0.0, -0.0, 0.4999, 0.5, 1.5, 2.5, 126.5, 127.4999, 127.5, 128, 300, 2**22, 2**24, 2.0**31, 3e38, np.inf)
VALUES = np.array(
    [*LIMITS, *(-value for value in LIMITS), -1.5 * 2**23 - 1, -3 * 2.0**23 + 2, 1e-40, -1e-40], "float32"
)


def packed(relu: bool) -> np.ndarray:
    call: Any = pack_8([T.float32(0)] * 4, relu)
    (source,) = (str(each.value) for each in call.args if "asm" in str(getattr(each, "value", "")))
    name = "pack_relu_s8" if relu else "pack_s8"
    kernel = f"""{source}
    extern "C" __global__ void k(const float* in, unsigned int* out) {{
      int i = threadIdx.x;
      out[i] = {name}(in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]);
    }}"""
    words = len(VALUES) // 4
    with Emulator() as emulator:
        arrays = [VALUES, np.zeros(words, "uint32")]
        (found,) = emulator.launch(kernel, "k", (1, 1, 1), (words, 1, 1), arrays, [1])
    return found.view("int8")


@pytest.mark.parametrize("relu", [False, True])
def test_any_float_is_rounded_to_even_and_saturated(emulation: None, relu: bool) -> None:
    wanted = np.rint(np.clip(VALUES.astype("float64"), 0 if relu else -128, 127))
    np.testing.assert_array_equal(packed(relu), wanted)
