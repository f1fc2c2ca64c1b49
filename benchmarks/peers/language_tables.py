"""A comparison of our programs in TIRx with our TE schedules as one Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.markdown import table
from schedules.core.registry import operator

Case = Mapping[str, Any]
TITLE = "Programs in TIRx and the fastest of their TE siblings: the sibling's time as a multiple of the program's"


def sections(results: Mapping[str, Any]) -> list[str]:
    """The title and the table, in the order of the operators' names and schedules, whatever the order of the cases."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in results["cases"]:
        if "schedule" in case["ours"]:
            groups.setdefault((case["operator"], case["ours"]["schedule"]), []).append(case)
    headers = ["operator", "in TIRx", "why", "TE siblings", "problems", "mean", "least"]
    return [TITLE, table(headers, (_row(*names, groups[names]) for names in sorted(groups)))]


def _row(owner: str, schedule: str, cases: Sequence[Case]) -> list[str]:
    tirx = operator(owner).schedule(schedule).tirx
    why, siblings = (tirx.reason, ", ".join(f"`{name}`" for name in tirx.siblings)) if tirx else ("", "")
    ratios = [case["ratio"] for case in cases if "ratio" in case]
    of = f" of {len(cases)}" if len(ratios) < len(cases) else ""
    numbers = [f"{len(ratios)}{of}", "", ""]
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        numbers[1:] = [f"{mean:.2f}", f"{min(ratios):.2f}"]
    return [f"`{owner}`", f"`{schedule}`", why, siblings, *numbers]
