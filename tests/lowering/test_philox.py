from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

from schedules.build.builder import compiled
from schedules.check.verify import emulator
from schedules.core.arch import Arch
from schedules.core.philox import words
from schedules.lowering import philox

STATES = [(0, 0), (2**63 - 1, 2**62 + 4), (-(2**63) + 5, 2**34), (-1, -4)]
FIRSTS = [0, 4 * (2**32 - 3), 2**43]
COUNT = 64


def drawn(word: int | None) -> Schedule:
    """(state, first) -> a word of each element; only the words `word` of counters, or all."""
    state, first = te.placeholder((2,), "int64", name="state"), te.placeholder((1,), "int64", name="first")
    size, step, before = (COUNT, 1, 0) if word is None else (COUNT // 4, 4, word)
    made = te.compute(
        (size,), lambda i: philox.word(state[0], state[1], first[0] + i.astype("int64") * step + before), name="made"
    )
    return Schedule(te.create_prim_func([state, first, made]))


@pytest.mark.parametrize("word", [None, 0, 1, 2, 3])
def test_on_a_cpu_in_lanes_or_not(host: Arch, word: int | None) -> None:
    sch = drawn(word)
    if word is not None:
        sch.vectorize(sch.split(sch.get_loops("made")[0], [None, 8])[1])
    function = compiled(sch.mod, host)["main"]
    for state in STATES:
        for first in FIRSTS:
            wanted = words(*state, np.arange(first, first + COUNT))
            got = tvm.runtime.tensor(np.zeros(COUNT if word is None else COUNT // 4, np.uint32))
            function(*(tvm.runtime.tensor(np.array(a, np.int64)) for a in (state, [first])), got)
            np.testing.assert_array_equal(got.numpy(), wanted if word is None else wanted[word::4])


def test_lanes_are_multiplied_at_once(host: Arch) -> None:
    sch = drawn(2)
    sch.vectorize(sch.split(sch.get_loops("made")[0], [None, 8])[1])
    code = compiled(sch.mod, host).inspect_source("ll")
    assert code.count("mul nuw <8 x i64>") + code.count("mul <8 x i64>") >= 15


def test_in_cuda(emulation: None) -> None:
    source = (
        philox.SOURCE
        + """extern "C" __global__ void k(const long long* states, const long long* firsts, unsigned* out) {
          const long long element = firsts[blockIdx.y] + threadIdx.x, *state = states + 2 * blockIdx.x;
          out[(blockIdx.x * gridDim.y + blockIdx.y) * blockDim.x + threadIdx.x] =
              philox(state[0], state[1], element >> 2, (int)(element & 3));
        }"""
    )
    arrays = [np.array(STATES, np.int64), np.array(FIRSTS, np.int64)]
    out = np.zeros((len(STATES), len(FIRSTS), COUNT), np.uint32)
    grid, block = (len(STATES), len(FIRSTS), 1), (COUNT, 1, 1)
    (got,) = emulator().launch(source, "k", grid, block, [*arrays, out], [2])
    wanted = [[words(*state, np.arange(first, first + COUNT)) for first in FIRSTS] for state in STATES]
    np.testing.assert_array_equal(got, wanted)
