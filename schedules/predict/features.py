"""A problem and configs for it as a table of numbers, which the trees are trained on and evaluated with.

Sizes are logarithms of ratios: parts of the estimate to its total, tiles to what the device holds.  What a config does
not have is NaN, which trees take as "missing".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from schedules.core.arch import Arch
from schedules.core.operator import Array, ScheduleSpec
from schedules.core.problem import numpy_dtype
from schedules.predict.configs import Columns
from schedules.predict.estimate import Work, peak

OWN = "own us"  # the column of a schedule's own estimate
DIGITS = 4  # that decisions are made by: the last bits of a logarithm are not the same on every machine


def features(
    operator: str,
    problem: Any,
    spec: ScheduleSpec,
    columns: Columns,
    work: Work,
    arch: Arch,
    own_estimate: bool = True,
) -> dict[str, Array | float]:
    """Named columns; a number stands for a column of it.  With `own_estimate` OWN too, which is made config by
    config."""
    p, total = problem.folded if spec.folded else problem, work.total
    item = numpy_dtype(p.dtype).itemsize
    memory = 1e3 * (arch.device.bandwidth or 1000)  # bytes in a microsecond
    inside = p.n if p.output_axes[-1] == "n" else p.out_w
    turns = np.ceil(work.waves)
    found: dict[str, Array | float] = {
        f"is {operator}.{spec.name}": 1.0,
        "flops": math.log2(1e-6 * p.flops / peak(arch, p.dtype)),
        "bytes": math.log2(p.min_bytes / memory),
        "data": np.log2(p.n * p.ci * p.h * p.w * item / memory / total),
        "output": np.log2(p.pixels * p.co * item / memory / total),
        "pixels": math.log2(p.pixels),
        "run": math.log2(inside),
        "run 8": float(math.gcd(inside, 64)),
        "row 8": float(math.gcd(p.w, 64)),
        "pad w": float(p.pad[1]),
        "image": math.log2(p.out_h * p.out_w),
        "image 8": float(math.gcd(p.out_h * p.out_w, 64)),
        "co": math.log2(p.co),
        "co 2": float(math.gcd(p.co, 64)),
        "ci": math.log2(p.ci),
        "ci 2": float(math.gcd(p.ci, 64)),
        "taps": float(p.kh * p.kw),
        "kw": float(p.kw),
        "stride": float(p.stride[0] * p.stride[1]),
        "item": float(item),
        "residual": float(len(p.epilogue.of_axis("element"))),
        "estimate": np.log2(total),
        "tiles": np.log2(work.tiles),
        "waves": np.log2(work.waves),
        "idle": turns / work.waves,
        "turns": np.minimum(turns, 64.0),
        "resident": work.resident,
        "warps": np.log2(work.warps),
        "steps": np.log2(work.steps),
        "used": work.used,
    }
    if spec.estimate is not None and own_estimate:
        own = np.array([spec.estimate(p, columns.make(row), arch) for row in range(columns.count)])
        found[OWN] = np.log2(own / total)
    for name, part in work.parts.items():
        found[f"part {name}"] = np.log2(np.maximum(part, 1e-3) / total)
    for name, values in columns.fields.items():
        if name not in ("grid",):
            found[name] = values
    return found


def table(parts: Sequence[dict[str, Array | float]], counts: Sequence[int], names: Sequence[str]) -> Array:
    """Columns `names` of all rows of `parts` as one table (row, column) of float32; 0 for a schedule that a row is not
    of, NaN for what it does not have."""
    found = np.full((sum(counts), len(names)), np.nan)
    start = 0
    for part, count in zip(parts, counts, strict=True):
        for place, name in enumerate(names):
            if name in part:
                found[start : start + count, place] = part[name]
            elif name.startswith("is "):
                found[start : start + count, place] = 0.0
        start += count
    return np.round(found, DIGITS).astype(np.float32)
