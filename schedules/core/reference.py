"""References that several operators share."""

from __future__ import annotations

import math

import numpy as np

from schedules.core.operator import Array
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
