"""Convolution over NHWC data: what is computed.

data (n, h, w, ci), filter (co, kh, kw, ci), bias (co,) if there is one, output (n, out_h, out_w, co), all in `dtype`;
sums in float32.  The filter has its input channels last, as cuDNN's: then both operands of the implicit product are
rows of contiguous channels, which 16-byte loads and `ldmatrix` take as they lie, and an odd number of output channels
costs no alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedules.core.operator import Array, Expected
from schedules.core.problem import FusedConv2dProblem
from schedules.core.reference import convolve, finished, normal_inputs
from schedules.definitions.implicit import product, textbook

if TYPE_CHECKING:
    from tvm import te, tirx

inputs = normal_inputs


@dataclass(frozen=True)
class NhwcProblem(FusedConv2dProblem):
    """A convolution of NHWC data with an OHWI filter."""

    data_axes = ("n", "h", "w", "ci")
    filter_axes = ("co", "kh", "kw", "ci")
    output_axes = ("n", "y", "x", "co")

    @property
    def folded(self) -> NhwcProblem:
        """The same convolution of the same memory with fewer taps, where no two kernels share a pixel (patches).

        The pixels along a row of a patch become one pixel, whose channels are those of all of them.  If patches do not
        share rows either, the `kh` image rows of a row of patches become one long row, and each is a tap of it, as far
        from the next as it was long: a convolution of 1 x `kh` taps with that dilation, and no stride.  A problem that
        is not of patches is handed back as it is.
        """
        p = self
        if p.kw > 1 and (p.stride[1], p.pad[1], p.dilation[1], p.w % p.kw) == (p.kw, 0, 1, 0):
            ones = dict(stride=(p.stride[0], 1), dilation=(p.dilation[0], 1))
            p = p.unchecked(w=p.w // p.kw, ci=p.ci * p.kw, kw=1, **ones)
        alone = (p.kw, p.stride[1], p.pad[1]) == (1, 1, 0)
        if alone and p.kh > 1 and (p.stride[0], p.pad[0], p.dilation[0], p.h % p.kh) == (p.kh, 0, 1, 0):
            p = p.unchecked(h=p.h // p.kh, w=p.kh * p.w, kh=1, kw=p.kh, stride=(1, 1), dilation=(1, p.w))
        return p


def definition(problem: NhwcProblem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros), ``conv`` (the sum over kh, kw, ci), ``output``.

    Returns [data, filter, the epilogue's terms, the output].
    """
    return textbook(problem)


def matrix_product(
    problem: NhwcProblem, tile: tuple[int, int, int], staged: bool = True, tf32: bool = False
) -> tirx.PrimFunc:
    """One matrix product: ``conv`` (pixel, co) sums ``columns`` (kh, kw, pixel, ci) x ``weights`` (kh, kw, co, ci),
    with (pixel, co, ci) in whole `tile`; see `definitions.implicit`."""
    tiles = dict(zip(("pixel", "co", "ci"), tile, strict=True))
    return product(problem, "kh kw pixel ci", "kh kw co ci", "pixel co", tiles, staged=staged, tf32=tf32)


def reference(problem: NhwcProblem, arrays: Sequence[Array]) -> list[Expected]:
    """The output in float64."""
    data, weight, *terms = arrays
    values, magnitude = convolve(problem, data.transpose(0, 3, 1, 2), weight.transpose(0, 3, 1, 2))
    values, magnitude = (array.transpose(0, 2, 3, 1) for array in (values, magnitude))
    return [finished(problem, values, terms, magnitude)]
