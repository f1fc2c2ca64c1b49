"""A comparison on the CPU as Markdown tables: a row for each layer, or for each shape of softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.peers.convolution_case import layer
from benchmarks.peers.markdown import mean_of_ratios, table
from schedules.operators.softmax.definition import FUNCTIONS

Case = Mapping[str, Any]


def sections(results: Mapping[str, Any]) -> list[str]:
    """Titles and tables of a results file of the CPU: of all its ratios in short, then of each operator and dtype with
    the mean of its ratios below."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in results["cases"]:
        groups.setdefault((case["operator"], case["problem"]["dtype"]), []).append(case)
    parts = ["PyTorch's time as a multiple of ours", _summary(results["cases"])] if results["cases"] else []
    for (operator, dtype), cases in groups.items():
        draw, noun = (_rows, "cases") if operator == "softmax" else (_layers, "layers")
        title = f"`{operator}`, {dtype}, {results['versions']['threads']} threads"
        parts += [title, draw(cases), mean_of_ratios(cases, noun)]
    return [part for part in parts if part]


def _summary(cases: Sequence[Case]) -> str:
    """The least, the mean and the largest ratio of each operator by number of images, or function; and the least and
    the mean between PyTorch's operators."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        p = case["problem"]
        name = p["function"] if case["operator"] == "softmax" else f"{case['operator']} n={p['n']}"
        found.setdefault(f"{name}, {p['dtype']}", []).extend([case] if "ratio" in case else [])

    there = any("between_ratio" in case for case in cases)

    def row(name: str, those: Sequence[Case]) -> list[str]:
        alone = [case["ratio"] for case in those]
        beside = [case["between_ratio"] for case in those if "between_ratio" in case]
        numbers = [min(alone), geometric_mean(alone), max(alone)]
        numbers += [min(beside), geometric_mean(beside)] if beside else []
        return [name, str(len(those)), *(f"{number:.2f}" for number in numbers), *[""] * (2 * (there and not beside))]

    headers = ["", "problems", "least", "geometric mean", "most"]
    headers += ["least between operators", "mean between operators"] if there else []
    return table(headers, [row(name, those) for name, those in found.items() if those])


def _layers(cases: Sequence[Case]) -> str:
    peers = list(dict.fromkeys(peer for case in cases for peer in case["peers"]))

    def row(case: Case) -> list[str]:
        rate = f"{case['flops'] / case['ours']['us'] / 1e3:.0f}" if "us" in case["ours"] else ""
        times = [_us(case["peers"].get(peer, {})) for peer in peers]
        beside = [f"{case['between_ratio']:.2f}" if "between_ratio" in case else ""] if there else []
        return [layer(case["problem"]), _us(case["ours"]), rate, *times, _ratio(case), *beside]

    there = any("between_ratio" in case for case in cases)
    headers = ["layer", "us", "GFLOP/s", *(f"{peer} us" for peer in peers), "of the best peer"]
    headers += ["between operators"] if there else []
    return table(headers, map(row, cases))


def _rows(cases: Sequence[Case]) -> str:
    found = {(c["problem"]["rows"], c["problem"]["cols"], c["problem"]["function"]): c for c in cases}
    shapes = list(dict.fromkeys((rows, cols) for rows, cols, _ in found))
    functions = [name for name in FUNCTIONS if any(name == function for *_, function in found)]

    def cell(case: Case | None) -> str:
        if case is None:
            return ""
        peers = " ".join(_us(peer) for peer in case["peers"].values())
        return f"{_us(case['ours'])} ({peers}) {_ratio(case)}".strip()

    rows = ([f"{r} x {c}", *(cell(found.get((r, c, name))) for name in functions)] for r, c in shapes)
    return table(["rows x cols: us (PyTorch us) ratio", *functions], rows)


def _us(words: Mapping[str, Any]) -> str:
    return f"{words['us']:.1f}" if "us" in words else "failed" if "failed" in words else ""


def _ratio(case: Case) -> str:
    return f"{case['ratio']:.2f}" if "ratio" in case else ""
