"""Convolution over HWCN data: what is computed.

data (h, w, ci, n), filter (kh, kw, ci, co), output (out_h, out_w, co, n), all in `dtype`; sums in float32.  The batch
is the contiguous axis, so that a large batch coalesces whatever the image.  After the TVM tutorial "How to optimize
convolution on GPU".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schedules.core.epilogue import Epilogue
from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem
from schedules.core.reference import convolve, finished, normal_inputs
from schedules.definitions.epilogue import ACCUMULATOR
from schedules.definitions.implicit import product, textbook

if TYPE_CHECKING:
    from tvm import te, tirx

inputs = normal_inputs
# the axes of a matrix product for each pixel
COLUMNS, WEIGHTS, CONV = "y x kh kw ci n", "kh kw ci co", "y x co n"


@dataclass(frozen=True)
class HwcnProblem(FusedConv2dProblem):
    """A convolution of HWCN data with an HWIO filter."""

    data_axes = ("h", "w", "ci", "n")
    filter_axes = ("kh", "kw", "ci", "co")
    output_axes = ("y", "x", "co", "n")
    later = ("n_from", "bias", "activation", "residual")


def definition(problem: HwcnProblem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv``, the sum over kh, kw and ci, and, where there
    is more to do than to sum, ``output``.

    Returns [data, filter, the epilogue's terms, the output].
    """
    return textbook(problem, finished=problem.epilogue != Epilogue(ACCUMULATOR))


def pixel_product(problem: HwcnProblem, tile: tuple[int, int, int], tf32: bool = False) -> tirx.PrimFunc:
    """A matrix product for each pixel: ``conv`` (y, x, co, n) sums ``weights`` (kh, kw, ci, co) x ``columns`` (y, x,
    kh, kw, ci, n), with (co, n, ci) in whole `tile`; see `definitions.implicit`.  Channels so few that most of a tile
    would be zeros are one axis with the taps."""
    p, (co, n, k) = problem, tile
    columns, weights = COLUMNS, WEIGHTS
    one = joined(p, k)
    if one:
        columns, weights = (axes.replace("kh kw ci", "k") for axes in (columns, weights))
    return product(p, columns, weights, CONV, {"co": co, "n": n, "k" if one else "ci": k}, tf32=tf32)


def joined(problem: HwcnProblem, k: Any) -> Any:
    """Whether `pixel_product` makes one axis of taps and channels: where steps of `k` are half as many then."""
    taps = problem.kh * problem.kw
    return 2 * -(-taps * problem.ci // k) <= taps * -(-problem.ci // k)


def inside_window(problem: HwcnProblem) -> tuple[int, ...] | None:
    """(first row, rows, first column, columns) of the output pixels that see no padding; None if all or none do."""
    p, window = problem, tuple[int, ...]()
    for size, out, pad, k, stride, dilation in zip(
        (p.h, p.w), (p.out_h, p.out_w), p.pad, (p.kh, p.kw), p.stride, p.dilation, strict=True
    ):
        first = min(out, -(-pad // stride))
        end = max(first, min(out, (size - 1 + pad - (k - 1) * dilation) // stride + 1))
        window += (first, end - first)
    return window if 0 < window[1] * window[3] < p.out_h * p.out_w else None


def reference(problem: HwcnProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64."""
    data, weight, *terms = arrays
    found = convolve(problem, data.transpose(3, 2, 0, 1), weight.transpose(3, 2, 0, 1))
    values, magnitude = (array.transpose(2, 3, 1, 0) for array in found)
    return [finished(problem, values, terms, magnitude)]
