"""What kernels for AMD GPUs are made of (benchmarks/instruction_mix.py): its files, and those of several as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.peers.costs import sources
from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import table

KIND = "instruction_mix"
Rows = Sequence[Mapping[str, Any]]


def read_mix(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.instruction_mix.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "now")


def mix_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each GPU, operator and dtype: means of its presets, "before > now" where both are known and differ."""
    columns = {
        "registers": lambda rows: f"{median(row['registers'] for row in rows):.0f}",
        "most": lambda rows: str(max(row["registers"] for row in rows)),
        "with scratch": lambda rows: str(sum(bool(row["scratch"]) for row in rows)),
        "waves": lambda rows: f"{fmean(row['waves'] for row in rows):.1f}",
        "matrix": lambda rows: _mean(rows, "mfma", "wmma"),
        "vector": lambda rows: _mean(
            rows, "fp32 multiply-add", "dot product", "special function", "other vector instruction"
        ),
        "LDS": lambda rows: _mean(rows, *(f"shared {way}{bits}" for way in ("load", "store") for bits in WIDTHS)),
        "conflicts": lambda rows: _conflicts(rows),
        "memory": lambda rows: _mean(rows, *(f"global {way}{bits}" for way in ("load", "store") for bits in WIDTHS)),
        "shuffles": lambda rows: _mean(rows, "shuffle"),
        "barriers": lambda rows: _mean(rows, "barrier"),
        "waits": lambda rows: _mean(rows, "wait"),
        "products": lambda rows: _share(rows),
        "limited by": lambda rows: _limit(rows),
    }
    lines = []
    for file in files:
        kinds = list(dict.fromkeys((row["operator"], row.get("dtype", "")) for row in file["now"]))
        for kind in kinds:
            now, before = (
                [
                    row
                    for row in file.get(when, ())
                    if (row["operator"], row.get("dtype", "")) == kind and "waves" in row
                ]
                for when in ("now", "before")
            )
            if now:
                cells = [_change(before and column(before), column(now)) for column in columns.values()]
                lines.append([file["device"].split()[-1], f"`{kind[0]}`", kind[1], str(len(now)), *cells])
    return "\n\n".join([table(["GPU", "operator", "dtype", "presets", *columns], lines), *sources(files)])


WIDTHS = ("", " 64-bit", " 128-bit")


def _mean(rows: Rows, *kinds: str) -> str:
    return f"{fmean(sum(row.get(kind, 0) for kind in kinds) for row in rows):.0f}"


def _share(rows: Rows) -> str:
    shares = [row["products"] for row in rows if "products" in row]
    return f"{fmean(shares):.0%}" if shares else ""


def _conflicts(rows: Rows) -> str:
    shares = [row["conflicts"] for row in rows if "conflicts" in row]
    return f"{fmean(shares):.0%}" if shares else ""


def _limit(rows: Rows) -> str:
    limits = [row["limit"] for row in rows if "limit" in row]
    return max(limits, key=limits.count) if limits else ""


def _change(before: str, now: str) -> str:
    return f"{before} > {now}" if before and before != now else now
