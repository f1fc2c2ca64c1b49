"""The end of a convolution: bias, activation, and the cast to the output's dtype.

Schedules apply it where an accumulator leaves its registers, so that the convolution's own output is written once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem

if TYPE_CHECKING:
    from tvm import te
    from tvm.tirx import PrimExpr

ACCUMULATOR = "float32"


def bias_placeholder(problem: FusedConv2dProblem) -> te.Tensor | None:
    """``bias`` (co,) of the problem's dtype, if it has one."""
    from tvm import te

    return te.placeholder((problem.co,), name="bias", dtype=problem.dtype) if problem.bias else None


def finish(problem: FusedConv2dProblem, value: PrimExpr, bias: te.Tensor | None, channel: PrimExpr) -> PrimExpr:
    """activation(value + bias[channel]) of a float32 accumulator `value`, in the problem's dtype."""
    wide = None if bias is None else bias[channel].astype(ACCUMULATOR)
    return finish_sum(problem, value, wide).astype(problem.dtype)


def finish_sum(problem: FusedConv2dProblem, value: PrimExpr, bias: PrimExpr | None) -> PrimExpr:
    """activation(value + bias), all float32."""
    from tvm import tirx

    if bias is not None:
        value = value + bias
    if problem.activation == "relu":
        zero = tirx.const(0, ACCUMULATOR)
        value = tirx.Select(value < zero, zero, value)  # max would turn a NaN into 0
    return value


def finish_reference(
    problem: FusedConv2dProblem, conv: Array, magnitude: Array, bias: Array | None, axis: int
) -> Expected:
    """The float64 output for a float64 convolution and the sum of its absolute products; channels lie on `axis`."""
    if bias is not None:
        shape = [1] * conv.ndim
        shape[axis] = problem.co
        wide = bias.astype(np.float64).reshape(shape)
        conv, magnitude = conv + wide, magnitude + np.abs(wide)
    if problem.activation == "relu":
        conv = np.maximum(conv, 0)
    return Expected(conv, magnitude)
