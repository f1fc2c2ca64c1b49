"""A comparison of convolutions as Markdown tables: one for each operator, dtype and way of launching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from benchmarks.peers.convolution_case import layer
from benchmarks.peers.markdown import mean_of_ratios, table
from schedules.core.arithmetic import FLOAT32
from schedules.core.device import GENERIC, find_device
from schedules.measure.results import arithmetic_of

Case = Mapping[str, Any]


def sections(results: Mapping[str, Any]) -> list[str]:
    """Titles and tables of a results file of convolutions, each with the mean of its ratios below, in an order of their
    own, not that of the file's cases."""
    groups: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in results["cases"]:
        kind = case["operator"], case["problem"]["dtype"], arithmetic_of(case), case["launch"]
        groups.setdefault(kind, []).append(case)
    parts: list[str] = []
    for (operator, dtype, arithmetic, launch), cases in sorted(groups.items(), key=itemgetter(0)):
        other = arithmetic != FLOAT32.name
        title = f"`{operator}`, {dtype}{f' in {arithmetic}' if other else ''}"
        title += ", launched from CUDA graphs" if launch == "graph" else ""
        ceilings = _ceilings(results, arithmetic if other else dtype)
        parts += [title, _table(cases, ceilings, dtype), mean_of_ratios(cases)]
    return [part for part in parts if part]


def _ceilings(results: Mapping[str, Any], arithmetic: str) -> dict[str, float]:
    """T(FL)OP/s that bound `arithmetic` by the header of their column: what was measured here, and the datasheet's."""
    found = {
        "of the matmul": results.get("ceilings", {}).get(arithmetic, {}).get("tflops"),
        "of the peak": (find_device(results["device"]) or GENERIC).peaks.get(arithmetic),
    }
    return {name: rate for name, rate in found.items() if rate}


def _table(cases: Sequence[Case], ceilings: Mapping[str, float], dtype: str) -> str:
    peers = list(dict.fromkeys(peer for case in cases for peer in case["peers"]))
    rate = "TOP/s" if dtype.startswith("int") else "TFLOP/s"
    headers = ["layer", "us", rate, *ceilings, *(f"{peer} us" for peer in peers), "of the best peer", "schedule"]

    def row(case: Case) -> list[str]:
        ours = case["ours"]
        done = "us" in ours
        return [
            layer(case["problem"]),
            _us(ours),
            f"{ours['tflops']:.{0 if ours['tflops'] >= 100 else 1}f}" if done else "",
            *(f"{ours['tflops'] / bound:.1%}" if done else "" for bound in ceilings.values()),
            *(_us(case["peers"].get(peer, {})) for peer in peers),
            f"{case['ratio']:.2f}" if "ratio" in case else "",
            ours.get("schedule", ""),
        ]

    return table(headers, map(row, cases))


def _us(words: Mapping[str, Any]) -> str:
    return f"{words['us']:.1f}" if "us" in words else "failed" if "failed" in words else ""
