"""Convolution over NCHW data: what is computed.

data (n, ci, h, w), filter (co, ci, kh, kw), bias (co,) if there is one, output (n, co, out_h, out_w), all in `dtype`;
sums in float32.  With ``filter_layout=hwoi`` the filter comes packed, (kh, kw, co, ci), as `packing.pack_filter` makes
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedules.core.errors import ProblemError
from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem
from schedules.core.reference import convolve, finished, normal_inputs
from schedules.core.tvm import te
from schedules.definitions.implicit import textbook
from schedules.operators.conv2d_nchw.packing import unpack_filter
from schedules.steps.tiles import widest_vector

inputs = normal_inputs


@dataclass(frozen=True)
class NchwProblem(FusedConv2dProblem):
    """A convolution of NCHW data; `filter_layout` is oihw, (co, ci, kh, kw), or packed hwoi, (kh, kw, co, ci)."""

    data_axes = ("n", "ci", "h", "w")
    output_axes = ("n", "co", "y", "x")
    filter_layouts: ClassVar[tuple[str, ...]] = ("oihw", "hwoi")

    filter_layout: str = "oihw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter_layout not in self.filter_layouts:
            raise ProblemError(f"filter_layout={self.filter_layout} is not {' or '.join(self.filter_layouts)}")

    @property
    def packed(self) -> bool:
        """Whether the filter is packed."""
        return self.filter_layout == "hwoi"

    @property
    def reduction(self) -> int:
        """Products in one output element."""
        return self.ci * self.kh * self.kw

    @property
    def filter_axes(self) -> tuple[str, ...]:
        return ("kh", "kw", "co", "ci") if self.packed else ("co", "ci", "kh", "kw")


def definition(problem: NchwProblem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv`` (the sum over ci, kh, kw), ``output``.

    Returns [data, filter, the epilogue's terms, the output].
    """
    return textbook(problem)


@dataclass(frozen=True)
class Image:
    """The pixels of one channel of one image as a convolution sees them: those of 1x1 kernels are one row."""

    size: tuple[int, int]  # (h, w)
    out: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]


def image_of(problem: NchwProblem) -> Image:
    """The image of `problem`; where every output pixel is an input pixel, all of them in one row."""
    p = problem
    if p.pointwise:
        return Image((1, p.h * p.w), (1, p.h * p.w), p.stride, p.pad)
    return Image((p.h, p.w), (p.out_h, p.out_w), p.stride, p.pad)


def weight_vector(problem: NchwProblem, limit: int) -> int:
    """How many neighbouring weights along k one load may bring: of a packed filter, one."""
    return 1 if problem.packed else widest_vector(problem.reduction, limit)


def pixel_vector(problem: NchwProblem, limit: int) -> int:
    """How many neighbouring pixels one load may bring: more than one only if output pixels are input pixels."""
    return widest_vector(problem.out_w, limit) if problem.pointwise else 1


def reference(problem: NchwProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64."""
    data, weight, *terms = arrays
    weight = unpack_filter(weight) if problem.packed else weight
    values, magnitude = convolve(problem, data, weight)
    return [finished(problem, values, terms, magnitude)]
