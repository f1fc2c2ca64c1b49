from __future__ import annotations

import numpy as np
import pytest
import tvm

from schedules.build.present import to_device
from schedules.check.device_judge import THREADS, DeviceJudge, _program, blocks
from schedules.check.emulate.serial import serialize
from schedules.core.arch import Arch
from schedules.core.operator import Expected
from schedules.core.problem import Argument, numpy_dtype
from schedules.core.tolerance import compare, limits
from tests.conftest import problem_of

WRONG = [None, 0.0, 3.0, np.nan, np.inf, -np.inf]


def worst_by_program(argument: Argument, got: np.ndarray, expected: Expected, arch: Arch) -> float:
    """The comparison's program, run on the CPU with its threads as loops."""
    from schedules.build.builder import compiled

    values, allowed = (array.reshape(-1) for array in limits(expected, argument.dtype))
    module = compiled(serialize(tvm.IRModule({"main": _program(argument.dtype, blocks(arch))})), arch)
    worst = tvm.runtime.tensor(np.zeros(THREADS * blocks(arch)))
    module["main"](*(tvm.runtime.tensor(array) for array in (got.reshape(-1), values, allowed)), worst)
    return float(np.max(worst.numpy()))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_it_judges_as_the_host_does(host: Arch, dtype: str) -> None:
    random = np.random.default_rng(0)
    argument = Argument("y", (37, 5, 3), dtype, output=True)
    values = random.standard_normal((37, 5, 3)) * 3
    values = np.round(values) if dtype == "int8" else values
    expected = Expected(values, np.abs(values))
    for wrong in WRONG if dtype != "int8" else [None, 3.0]:
        got = values.astype(numpy_dtype(dtype))
        if wrong is not None:
            got[30, 2, 1] = got[30, 2, 1] + 3 if dtype == "int8" else wrong
        found = worst_by_program(argument, got, expected, host)
        assert found == pytest.approx(compare(got, expected, dtype).error)
        assert (found <= 1) == (wrong is None)


def test_special_values_must_stand_where_the_reference_has_them(host: Arch) -> None:
    argument = Argument("y", (7,), "float16", output=True)
    values = np.array([np.nan, np.inf, -np.inf, 1e6, 0.0, 1.0, 65536])  # the fourth is beyond float16
    expected = Expected(values, np.array([0.0, 0, 0, 1, 0, 1, 1]))
    right = np.array([np.nan, np.inf, -np.inf, np.inf, 0, 1, np.inf], np.float16)
    assert worst_by_program(argument, right, expected, host) <= 1
    for index in range(4):
        got = right.copy()
        got[index] = 2.0
        assert worst_by_program(argument, got, expected, host) == np.inf


def test_a_reference_that_repeats(host: Arch) -> None:
    argument = Argument("y", (9, 4), "float32", output=True)
    values = np.random.default_rng(0).standard_normal((3, 4))
    expected = Expected(values, np.abs(values))
    got = np.tile(values, (3, 1)).astype(np.float32)
    assert worst_by_program(argument, got, expected, host) <= 1
    got[8, 3] += 1
    assert worst_by_program(argument, got, expected, host) > 1


def test_one_program_serves_all_extents(host: Arch) -> None:
    """Of 2^31 elements and more too: a build for each was refused at that, and was most of a comparison's time."""
    program = _program("bfloat16", blocks(host))
    text = program.script()
    assert 'got: T.Buffer((size,), "bfloat16")' in text and "T.Div(size + T.int64(" in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_on_the_device(gpu: Arch, dtype: str) -> None:
    problem = problem_of("softmax", rows=1000, cols=777, dtype=dtype)
    random = np.random.default_rng(0)
    values = random.standard_normal((1000, 777))
    expected = Expected(values, np.abs(values))
    judge = DeviceJudge(problem, gpu, [expected])
    got = values.astype(dtype)
    assert judge.error([to_device(got, gpu)]) == pytest.approx(compare(got, expected, dtype).error)
    for index in [(0, 0), (999, 776), (500, 3)]:
        bad = got.copy()
        bad[index] = np.nan
        assert judge.error([to_device(bad, gpu)]) == np.inf
    judge.restore()
    assert judge.error([to_device(got, gpu)]) <= 1
