"""Packing of tensors into groups of 32 channels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedules.core.errors import ProblemError
from schedules.core.operator import Array
from schedules.core.tolerance import LARGEST, TOLERANCES

GROUP = 32  # channels stored together: 32 bytes of int8, two 128-bit vectors
LANES = (4, 8, 16, GROUP)  # channels of a pixel that may lie together; less than a group only where that holds all
TAPS = 4  # of a row of a depthwise filter, stored together: a word


def groups(channels: int) -> int:
    """How many groups of 32 hold `channels`."""
    return -(-channels // GROUP)


def lanes_for(channels: int) -> int:
    """The fewest lanes that hold a pixel's `channels`, or a group's."""
    return next((lanes for lanes in LANES if channels <= lanes), GROUP)


def pack_data(data: Array, lanes: int = GROUP) -> Array:
    """(n, c, h, w) of any dtype to (n, ceil(c/lanes), h, w, lanes), with zeros in the channels added."""
    n, c, h, w = data.shape
    padded = np.pad(data, [(0, 0), (0, -c % lanes), (0, 0), (0, 0)])
    return np.ascontiguousarray(padded.reshape(n, -1, lanes, h, w).transpose(0, 1, 3, 4, 2))


def unpack_output(output: Array, co: int) -> Array:
    """(n, co/32, h, w, 32), or of other lanes, back to (n, co, h, w)."""
    n, _, h, w, _ = output.shape
    return np.ascontiguousarray(output.transpose(0, 1, 4, 2, 3).reshape(n, -1, h, w)[:, :co])


def pack_filter(weight: Array, lanes: int = GROUP) -> Array:
    """(co, ci, kh, kw) int8 to (ceil(ci/32), kh, kw, co', 32), co' = co rounded up to 32, with zeros in what is added;
    for data of other `lanes`, as many channels of theirs lie together.

    The order is that of the reduction: what one step of it needs of a tile of filters is contiguous, so that
    neighbouring threads load neighbouring 128-bit vectors, and a step further is one fixed stride.
    """
    co, ci, kh, kw = weight.shape
    padded = np.pad(weight, [(0, -co % GROUP), (0, -ci % lanes), (0, 0), (0, 0)])
    return np.ascontiguousarray(padded.reshape(len(padded), -1, lanes, kh, kw).transpose(1, 3, 4, 0, 2))


def pack_depthwise(weight: Array) -> Array:
    """(ci, kh, kw) int8 to (ceil(ci/32), kh, 32, kw'), kw' = kw rounded up to 4, with zeros in what is added: of each
    row of a channel's taps words of four, as dot products take them, neighbouring channels' beside them."""
    ci, _, kw = weight.shape
    padded = np.pad(weight, [(0, groups(ci) * GROUP - ci), (0, 0), (0, -kw % TAPS)])
    return np.ascontiguousarray(padded.reshape(groups(ci), GROUP, *padded.shape[1:]).transpose(0, 2, 1, 3))


def pack_scales(scales: float | Sequence[float] | Array, channels: int, name: str = "scale") -> Array:
    """One scale, or one for each of `channels`, to float32 (1,) or (co',), with ones in the channels added.

    Raises ProblemError, naming the first scale that is not positive, finite, and within float32's normal numbers.
    """
    found = np.asarray(scales, np.float64)
    if found.shape not in ((), (channels,)):
        raise ProblemError(
            f"{name} has shape {found.shape}; give one number, or {channels}, one for each output channel"
        )
    found = found.reshape(-1)
    for value in found[~((found >= TOLERANCES["float32"].smallest) & (found <= LARGEST["float32"]))][:1]:
        raise ProblemError(f"{name}={value:g} is not a positive float32; give a number over 0, 2^-126 at least")
    packed = np.ones(1 if np.ndim(scales) == 0 else groups(channels) * GROUP, np.float32)
    packed[: found.size] = found
    return packed
