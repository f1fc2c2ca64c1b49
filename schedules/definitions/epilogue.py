"""The epilogue of a convolution as tensor expressions: see `core.epilogue` for what it computes.

Schedules apply it where an accumulator leaves its registers, so that the convolution's own output is written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from schedules.core.epilogue import BOUNDS, Activation, Epilogue
from schedules.core.problem import Conv2dProblem, Problem
from schedules.core.tvm import PrimExpr, te, tirx

ACCUMULATOR = "float32"
WHOLE = 1.5 * 2.0**23  # a float32 as large has no room for a fraction


def placeholders(problem: Problem) -> dict[str, te.Tensor]:
    """The inputs, by name, in the order of the call."""
    return {a.name: te.placeholder(a.shape, name=a.name, dtype=a.dtype) for a in problem.arguments() if not a.output}


def operands_at(problem: Conv2dProblem, given: Mapping[str, te.Tensor], at: Sequence[PrimExpr]) -> list[PrimExpr]:
    """The elements of the operands, among the inputs `given`, that belong to the element `at` of the output."""
    return [given[operand.name](*_index(problem, operand.axis, at)) for operand in problem.epilogue.operands]


def _index(problem: Conv2dProblem, axis: str, at: Sequence[PrimExpr]) -> list[PrimExpr]:
    if axis == "element":
        return list(at)
    if axis == "tensor":
        return [0]
    if axis == "pixel":
        return [index for number, index in enumerate(at) if number not in problem.channel_axes]
    output = problem.shapes()[2]
    first, *others = problem.channel_axes
    channel = at[first]
    for number in others:
        channel = channel * output[number] + at[number]
    return [channel]


def finish(epilogue: Epilogue, total: PrimExpr, operands: Sequence[PrimExpr]) -> PrimExpr:
    """The output element, in its dtype, of the sum `total`, float32 or int32, and its `operands`."""
    if epilogue.out_dtype != "int8":
        return unrounded(epilogue, total, operands).astype(epilogue.out_dtype)
    y, activation = unrounded(epilogue, total, operands), epilogue.activation
    low, high = BOUNDS["int8"]
    low = 0.0 if epilogue.saturates_below else low
    y = y if activation.low >= low else tirx.max(y, tirx.const(low, "float32"))
    y = y if activation.high <= high else tirx.min(y, tirx.const(high, "float32"))
    # the sum is rounded to nearest even, and its lowest byte is the result: GPUs have few units that round and convert
    return tirx.reinterpret("int32", y + tirx.const(WHOLE, "float32")).astype("int8")


def unrounded(epilogue: Epilogue, total: PrimExpr, operands: Sequence[PrimExpr]) -> PrimExpr:
    """The same before rounding and saturation, with a relu that this does, in `epilogue.work`; but of int32 the output
    itself."""
    from tvm.tirx.op import fma

    e = epilogue

    def scalar(value: float | PrimExpr | None) -> PrimExpr:
        if not isinstance(value, int | float):
            return value
        return tirx.const(int(value) if e.work == "int32" else value, e.work)

    scale, terms = e.sorted([tirx.convert(operand) for operand in operands])
    total = tirx.convert(total)
    whole = all(str(part.ty).startswith("int") for part in (total, *(term for _, term in terms)))
    for factor, element in terms:
        total = total + element if factor is None else total
    y = total.astype(e.work)
    if e.scale != 1:  # a compiler may contract a product and a sum, or not, and an fma by 1 is a sum; never these
        y = scalar(scale) * y if e.work == "int32" else fma(scalar(scale), y, scalar(0))
    for term, (factor, element) in zip(e.terms, terms, strict=True):
        wide = element.astype(e.work)
        if factor is None:
            continue
        if e.work == "int32":
            y = y + scalar(factor) * wide
        elif e.scale == term.factor == 1:
            y = y + wide
        else:
            y = fma(scalar(factor), wide, y)
    y = y if e.saturates_below else _activated(e.activation, y, scalar, whole)
    return _saturated(y).astype("int32") if e.out_dtype == "int32" != e.work else y


def _saturated(y: PrimExpr) -> PrimExpr:
    """The float32 `y` rounded to a whole number, to nearest even, that an int32 holds."""
    low, high = (tirx.const(bound, "float32") for bound in BOUNDS["int32"])
    return tirx.nearbyint(tirx.min(tirx.max(y, low), high))


def _activated(activation: Activation, y: PrimExpr, scalar: Callable[[float], PrimExpr], whole: bool) -> PrimExpr:
    """`activation` of `y`.  Only what is made of `whole` numbers is no NaN, which max and min would hide."""
    from tvm.tirx.op import fma

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
    return y * tirx.min(tirx.max(fma(y, scalar(1 / 6), scalar(0.5)), scalar(0)), scalar(1))
