"""How far an output may be from its float64 reference.

An element may differ by  rounding(output dtype) * |reference|  +  arithmetic * magnitude  +  smallest step:  the
rounding of the result, the error of the arithmetic behind it (float32's, unless the schedule declares another),
measured against the size of what was summed (`Expected.magnitude`), and the dtype's last denormal (GPUs flush those of
float32).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from schedules.core.arithmetic import FLOAT32, Arithmetic
from schedules.core.operator import Array, Expected


@dataclass(frozen=True)
class Tolerance:
    """What rounding to a dtype may cost: `rounding` relative to the value, `smallest` absolute."""

    rounding: float
    smallest: float


TOLERANCES = {
    "float64": Tolerance(2.0**-50, 0.0),
    "float32": Tolerance(2.0**-22, 2.0**-126),
    "float16": Tolerance(2.0**-10, 2.0**-24),
    "bfloat16": Tolerance(2.0**-7, 2.0**-126),
    "int32": Tolerance(0.0, 0.0),
    "int8": Tolerance(0.0, 0.0),
}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895314e38, "float32": 3.4028235e38}
# what rounds to infinity, and what is beyond: half of the last place over the largest
EDGE = {"float16": 65520.0, "bfloat16": (2 - 2.0**-8) * 2.0**127, "float32": (2 - 2.0**-24) * 2.0**127}


@dataclass(frozen=True)
class Difference:
    """The worst element: `error` in units of what is allowed (over 1 is wrong), and where it is."""

    error: float
    index: tuple[int, ...]
    got: float
    wanted: float

    @property
    def passed(self) -> bool:
        return self.error <= 1

    def __str__(self) -> str:
        if self.passed:
            return f"{self.error:.3f} of the tolerance"
        where = f"wrong at {self.index}: got {self.got:.9g}, wanted {self.wanted:.9g}"
        return f"{where} ({self.error:.3g} times the tolerance)"


def compare(got: Array, expected: Expected, dtype: str, arithmetic: Arithmetic = FLOAT32) -> Difference:
    """Compare an output of `dtype` with its reference.  NaN and infinities must stand where the reference has them;
    infinity may where the value rounds to it.

    Where the reference repeats, so must the output, bit for bit: each row is the same arithmetic.
    """
    rows = len(expected.values)
    worst = _compare_block(got[:rows], expected, dtype, arithmetic, 0)
    bits = got.view(np.uint8)
    for start in range(rows, len(got), rows):
        block = got[start : start + rows]
        if not np.array_equal(bits[start : start + rows], bits[: len(block)]):
            part = replace(expected, values=expected.values[: len(block)], magnitude=expected.magnitude[: len(block)])
            worst = max(worst, _compare_block(block, part, dtype, arithmetic, start), key=lambda found: found.error)
    return worst


def limits(expected: Expected, dtype: str, arithmetic: Arithmetic = FLOAT32) -> tuple[Array, Array]:
    """What an output of `dtype` must be and how far from it each element may be: two float64 arrays of one shape.

    Where the value is beyond the dtype's largest, infinity is the right answer and stands in its place.
    """
    tolerance, values = TOLERANCES[dtype], expected.values.astype(np.float64, copy=False)
    if dtype.startswith("int"):
        return values, np.full(values.shape, 0.5)
    with np.errstate(invalid="ignore", over="ignore"):
        rounding = expected.roundings * (tolerance.rounding * np.abs(values) + tolerance.smallest)
        allowed = np.broadcast_to(rounding + arithmetic.error * np.abs(expected.magnitude), values.shape)
        overflowed = np.abs(values) > LARGEST.get(dtype, np.inf) * (1 + tolerance.rounding)
    return np.where(overflowed, np.copysign(np.inf, values), values), np.ascontiguousarray(allowed)


def _compare_block(got: Array, expected: Expected, dtype: str, arithmetic: Arithmetic, start: int) -> Difference:
    values, allowed = limits(expected, dtype, arithmetic)
    got64, edge = np.asarray(got).astype(np.float64), EDGE.get(dtype, np.inf)
    if got64.shape != values.shape:
        raise ValueError(f"output has shape {got64.shape}, the reference {values.shape}")
    if got64.size == 0:
        return Difference(0.0, (), 0.0, 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        rounded = np.isinf(got64) & (edge <= np.abs(values)) & (np.abs(values) < np.inf)
        got64 = np.where(rounded, np.copysign(edge, got64), got64)
        error = np.abs(got64 - values) / allowed
        same = (np.isnan(values) & np.isnan(got64)) | (values == got64)
    special = ~np.isfinite(values) | ~np.isfinite(got64)
    error = np.where(special, np.where(same, 0.0, np.inf), error)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    wanted = float(np.broadcast_to(expected.values, values.shape)[index])
    return Difference(float(error[index]), (index[0] + start, *index[1:]), float(got64[index]), wanted)
