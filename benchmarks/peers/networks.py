"""Whole networks with our kernels in them (benchmarks/compare_networks.py): its files, those of several as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import provenance, table

KIND = "compare_networks"
PEERS = {  # as tables name them
    "eager": "eager",
    "compile": "torch.compile",
    "ours": "ours",
    "ours_eager": "ours beside eager",
    "int8": "ours in int8",
}


def read_networks(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.compare_networks.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "networks")


def networks_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each network, batch and mode of torch.compile: the median microseconds, and those of the fastest of
    PyTorch's by ours, in int8 if that was measured, beside eager's other operators if nothing else was; below it, where
    they come from."""
    headers = [
        "device",
        "network",
        "batch",
        "torch.compile's mode",
        *(f"{name}, us" for name in PEERS.values()),
        "ratio",
    ]
    return "\n\n".join([table(headers, _rows(files)), *map(_source, files)])


def _source(file: Mapping[str, Any]) -> str:
    """The line of a file's device, days and versions; a row without a date is as old as the file."""
    return provenance({**file, "cases": [{"date": file["date"], **row} for row in file["networks"]]})


def _rows(files: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for file in files:
        for row in file["networks"]:
            times = {peer: row[peer]["median_us"] for peer in PEERS if peer in row}
            theirs = [times[peer] for peer in ("eager", "compile") if peer in times]
            ours = next((times[peer] for peer in ("int8", "ours", "ours_eager") if peer in times), None)
            busy = f", beside {row['beside']} busy" if "beside" in row else ""
            yield [
                file["device"],
                f"`{row['network']}`{busy}",
                str(row["n"]),
                row["mode"] if "compile" in row else "",
                *(f"{times[peer]:,.0f}" if peer in times else "" for peer in PEERS),
                f"{min(theirs) / ours:.2f}" if theirs and ours else "",
            ]
