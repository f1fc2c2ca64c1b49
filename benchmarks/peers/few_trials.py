"""Searches of few trials beside many (benchmarks/few_trials.py): their files, and those of devices as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.peers.costs import sources
from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import table

KIND = "few_trials"
Row = Mapping[str, Any]


def read_searches(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.few_trials.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "searches")


def ratios(row: Row) -> tuple[float, float]:
    """The default's time, and that of what few trials found, as multiples of what many found.

    Each search times its finalists and the default in turn; the default, which both time, joins the two.
    """
    of_default = float(row["default_many_us"] / row["many_us"])
    return of_default, of_default * float(row["few_us"] / row["default_few_us"])


def told(row: Row) -> str:
    """A line of one layer."""
    default, few = ratios(row)
    return (
        f"{row['operator']} {row['dtype']} {row['layer']}: default {row['default_many_us']:.1f} us ({default:.3f} of"
        f" {row['many_trials']} trials), {row['few_trials']} trials {few:.3f}; {row['many_schedule']}"
    )


def searches_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each device: means and worst of the default and of few trials, as multiples of many trials' best."""
    rows = []
    for file in files:
        found = file["searches"]
        defaults, few = zip(*map(ratios, found), strict=True)
        trials = " and ".join(str(max(row[f"{name}_trials"] for row in found)) for name in ("few", "many"))
        shown = [f"{value:.3f}" for value in (geometric_mean(defaults), max(defaults), geometric_mean(few), max(few))]
        rows.append([file["device"], str(len(found)), trials, *shown])
    headers = ["device", "layers", "trials", "default: mean", "worst", "few trials: mean", "worst"]
    return "\n\n".join([table(headers, rows), *sources(files)])
