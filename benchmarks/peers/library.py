"""Size and load times of a library of every preset (scripts/export_all.py): its files, and all of them as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.peers.costs import sources
from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import table

KIND = "export_all"
MIB = 2**20


def read_library(file: str | Path) -> dict[str, Any]:
    """The content of a file of scripts/export_all.py --keep.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "kernels_ms")


def library_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each library: its kernels, sizes, the seconds in which it was built, and the milliseconds, in a fresh
    process, of importing it, of its first kernel, which brings TVM's runtime library with it, and of each other."""
    headers = [
        "library for",
        "kernels",
        "MiB",
        "wheel, MiB",
        "built in s",
        "import, ms",
        "first kernel, ms",
        "others, ms",
    ]
    rows = []
    for file in files:
        first, *others = file["kernels_ms"].values()
        rows.append(
            [
                f"{file['target']}, {file['device']}",
                str(len(file["kernels_ms"])),
                f"{file['nbytes'] / MIB:.1f}",
                f"{file['wheel_nbytes'] / MIB:.1f}" if file["wheel_nbytes"] else "",
                f"{file['seconds']:.0f}",
                f"{file['import_ms']:.0f}",
                f"{first:.0f}",
                f"{fmean(others):.1f}" if others else "",
            ]
        )
    return "\n\n".join([table(headers, rows), *sources(files)])
