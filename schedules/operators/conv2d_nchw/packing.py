"""Packing of the filter, for schedules that read it tap by tap."""

from __future__ import annotations

import numpy as np

from schedules.core.operator import Array


def pack_filter(weight: Array) -> Array:
    """(co, ci, kh, kw) to (kh, kw, co, ci): each tap is a matrix with the reduction contiguous, which TMA can load."""
    return np.ascontiguousarray(weight.transpose(2, 3, 0, 1))


def unpack_filter(packed: Array) -> Array:
    """(kh, kw, co, ci) back to (co, ci, kh, kw)."""
    return np.ascontiguousarray(packed.transpose(2, 3, 0, 1))
