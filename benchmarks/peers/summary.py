"""Comparisons in short: a row for each operator, dtype and arithmetic of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import geometric_mean
from typing import Any

from benchmarks.peers import cpu_case
from benchmarks.peers.comparison import GRAPH
from benchmarks.peers.markdown import provenance, table
from schedules.core.arithmetic import FLOAT32
from schedules.measure.results import arithmetic_of

Case = Mapping[str, Any]
HEADERS = ("device", "operator", "dtype", "launched from", "cases", "geometric mean", "least", "ahead")


def best_ratio(case: Case) -> float | None:
    """The best peer's time as a multiple of ours; None where ours or every peer failed."""
    if "ratio" in case:
        return float(case["ratio"])
    peers = [peer["us"] for peer in case["peers"].values() if "us" in peer]
    ours = case["ours"].get("us")
    return min(peers) / ours if peers and ours else None


def summary_table(files: Sequence[Mapping[str, Any]]) -> str:
    """The ratios to the best peer of results files (`results.read_results`), in the order given, and where they come
    from.  `ahead` is the share of the cases in which ours is faster."""
    rows = [[results["device"], *row] for results in files for row in _rows(results)]
    sources: dict[str, list[Case]] = {}
    heads: dict[str, Mapping[str, Any]] = {}
    for results in files:
        key = f"{results['device']} {results['versions']}"
        heads.setdefault(key, results)
        sources.setdefault(key, []).extend(results["cases"])
    origins = [provenance({**head, "cases": sources[key]}) for key, head in heads.items()]
    return "\n\n".join([table(HEADERS, rows), *origins])


def _rows(results: Mapping[str, Any]) -> list[list[str]]:
    launches = ("", "") if results["kind"] == cpu_case.KIND else ("a stream", "a graph")
    groups: dict[tuple[str, str, str, bool], list[float]] = {}
    for case in results["cases"]:
        key = case["operator"], case["problem"]["dtype"], arithmetic_of(case), case["launch"] == GRAPH
        if (ratio := best_ratio(case)) is not None:
            groups.setdefault(key, []).append(ratio)
    return [
        [
            f"`{operator}`",
            dtype if arithmetic == FLOAT32.name else f"{dtype} in {arithmetic}",
            launches[graph],
            str(len(ratios)),
            f"{geometric_mean(ratios):.2f}",
            f"{min(ratios):.2f}",
            f"{sum(ratio > 1 for ratio in ratios) / len(ratios):.0%}",
        ]
        for (operator, dtype, arithmetic, graph), ratios in sorted(groups.items(), key=itemgetter(0))
    ]
