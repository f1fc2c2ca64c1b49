"""Depthwise convolution: what is computed.

Each of `ci` channels has one filter of kh x kw, and as many channels come out.  By `layout`, data is (n, ci, h, w) and
output (n, ci, out_h, out_w), or both have their channels last.  The filter is (ci, kh, kw) in either: the memory of
PyTorch's (ci, 1, kh, kw), which is the same in both of its formats.  All in `dtype`; sums in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import Conv2dProblem, FusedConv2dProblem
from schedules.core.reference import finished, normal_inputs
from schedules.core.tvm import te
from schedules.definitions.implicit import textbook

inputs = normal_inputs
# axes of data and of output
LAYOUTS = {
    "nchw": (("n", "co", "h", "w"), ("n", "co", "y", "x")),
    "nhwc": (("n", "h", "w", "co"), ("n", "y", "x", "co")),
}


@dataclass(frozen=True)
class DepthwiseProblem(FusedConv2dProblem):
    """A convolution of each of `ci` channels with a filter of its own; `layout` is nchw or nhwc."""

    layouts: ClassVar[tuple[str, ...]] = tuple(LAYOUTS)

    co: int = field(init=False)  # as many as come in
    layout: str = "nchw"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ProblemError(f"layout={self.layout} is not {' or '.join(LAYOUTS)}")
        data, output = LAYOUTS[self.layout]
        for name, value in (("co", self.ci), ("data_axes", data), ("output_axes", output)):
            object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def filter_axes(self) -> tuple[str, ...]:
        return ("co", "kh", "kw")

    @property
    def channels_last(self) -> bool:
        return self.layout == "nhwc"

    @property
    def flops(self) -> int:
        return 2 * self.pixels * self.co * self.kh * self.kw


def definition(problem: DepthwiseProblem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv`` (the sum over kh, kw), ``output``.

    Returns [data, filter, the epilogue's terms, the output].
    """
    return textbook(problem)


def outer_axes(problem: Conv2dProblem) -> tuple[list[str], str]:
    """The axes of the output before rows and columns, and the one that numbers a thread's or a vector's channels."""
    axes = [axis for axis in problem.output_axes if axis not in ("y", "x")]
    return (axes if axes[-1] != problem.output_axes[-1] else axes[:-1]), axes[-1]


def reference(problem: DepthwiseProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64, tap by tap."""
    p = problem
    data, weight, *terms = (array.astype(np.float64) for array in arrays)
    if not p.channels_last:
        data = data.transpose(0, 2, 3, 1)
    padded = np.pad(data, [(0, 0), *((border, border) for border in p.pad), (0, 0)])
    values, magnitude = np.zeros((2, p.n, p.out_h, p.out_w, p.co))
    for ry in range(p.kh):
        for rx in range(p.kw):
            y, x = ry * p.dilation[0], rx * p.dilation[1]
            window = padded[:, y :: p.stride[0], x :: p.stride[1]][:, : p.out_h, : p.out_w]
            part = window * weight[:, ry, rx]
            values, magnitude = values + part, magnitude + np.abs(part)
    if not p.channels_last:
        values, magnitude = (array.transpose(0, 3, 1, 2) for array in (values, magnitude))
    return [finished(p, values, terms, magnitude)]
