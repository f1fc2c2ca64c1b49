"""A comparison of softmax as Markdown tables: the share of a copy by width and function, and every peer's rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from benchmarks.peers.comparison import GRAPH
from benchmarks.peers.markdown import table
from schedules.operators.softmax.definition import FUNCTIONS, SoftmaxProblem

Case = Mapping[str, Any]


def sections(results: Mapping[str, Any]) -> list[str]:
    """Titles and tables of a results file of softmax: by way of launching, from streams first, what is fused, dtype,
    and number of rows, whatever the order of the file's cases."""
    parts: list[str] = []
    for (dtype, how), cases in _grouped(results["cases"]):
        most = Counter(case["problem"]["rows"] for case in cases).most_common(1)[0][0]
        for some in (
            [case for case in cases if case["problem"]["rows"] == most],
            [case for case in cases if case["problem"]["rows"] != most],
        ):
            if some:
                parts += _section(dtype, how, some)
    return parts


def _grouped(cases: Sequence[Case]) -> Iterator[tuple[tuple[str, str], list[Case]]]:
    found: dict[tuple[bool, bool, int], list[Case]] = {}
    for case in cases:
        p = case["problem"]
        fused = (p["scale"], p["mask"], p["keep"]) != (1.0, "none", 1.0)
        key = case["launch"] == GRAPH, fused, SoftmaxProblem.dtypes.index(p["dtype"])
        found.setdefault(key, []).append(case)
    for (graph, fused, dtype), some in sorted(found.items(), key=itemgetter(0)):
        how = ["scale, mask and dropout fused"] * fused + ["launched from CUDA graphs"] * graph
        yield (SoftmaxProblem.dtypes[dtype], ", ".join(how)), some


def _section(dtype: str, how: str, cases: Sequence[Case]) -> list[str]:
    heights = sorted({case["problem"]["rows"] for case in cases})
    one = len(heights) == 1
    title = ", ".join([dtype, *([f"{heights[0]} rows"] if one else ["few rows"]), *([how] if how else [])])
    found = {
        (case["problem"]["cols"], case["problem"]["rows"], case["problem"]["function"]): case
        for case in sorted(cases, key=lambda case: (case["problem"]["cols"], case["problem"]["rows"]))
    }
    shapes = list(dict.fromkeys((cols, rows) for cols, rows, _ in found))
    functions = [name for name in FUNCTIONS if any(name == function for *_, function in found)]
    label = "cols" if one else "rows x cols"

    def labelled(cols: int, rows: int) -> str:
        return str(cols) if one else f"{rows} x {cols}"

    shares = table(
        [label, *functions],
        ([labelled(*shape), *(_share(found.get((*shape, name))) for name in functions)] for shape in shapes),
    )
    parts = [f"{title}: our rate as a share of that of a device copy", shares]
    for function in functions:
        here = [((c, r), found[c, r, function]) for c, r in shapes if (c, r, function) in found]
        peers = list(dict.fromkeys(peer for _, case in here for peer in case["peers"]))
        rows = (
            [
                labelled(*shape),
                _rate(case["copies"].get("torch", {})),
                _rate(case["ours"]),
                *(_rate(case["peers"].get(peer, {})) for peer in peers),
                _of_best(case),
                case["ours"].get("schedule", ""),
            ]
            for shape, case in here
        )
        headers = [label, "copy", "ours", *peers, "of the best peer", "schedule"]
        parts += [f"{title}: `{function}`, GB/s", table(headers, rows)]
    return parts


def _share(case: Case | None) -> str:
    share = case["ours"].get("of_copy") if case else None
    return f"{share:.1%}" if share is not None else ""


def _rate(words: Mapping[str, Any]) -> str:
    return f"{words['gbytes_per_s']:.0f}" if "gbytes_per_s" in words else ""


def _of_best(case: Case) -> str:
    """How many times as fast as the fastest peer."""
    rates = [words["gbytes_per_s"] for words in case["peers"].values() if "gbytes_per_s" in words]
    ours = case["ours"].get("gbytes_per_s")
    return f"{ours / max(rates):.2f}" if rates and ours is not None else ""
