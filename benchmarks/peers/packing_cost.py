"""What packing filters costs (benchmarks/packing_cost.py): its files, and those of several devices as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.costs import sources
from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import table

KIND = "packing_cost"


def read_packing(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.packing_cost.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "filters")


def packing_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each filter with its size, and the median milliseconds that packing it takes each device."""
    taken = [{_key(found): found["median_ms"] for found in file["filters"]} for file in files]
    keys = list(dict.fromkeys(key for times in taken for key in times))
    headers = ["filter", "", "MiB", *(f"{file['device']}: ms" for file in files)]
    rows = (
        [
            key[0],
            f"{'x'.join(map(str, key[2]))} {key[1]}",
            f"{key[3] / 2**20:.2f}",
            *(f"{times[key]:.3g}" if key in times else "" for times in taken),
        ]
        for key in keys
    )
    return "\n\n".join([table(headers, rows), *sources(files)])


def _key(found: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...], int]:
    return found["operator"], found["dtype"], tuple(found["shape"]), found["nbytes"]
