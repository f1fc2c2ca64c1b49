"""Tables in Markdown, and where their numbers come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def provenance(results: Mapping[str, Any]) -> str:
    """The device, the days and the versions of a results file."""
    dates = sorted({case["date"][:10] for case in results["cases"]})
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    days = " to ".join(sorted({*dates[:1], *dates[-1:]}))
    return f"{results['device']}{days and ', '}{days}; {versions}"


def mean_of_ratios(cases: Sequence[Mapping[str, Any]], noun: str = "layers") -> str:
    """The geometric mean of the ratios, and of how many cases it is where some have none."""
    ratios = [case["ratio"] for case in cases if "ratio" in case]
    if not ratios:
        return ""
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    of = f" of {len(cases)}" if len(ratios) < len(cases) else ""
    return f"Geometric mean of the ratios: {mean:.2f} ({len(ratios)}{of} {noun})"
