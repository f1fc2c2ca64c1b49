"""References that several operators share."""

from __future__ import annotations

import numpy as np

from schedules.operator import Array
from schedules.problem import Conv2dProblem, Problem, numpy_dtype


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

    One matrix product (co, ci*kh*kw) x (ci*kh*kw, out_h*out_w) for each image, which bounds the memory (im2col).
    """
    p = problem
    flat = weight.astype(np.float64).reshape(p.co, -1)
    columns = np.empty((p.ci, p.kh, p.kw, p.out_h, p.out_w))
    values, magnitude = np.empty((2, p.n, p.co, p.out_h * p.out_w))
    for image in range(p.n):
        padded = np.pad(data[image].astype(np.float64), [(0, 0), (p.pad[0],) * 2, (p.pad[1],) * 2])
        for ry in range(p.kh):
            for rx in range(p.kw):
                y, x = ry * p.dilation[0], rx * p.dilation[1]
                window = padded[:, y : y + p.out_h * p.stride[0], x : x + p.out_w * p.stride[1]]
                columns[:, ry, rx] = window[:, :: p.stride[0], :: p.stride[1]]
        matrix = columns.reshape(flat.shape[1], -1)
        values[image] = flat @ matrix
        magnitude[image] = np.abs(flat) @ np.abs(matrix)
    shape = (p.n, p.co, p.out_h, p.out_w)
    return values.reshape(shape), magnitude.reshape(shape)
