from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from schedules.core.problem import numpy_dtype
from schedules.definitions.epilogue import bias_placeholder, finish, finish_reference
from schedules.operators.conv2d_nchw.definition import NchwProblem


@pytest.mark.parametrize("dtype", NchwProblem.dtypes)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", NchwProblem.activations)
def test_expression_is_the_reference(dtype: str, bias: bool, activation: str) -> None:
    problem = NchwProblem(1, 4, 4, 1, 5, 1, 1, dtype=dtype, bias=bias, activation=activation)
    sums = te.placeholder((3, 5), name="sums")
    addend = bias_placeholder(problem)
    assert (addend is None) == (not bias)
    output = te.compute((3, 5), lambda i, f: finish(problem, sums[i, f], addend, f), name="output")
    tensors = [tensor for tensor in (sums, addend, output) if tensor is not None]
    function = tirx.build(te.create_prim_func(tensors), "llvm")

    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 5), dtype=np.float32)
    values[1, 2], values[2, 0], values[0, 0] = np.nan, np.inf, -np.inf
    numbers = rng.standard_normal(5, dtype=np.float32).astype(numpy_dtype(dtype)) if bias else None
    arrays = [array for array in (values, numbers, np.empty((3, 5), numpy_dtype(dtype))) if array is not None]
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    function["main"](*arguments)

    expected = finish_reference(problem, values.astype(np.float64), np.abs(values), numbers, axis=1)
    got = arguments[-1].numpy().astype(np.float64)
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(got, expected.values, rtol=tolerance, atol=tolerance)
    assert np.isnan(got[1, 2])  # an activation must not hide a NaN
    if bias:
        assert np.all(expected.magnitude[1, 3] >= np.abs(values[1, 3]))


def test_reference_takes_channels_on_any_axis() -> None:
    problem = NchwProblem(1, 2, 2, 1, 3, 1, 1, bias=True)
    bias = np.arange(3, dtype=np.float32)
    for axis, shape in ((1, (1, 3, 2, 2)), (3, (1, 2, 2, 3))):
        found = finish_reference(problem, np.zeros(shape), np.ones(shape), bias, axis)
        np.testing.assert_array_equal(np.moveaxis(found.values, axis, 0).max(axis=(1, 2, 3)), bias)
        np.testing.assert_array_equal(np.moveaxis(found.magnitude, axis, 0).min(axis=(1, 2, 3)), bias + 1)
