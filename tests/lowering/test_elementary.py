"""exp, exp2 and erf on a CPU: right to the last digits, and in vectors wherever a definition asks for them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.lowering import elementary
from tests.conftest import problem_of

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.5, 0.5)


def computed(call: Callable[[tirx.PrimExpr], tirx.PrimExpr], x: np.ndarray) -> np.ndarray:
    """`call` of each number, written out, in float64."""
    a = te.placeholder(x.shape, name="a")
    program = te.create_prim_func([a, te.compute(a.shape, lambda i: call(a[i]))])
    mod = tvm.IRModule({"main": program.with_attr("target", tvm.target.Target("llvm"))})
    mod = elementary.written_out(mod)
    assert not re.search(r"T\.(exp|exp2|erf)\(", mod.script())
    out = tvm.runtime.empty(x.shape)
    tirx.build(mod, "llvm")["main"](tvm.runtime.tensor(x), out)
    return out.numpy().astype(np.float64)


def numbers(low: float, high: float) -> np.ndarray:
    return np.concatenate([np.linspace(low, high, 4096), SPECIAL]).astype(np.float32)


@pytest.mark.parametrize(
    ("call", "exact", "bits"), [(tirx.exp2, np.exp2, 1.0), (tirx.exp, np.exp, math.log(2))], ids=["exp2", "exp"]
)
def test_powers_to_the_last_digits(
    call: Callable[[tirx.PrimExpr], tirx.PrimExpr], exact: Callable[[np.ndarray], np.ndarray], bits: float
) -> None:
    x = numbers(-140 * bits, 130 * bits)
    got = computed(call, x)
    with np.errstate(over="ignore"):
        wanted = exact(x.astype(np.float64))
    normal = (x > -125.9 * bits) & (x < 127.4 * bits)
    assert np.max(np.abs(got[normal] / wanted[normal] - 1)) < 4e-7
    assert np.all(got[x < -126.1 * bits] == 0)
    assert np.all(np.isinf(got[x > 127.6 * bits]))
    assert np.isnan(got[4096]) and got[4097] == np.inf and got[4098] == 0


def test_erf_to_the_last_digits() -> None:
    x = np.concatenate([numbers(-6, 6), numbers(-1e-3, 1e-3)])
    got, wanted = computed(tirx.erf, x), np.array([math.erf(value) for value in x.astype(np.float64)])
    known = ~np.isnan(x)
    assert np.all(np.abs(got - wanted)[known] <= 1.5e-7 * np.abs(wanted[known]))
    assert np.all(np.isnan(got[~known]))
    assert np.all(np.abs(got[np.abs(x) > 4.5]) == 1)  # gelu of a large negative number is zero


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("name", ["conv2d_nchw", "conv2d_nhwc", "conv2d_hwcn", "depthwise_conv2d"])
def test_no_activation_calls_the_c_library(host: Arch, name: str, activation: str) -> None:
    size = dict(n=1, h=8, w=16, ci=16, kh=1, kw=1, dtype="float32", activation=activation)
    if name != "depthwise_conv2d":
        size["co"] = 32
    source = str(build(problem_of(name, **size), host, "cpu").sources["ll"])
    assert not re.search(r"@(expf|erff|llvm\.exp[0-9.])", source)
    assert "llvm.floor.v" in source
