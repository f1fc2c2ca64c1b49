"""Tables in Markdown, and where their numbers come from."""

from __future__ import annotations

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
