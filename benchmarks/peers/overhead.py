"""What calls from PyTorch cost (benchmarks/torch_overhead.py): its files, and those of several devices as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.costs import sources
from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import table

KIND = "torch_overhead"
MODES = {
    "kernel": "kernel alone",
    "eager": "eager",
    "grad": "forward and backward",
    "compiled": "compiled",
    "graph": "in a CUDA graph",
}  # of a call, as tables name them


def read_overhead(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.torch_overhead.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "calls")


def overhead_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each operator and mode, with the median microseconds of a call of ours and PyTorch's on each device;
    below it, where they come from."""
    times = [{(call["operator"], call["mode"]): call for call in file["calls"]} for file in files]
    operators = list(dict.fromkeys(operator for calls in times for operator, _ in calls))
    keys = [(operator, mode) for operator in operators for mode in MODES if any((operator, mode) in c for c in times)]
    headers = ["us of a call", "", *(f"{file['device']}: {who}" for file in files for who in ("ours", "PyTorch"))]
    rows = (
        [
            key[0],
            MODES[key[1]],
            *(_us(c[key].get(who) if key in c else None) for c in times for who in ("ours", "torch")),
        ]
        for key in keys
    )
    return "\n\n".join([table(headers, rows), *sources(files)])


def _us(words: Mapping[str, float] | None) -> str:
    return f"{words['median_us']:.1f}" if words else ""
