"""References that several operators share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from schedules.core.epilogue import BOUNDS, Activation, Term
from schedules.core.operator import Array, Expected
from schedules.core.problem import Conv2dProblem, Problem, numpy_dtype

COLUMNS = 2**24  # float64 elements of the matrix of several images


def normal_inputs(problem: Problem, rng: np.random.Generator) -> list[Array]:
    """Every input normally distributed, in its dtype."""
    return [
        rng.standard_normal(argument.shape, dtype=np.float32).astype(numpy_dtype(argument.dtype))
        for argument in problem.arguments()
        if not argument.output
    ]


def convolve(problem: Conv2dProblem, data: Array, weight: Array) -> tuple[Array, Array]:
    """The convolution of data (n, ci, h, w) with weight (co, ci, kh, kw) in float64, and the sum of the absolute
    products, both (n, co, out_h, out_w).

    One matrix product (pixels, kh*kw*ci) x (kh*kw*ci, co) for as many images as COLUMNS has room for (im2col).
    Channels are innermost, so that what is copied lies together; the results are views of arrays in that order.
    """
    p = problem
    flat = np.ascontiguousarray(weight.transpose(2, 3, 1, 0), np.float64).reshape(-1, p.co)
    bound = np.abs(flat)
    shape = (p.out_h, p.out_w, p.kh, p.kw, p.ci)
    images = min(p.n, max(1, COLUMNS // math.prod(shape)))
    padded = np.zeros((images, p.h + 2 * p.pad[0], p.w + 2 * p.pad[1], p.ci))
    inside = padded[:, p.pad[0] : p.pad[0] + p.h, p.pad[1] : p.pad[1] + p.w]
    # a kernel of one tap that skips no pixel needs no copy
    columns = padded if padded.shape == (images, p.out_h, p.out_w, p.ci) else np.empty((images, *shape))
    values, magnitude = np.empty((2, p.n, p.out_h * p.out_w, p.co))
    for start in range(0, p.n, images):
        count = min(images, p.n - start)
        inside[:count] = data[start : start + count].transpose(0, 2, 3, 1)
        if columns is not padded:
            for ry in range(p.kh):
                for rx in range(p.kw):
                    y, x = ry * p.dilation[0], rx * p.dilation[1]
                    window = padded[:count, y : y + p.out_h * p.stride[0], x : x + p.out_w * p.stride[1]]
                    columns[:count, :, :, ry, rx] = window[:, :: p.stride[0], :: p.stride[1]]
        matrix = columns[:count].reshape(-1, len(flat))
        np.matmul(matrix, flat, out=values[start : start + count].reshape(-1, p.co))
        np.abs(matrix, out=matrix)
        np.matmul(matrix, bound, out=magnitude[start : start + count].reshape(-1, p.co))
    placed = (array.reshape(p.n, p.out_h, p.out_w, p.co).transpose(0, 3, 1, 2) for array in (values, magnitude))
    return next(placed), next(placed)


def finished(
    problem: Conv2dProblem, total: Array, operands: Sequence[Array], magnitude: Array | None = None
) -> Expected:
    """The output for the sums `total`, in the output's layout, and the epilogue's `operands`.

    Of float64 sums, with `magnitude` the sums of the absolute products, it is computed in float64.  Of whole sums it is
    exact as far as the activation is: see `core.epilogue`.
    """
    e = problem.epilogue
    scale, terms = e.sorted([_placed(problem, *given, total.shape) for given in zip(e.operands, operands, strict=True)])
    if magnitude is not None:
        y, bound = scale * total, np.abs(scale) * magnitude
        for factor, value in terms:
            wide = value.astype(np.float64)
            y, bound = y + factor * wide, bound + np.abs(factor * wide)
        return Expected(activated(e.activation, y), e.activation.slope * bound)
    for _, value in (each for each in terms if each[0] is None):
        total = (total + value.astype(np.int64)).astype(np.int32)
    terms = [each for each in terms if each[0] is not None]
    if e.work == "int32":
        whole = int(scale) * total.astype(np.int64)
        for factor, value in terms:
            whole = whole + int(factor) * value.astype(np.int64)
        y = activated(e.activation, whole.astype(np.int32).astype(np.float64))
    else:
        single = np.asarray(scale, np.float32) * total.astype(np.float32)
        for factor, value in terms:
            single = fma(np.asarray(factor, np.float32), value.astype(np.float32), single)
        y = single.astype(np.float64)
        if e.activation.name == "hardswish":
            sixth, half = np.float32(1 / 6), np.float32(0.5)
            y = y * np.clip(fma(sixth, single, half), 0, 1)
        else:
            y = activated(e.activation, y)
        if e.activation.exact:
            y = y.astype(np.float32).astype(np.float64)  # a bound is rounded
        else:
            return Expected(y, e.activation.slope * np.abs(single.astype(np.float64)))
    if e.out_dtype in BOUNDS and e.work == "float32":
        y = np.rint(np.clip(y, *BOUNDS[e.out_dtype]))
    return Expected(y, np.zeros((1,) * y.ndim))


def _placed(problem: Conv2dProblem, term: Term, array: Array, output: Sequence[int]) -> Array:
    """The `array` of an operand with an axis for each of the `output`."""
    if term.axis == "element":
        return array
    if term.axis == "tensor":
        return array.reshape([1] * len(output))
    of_channel = term.axis == "channel"
    return array.reshape([n if (axis in problem.channel_axes) == of_channel else 1 for axis, n in enumerate(output)])


def activated(activation: Activation, y: Array) -> Array:
    """`activation` of float64 numbers."""
    if activation.name == "none":
        return y
    if activation.name == "relu":
        return np.maximum(y, 0)
    if activation.name == "clamp":
        return np.clip(y, activation.low, activation.high)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation.name == "silu":
            return y / (1 + np.exp(-y))
        if activation.name == "gelu":
            erf = np.fromiter(map(math.erf, (y / math.sqrt(2)).flat), np.float64, y.size)  # NumPy has none
            return y / 2 * (1 + erf.reshape(y.shape))
        if activation.name == "gelu_tanh":
            return y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        return y * np.clip(y + 3, 0, 6) / 6


def fma(a: Array | np.float32, b: Array, c: Array | np.float32) -> Array:
    """a * b + c of float32 rounded once.

    The product is exact in float64; the sum is rounded to odd there, from which rounding to float32 is that of the
    exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
    """
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    even = total.view(np.int64) & 1 == 0
    toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, toward, total).astype(np.float32)
