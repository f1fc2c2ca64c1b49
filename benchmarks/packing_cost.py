"""What packing filters costs: once for each set of weights, before any convolution runs.

    python -m benchmarks.packing_cost                    # the filters of every preset that takes packed ones

Milliseconds of ``pack_filter``, NumPy on one core of the host, on random filters: the median of several calls.  Kept in
``tuning_logs/<device>/packing_cost.json``; `python -m benchmarks.readme_tables` makes RESULTS.md's table of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.kept import keep_costs
from benchmarks.peers.packing_cost import KIND
from schedules.build.present import cpu_name
from schedules.cli.script import run_script
from schedules.core.operator import Array
from schedules.core.presets import presets
from schedules.core.versions import versions
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.operators.conv2d_nchw import packing as nchw
from schedules.operators.conv2d_nchw32 import packing as nchw32

CALLS = 15


def filters() -> Iterator[tuple[str, str, tuple[int, ...], Callable[[Array], Array]]]:
    """Operator, dtype, shape (co, ci, kh, kw) and packing of each filter that a preset takes packed, each once."""
    found = []
    for preset in presets().values():
        problem: Any = preset.problem()
        pack = {"conv2d_nchw": nchw, "conv2d_nchw32": nchw32}.get(preset.operator)
        if pack is None or not getattr(problem, "packed", True):
            continue
        key = (
            preset.operator,
            "int8" if pack is nchw32 else problem.dtype,
            (problem.co, problem.ci, problem.kh, problem.kw),
        )
        if key not in found:
            found.append(key)
            yield *key, pack.pack_filter


def median_ms(pack: Callable[[Array], Array], weight: Array) -> float:
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        pack(weight)
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=DEFAULT_FOLDER, help="the folder of tuning logs")
    args = parser.parse_args()
    rng, found = np.random.default_rng(0), []
    for operator, dtype, shape, pack in filters():
        weight = rng.integers(-128, 128, shape).astype(dtype)
        ms = median_ms(pack, weight)
        print(f"{operator:14} {'x'.join(map(str, shape)):18} {dtype:8} {ms:9.3f} ms", flush=True)
        found.append(
            {"operator": operator, "dtype": dtype, "shape": shape, "nbytes": weight.nbytes, "median_ms": round(ms, 4)}
        )
    print(keep_costs(args.logs, KIND, cpu_name(), versions(), {"filters": found}))
    return 0


if __name__ == "__main__":
    run_script(main)
