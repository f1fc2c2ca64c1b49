"""Rows whose values are not ordinary, for every schedule of softmax: infinities, NaN, the largest and smallest numbers.

`forward` and `gradient` make one row of each kind, so that one run shows them all; a row's name says what went wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedules.core.problem import numpy_dtype
from schedules.core.tolerance import LARGEST

Row = np.ndarray[Any, Any]
# the smallest positive number, a subnormal; and the smallest normal one
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}


def forward(cols: int, dtype: str) -> dict[str, Row]:
    """x by name, each (cols,) in `dtype`."""
    rng = np.random.default_rng(3)
    normal = rng.standard_normal(cols) * 2
    first, middle, last = 0, cols // 2, cols - 1
    largest, smallest = LARGEST[dtype], SMALLEST[dtype]

    def but(row: Row | float, *changes: tuple[int, float]) -> Row:
        """`row` with another value at each (column, value)."""
        changed = np.broadcast_to(row, cols).astype(np.float64)
        for column, value in changes:
            changed[column] = value
        return changed

    rows = {
        "zeros": but(0.0),
        "zeros of both signs": np.where(np.arange(cols) % 2, -0.0, 0.0),
        "equal": but(5.0),
        "equal, largest": but(largest),
        "equal, largest negative": but(-largest),
        "equal, smallest": but(smallest),
        "smallest of both signs": np.where(np.arange(cols) % 2, -smallest, smallest),
        "tiny": normal * NORMAL[dtype],
        "huge": normal / np.abs(normal).max() * largest,
        "largest of both signs": np.where(np.arange(cols) % 3, -largest, largest),
        "largest beside ordinary": but(normal, (middle, largest)),
        "largest negative beside ordinary": but(normal, (middle, -largest)),
        "steps of 40": -40.0 * np.arange(cols),
        "steps of 0.25": -0.25 * np.arange(cols),
        "one -inf": but(normal, (middle, -np.inf)),
        "-inf but the first": but(-np.inf, (first, 1.5)),
        "-inf but the last": but(-np.inf, (last, -1.5)),
        "-inf but the largest negative": but(-np.inf, (middle, -largest)),
        "-inf but two": but(-np.inf, (first, 1.0), (last, 2.0)),
        "all -inf": but(-np.inf),
        "+inf first": but(normal, (first, np.inf)),
        "+inf last": but(normal, (last, np.inf)),
        "all +inf": but(np.inf),
        "both infinities": but(normal, (first, np.inf), (last, -np.inf)),
        "+inf beside -inf": but(-np.inf, (middle, np.inf)),
        "NaN first": but(normal, (first, np.nan)),
        "NaN middle": but(normal, (middle, np.nan)),
        "NaN last": but(normal, (last, np.nan)),
        "NaN beside -inf": but(-np.inf, (middle, np.nan)),
        "NaN beside +inf": but(normal, (first, np.nan), (last, np.inf)),
        "all NaN": but(np.nan),
        "ordinary": but(normal),  # last: what leaks from one row to the next shows here
    }
    return {name: _rounded(row, dtype) for name, row in rows.items()}


def gradient(cols: int, dtype: str, log: bool) -> dict[str, tuple[Row, Row]]:
    """(y, dy) by name, each (cols,) in `dtype`; with `log`, y is a logarithm."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(cols) * 2
    ordinary = np.exp(x) / np.exp(x).sum()
    slope = rng.standard_normal(cols)
    first, middle, last = 0, cols // 2, cols - 1
    half = np.where(np.arange(cols) % 2, 0.0, ordinary)
    some = half / half.sum()
    one = (np.arange(cols) == middle).astype(np.float64)

    def but(row: Row | float, *changes: tuple[int, float]) -> Row:
        changed = np.broadcast_to(row, cols).astype(np.float64)
        for column, value in changes:
            changed[column] = value
        return changed

    # no sum of them beyond float32, which its order would decide
    huge = slope / np.abs(slope).max() * LARGEST[dtype] / (4 * cols)
    rows: dict[str, tuple[Row, Row]] = {
        "y with zeros": (some, slope),
        "y all in one column": (one, slope),
        "y all zeros": (but(0.0), slope),
        "y NaN": (but(ordinary, (middle, np.nan)), slope),
        "dy zeros": (ordinary, but(0.0)),
        "dy equal": (ordinary, but(0.5)),
        "dy NaN first": (ordinary, but(slope, (first, np.nan))),
        "dy NaN last": (ordinary, but(slope, (last, np.nan))),
        "dy NaN where y is zero": (but(ordinary, (last, 0.0)), but(slope, (last, np.nan))),
        "dy +inf": (ordinary, but(slope, (middle, np.inf))),
        "dy -inf where y is zero": (but(ordinary, (middle, 0.0)), but(slope, (middle, -np.inf))),
        "dy both infinities": (ordinary, but(slope, (first, np.inf), (last, -np.inf))),
        "dy all NaN": (ordinary, but(np.nan)),
        "dy huge": (ordinary, huge),
        "dy tiny": (ordinary, slope * NORMAL[dtype]),
        "dy smallest": (ordinary, but(SMALLEST[dtype])),
        "ordinary": (ordinary, slope),
    }
    with np.errstate(divide="ignore"):
        return {name: (_rounded(np.log(y) if log else y, dtype), _rounded(dy, dtype)) for name, (y, dy) in rows.items()}


def _rounded(row: Row, dtype: str) -> Row:
    with np.errstate(over="ignore"):
        return row.astype(numpy_dtype(dtype))


def arrays(function: str, cols: int, dtype: str) -> tuple[list[str], list[Row]]:
    """The rows' names, and the inputs (rows, cols) of `function` in order."""
    if function.endswith("_grad"):
        pairs = gradient(cols, dtype, function.startswith("log_"))
        return list(pairs), [np.stack(part) for part in zip(*pairs.values(), strict=True)]
    rows = forward(cols, dtype)
    return list(rows), [np.stack(list(rows.values()))]
