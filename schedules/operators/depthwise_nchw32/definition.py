"""Depthwise int8 convolution over channels in groups of 32: what is computed.

data (n, ci/32, h, w, 32), filter (ci/32, kh, 32, kw'), output (n, ci/32, out_h, out_w, 32); ci/32 is rounded up, kw' is
kw rounded up to 4, and what is added holds zeros (`conv2d_nchw32.packing.pack_depthwise`).  Sums are int32.  The
epilogue is that of `conv2d_nchw32`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from schedules.core.fields import Scale
from schedules.core.operator import Array, Expected
from schedules.core.tvm import te
from schedules.definitions.implicit import textbook
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem, drawn_inputs, finished_sums
from schedules.operators.conv2d_nchw32.packing import GROUP, TAPS, pack_depthwise


@dataclass(frozen=True)
class DepthwiseNchw32Problem(Nchw32Problem):
    """An int8 convolution of each of `ci` channels with a filter of its own, with the epilogue of `Nchw32Problem`.  The
    default alpha brings sums of random data into the range of int8."""

    data_axes = ("n", "go", "h", "w", "lo")
    filter_axes = ("go", "kh", "lo", "kt")
    channels_last = True

    co: int = field(init=False)  # as many as come in
    alpha: Scale = 2.0**-8
    beta: Scale = 2.0**-8
    lanes: int = field(init=False, default=GROUP)

    def __post_init__(self) -> None:
        object.__setattr__(self, "co", self.ci)
        super().__post_init__()

    @property
    def products(self) -> int:
        return self.kh * self.kw

    @property
    def flops(self) -> int:
        return 2 * self.pixels * self.co * self.products

    @cached_property
    def extents(self) -> dict[str, int]:
        return super().extents | {"kt": -(-self.kw // TAPS) * TAPS}


def definition(problem: DepthwiseNchw32Problem) -> list[te.Tensor]:
    """The TE graph: ``padded`` (data with its border of zeros, if it has one), ``conv`` (n, ci'/32, out_h, out_w, 32)
    int32, the sum over kh and kw, ``output``.

    Returns [data, filter, the epilogue's operands, the output].
    """
    return textbook(problem)


def inputs(problem: DepthwiseNchw32Problem, rng: np.random.Generator) -> list[Array]:
    """As of `conv2d_nchw32`."""
    p = problem
    return drawn_inputs(p, rng, lambda rng: pack_depthwise(rng.integers(-128, 128, (p.ci, p.kh, p.kw), "int8")))


def reference(problem: DepthwiseNchw32Problem, arrays: Sequence[Array]) -> list[Expected]:
    """The output, tap by tap; exact unless the activation is not."""
    return finished_sums(problem, arrays, _sums)


def _sums(problem: DepthwiseNchw32Problem, data: Array, weight: Array) -> Array:
    p = problem
    padded = np.pad(data.astype(np.int64), [(0, 0), (0, 0), (p.pad[0],) * 2, (p.pad[1],) * 2, (0, 0)])
    total = np.zeros((len(data), p.co_groups, p.out_h, p.out_w, GROUP), np.int64)
    for ry in range(p.kh):
        for rx in range(p.kw):
            y, x = ry * p.dilation[0], rx * p.dilation[1]
            window = padded[:, :, y :: p.stride[0], x :: p.stride[1]][:, :, : p.out_h, : p.out_w]
            total += window * weight[:, ry, None, None, :, rx]
    return total
