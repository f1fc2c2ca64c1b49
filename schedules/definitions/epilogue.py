"""The epilogue of a convolution as tensor expressions: see `core.epilogue` for what it computes.

Schedules apply it where an accumulator leaves its registers, so that the convolution's own output is written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from schedules.core.epilogue import INT8, Activation, Epilogue
from schedules.core.problem import Conv2dProblem, Problem

if TYPE_CHECKING:
    from tvm import te
    from tvm.tirx import PrimExpr

ACCUMULATOR = "float32"


def placeholders(problem: Problem) -> dict[str, te.Tensor]:
    """The inputs, by name, in the order of the call."""
    from tvm import te

    return {a.name: te.placeholder(a.shape, name=a.name, dtype=a.dtype) for a in problem.arguments() if not a.output}


def terms_at(problem: Conv2dProblem, given: Mapping[str, te.Tensor], at: Sequence[PrimExpr]) -> list[PrimExpr]:
    """The elements of the terms, among the inputs `given`, that belong to the element `at` of the output."""
    return [given[term.name](*_index(problem, term.axis, at)) for term in problem.epilogue.terms]


def _index(problem: Conv2dProblem, axis: str, at: Sequence[PrimExpr]) -> list[PrimExpr]:
    if axis == "element":
        return list(at)
    if axis == "pixel":
        return [index for number, index in enumerate(at) if number not in problem.channel_axes]
    output = problem.shapes()[2]
    first, *others = problem.channel_axes
    channel = at[first]
    for number in others:
        channel = channel * output[number] + at[number]
    return [channel]


def finish(epilogue: Epilogue, total: PrimExpr, terms: Sequence[PrimExpr]) -> PrimExpr:
    """The output element, in its dtype, of the sum `total`, float32 or int32, and its `terms`."""
    from tvm import tirx

    y = unrounded(epilogue, total, terms)
    if epilogue.out_dtype == "int8":
        low, high = (tirx.const(bound, "float32") for bound in INT8)
        y = tirx.nearbyint(tirx.min(tirx.max(y, low), high))
    return y.astype(epilogue.out_dtype)


def unrounded(epilogue: Epilogue, total: PrimExpr, terms: Sequence[PrimExpr]) -> PrimExpr:
    """The same before saturation and rounding, in `epilogue.work`."""
    from tvm import tirx
    from tvm.tirx.op import fma

    e = epilogue

    def scalar(value: float) -> PrimExpr:
        return tirx.const(int(value) if e.work == "int32" else value, e.work)

    total, *terms = (tirx.convert(part) for part in (total, *terms))
    whole = all(str(part.ty).startswith("int") for part in (total, *terms))
    y = total.astype(e.work)
    if e.scale != 1:
        y = scalar(e.scale) * y
    for term, element in zip(e.terms, terms, strict=True):
        wide = element.astype(e.work)
        if e.work == "int32":
            y = y + scalar(term.factor) * wide
        elif e.scale == term.factor == 1:
            y = y + wide
        else:  # a compiler may contract a product and a sum, or not; never this
            y = fma(scalar(term.factor), wide, y)
    return _activated(e.activation, y, scalar, whole)


def _activated(activation: Activation, y: PrimExpr, scalar: Callable[[float], PrimExpr], whole: bool) -> PrimExpr:
    """`activation` of `y`.  Only what is made of `whole` numbers is no NaN, which max and min would hide."""
    from tvm import tirx

    def bounded(value: PrimExpr, low: float | None, high: float | None) -> PrimExpr:
        if high is not None:
            high = scalar(high)
            value = tirx.min(value, high) if whole else tirx.Select(value > high, high, value)
        if low is not None:
            low = scalar(low)
            value = tirx.max(value, low) if whole else tirx.Select(value < low, low, value)
        return value

    if activation.name == "none":
        return y
    if activation.name == "relu":
        return bounded(y, 0, None)
    if activation.name == "clamp":
        return bounded(y, activation.low, activation.high)
    if activation.name == "silu":
        return y / (scalar(1) + tirx.exp(-y))
    if activation.name == "gelu":
        return scalar(0.5) * y * (scalar(1) + tirx.erf(y * scalar(math.sqrt(0.5))))
    if activation.name == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)), as fast math on CUDA has a tanh of 11 bits, but an exp of 22
        twice = scalar(2 * math.sqrt(2 / math.pi)) * (y + scalar(0.044715) * y * y * y)
        return y / (scalar(1) + tirx.exp(-twice))
    return y * tirx.min(tirx.max(y + scalar(3), scalar(0)), scalar(6)) * scalar(1 / 6)
