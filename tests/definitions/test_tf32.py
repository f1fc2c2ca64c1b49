"""Rounding to TF32: a kernel's numbers beside NumPy's, and what must stay as it is."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import te

from schedules.core.arch import Arch
from schedules.definitions.tf32 import rounded


def test_numbers_are_rounded_to_nearest_and_all_others_stay(host: Arch) -> None:
    r = np.random.default_rng(0)
    words = r.integers(0, 2**32, 4096, dtype=np.uint64).astype("uint32")
    words[:4] = 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F7FFFFF  # infinities, NaN, the largest
    words[4:8] = 0, 0x80000000, 0x3F801000, 0xBF801000  # zeros; halfway: away from zero
    x = words.view("float32")
    given = te.placeholder(x.shape, "float32", "given")
    found = te.compute(x.shape, lambda i: rounded(given[i]), "found")
    function = tvm.compile(tvm.IRModule({"main": te.create_prim_func([given, found])}), host.target())
    y = tvm.runtime.empty(x.shape, "float32")
    function["main"](tvm.runtime.tensor(x), y)
    y = y.numpy()
    finite = np.abs(x) < np.float32(2.0**128 - 2.0**116)
    assert not (y.view("uint32")[finite] & 0x1FFF).any()
    spacing = np.ldexp(1.0, np.maximum(np.frexp(x[finite])[1], -125) - 11)
    assert (np.abs(y[finite].astype("float64") - x[finite]) <= spacing / 2).all()
    np.testing.assert_array_equal(y.view("uint32")[~finite], words[~finite])
    assert list(y.view("uint32")[4:8]) == [0, 0x80000000, 0x3F802000, 0xBF802000]
