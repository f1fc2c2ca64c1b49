"""The epilogue: int32 sum, per-channel bias and residual to one output element.

In float32, with the order of operations fixed, so that int8 is the same bit for bit everywhere::

    y = alpha * conv                  conv rounded to float32, then one rounded product
    y = fma(beta, bias, y)            if there is a bias; bias rounded to float32
    y = fma(gamma, residual, y)       if there is a residual

The multiply-adds are explicit: a compiler contracts ``a * b + c`` when it likes, but never an operand of an fma.
Then relu, and for int8 saturation and rounding to nearest even.  int32 output is computed in int32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from schedules.core.operator import Array

if TYPE_CHECKING:
    from tvm.tirx import PrimExpr

    from schedules.operators.conv2d_nchw32.definition import Nchw32Problem

INT8 = (-128, 127)


def epilogue(problem: Nchw32Problem, total: PrimExpr, bias: PrimExpr | None, residual: PrimExpr | None) -> PrimExpr:
    """One output element, in `problem.out_dtype`, from the int32 sum `total` and its bias and residual."""
    from tvm import tirx

    y = unrounded(problem, total, bias, residual)
    if problem.out_dtype == "int8":
        low, high = (tirx.const(bound, "float32") for bound in INT8)
        y = tirx.nearbyint(tirx.min(tirx.max(y, low), high)).astype("int8")
    return y


def unrounded(problem: Nchw32Problem, total: PrimExpr, bias: PrimExpr | None, residual: PrimExpr | None) -> PrimExpr:
    """The same before saturation and rounding: float32, or int32 where the output is."""
    from tvm import tirx
    from tvm.tirx.op import fma as multiply_add

    p = problem
    work = "int32" if p.out_dtype == "int32" else "float32"

    def scalar(value: float) -> PrimExpr:
        return tirx.const(int(value) if work == "int32" else value, work)

    y = total if work == "int32" else total.astype(work)
    if p.alpha != 1:
        y = scalar(p.alpha) * y
    for factor, term in ((p.beta, bias), (p.gamma, residual)):
        if term is not None:
            wide = term.astype(work)
            y = y + scalar(factor) * wide if work == "int32" else multiply_add(scalar(factor), wide, y)
    if p.activation == "relu":
        y = tirx.max(y, scalar(0))
    return y


def greatest(problem: Nchw32Problem) -> float:
    """No result is greater before it is rounded, whatever the data, bias and residual."""
    p = problem
    terms = [(p.alpha, p.ci * p.kh * p.kw * 2.0**14)]
    terms += [(p.beta, 2.0**31)] if p.bias else []
    terms += [(p.gamma, 2.0**7 if p.out_dtype == "int8" else math.inf)] if p.residual else []
    return sum(abs(factor) * term for factor, term in terms if factor) * (1 + 2.0**-20)  # sums are rounded


def epilogue_reference(problem: Nchw32Problem, total: Array, bias: Array | None, residual: Array | None) -> Array:
    """The same in NumPy, as float64; `bias` broadcasts against the int64 sums `total`."""
    p = problem
    if p.out_dtype == "int32":
        y = int(p.alpha) * total
        for factor, term in ((p.beta, bias), (p.gamma, residual)):
            if term is not None:
                y = y + int(factor) * term.astype(np.int64)
        y = y.astype(np.int32)
        return (np.maximum(y, 0) if p.activation == "relu" else y).astype(np.float64)
    single = np.float32(p.alpha) * total.astype(np.float32)
    for factor, term in ((p.beta, bias), (p.gamma, residual)):
        if term is not None:
            single = fma(np.float32(factor), term.astype(np.float32), single)
    if p.activation == "relu":
        single = np.maximum(single, np.float32(0))
    if p.out_dtype == "int8":
        single = np.rint(np.clip(single, *INT8))
    return single.astype(np.float64)


def fma(a: np.float32, b: Array, c: Array) -> Array:
    """a * b + c of float32 rounded once.

    The product is exact in float64; the sum is rounded to odd there, from which rounding to float32 is that of the
    exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    product, addend = np.broadcast_arrays(np.float64(a) * b.astype(np.float64), c.astype(np.float64))
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) & 1 == 0
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, toward, total).astype(np.float32)
