"""A comparison of softmax as Markdown tables: the share of a copy by width and function, and every peer's rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import geometric_mean
from typing import Any

from benchmarks.peers.comparison import GRAPH
from benchmarks.peers.markdown import table
from schedules.operators.softmax.definition import SoftmaxProblem

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """How near to a device copy of as many bytes kernels of some shapes are to come: to a share of its rate, or to
    `beyond` microseconds more than its time, which for the smallest is a launch's."""

    name: str
    holds: Callable[[int, int], bool]  # of (rows, cols)
    share: float
    beyond: float = 0.0

    def allowed(self, copy_us: float) -> float:
        return max(copy_us / self.share, copy_us + self.beyond)


GOALS = (  # a case has the first that holds
    Goal("at most 4096 elements", lambda rows, cols: rows * cols <= 4096, 1, 0.3),
    Goal("at most 32 rows", lambda rows, _: rows <= 32, 0.92, 0.6),
    Goal("up to 512 columns, 32768 rows or more", lambda rows, cols: cols <= 512 and rows >= 2**15, 0.97),
    Goal("up to 262144 columns, 132 rows or more", lambda rows, cols: cols <= 2**18 and rows >= 132, 0.98),
    Goal("longer rows", lambda *_: True, 0.95),
)


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


def goals(results: Sequence[Mapping[str, Any]]) -> str:
    """A table of what the cases of results files reach of GOALS; cases whose copy was not timed count as not run."""
    found: dict[tuple[int, str, bool], list[Case]] = {}
    for case in (case for each in results for case in each["cases"]):
        p = case["problem"]
        at = next(k for k, goal in enumerate(GOALS) if goal.holds(p["rows"], p["cols"]))
        found.setdefault((at, p["dtype"], p["function"].endswith("_grad")), []).append(case)
    rows = []
    for (at, dtype, grad), cases in sorted(found.items(), key=itemgetter(0)):
        goal, kind = GOALS[at], f"{dtype} gradients" if grad else dtype
        timed = [
            (_of_copy(case), case) for case in cases if "us" in case["ours"] and "us" in case["copies"].get("torch", {})
        ]
        if not timed:
            continue
        met = sum(case["ours"]["us"] <= goal.allowed(case["ours"]["us"] * share) for share, case in timed)
        least, worst = min(timed, key=itemgetter(0))
        beyond = max(case["ours"]["us"] * (1 - share) for share, case in timed)
        asked = f"{goal.share:.0%}" + f" or {goal.beyond} us more" * bool(goal.beyond)
        shape = f"{worst['problem']['rows']} x {worst['problem']['cols']}"
        mean = f"{geometric_mean(share for share, _ in timed):.1%}"
        counts = f"{met} of {len(timed)}" + f", {len(cases) - len(timed)} not timed" * (len(timed) < len(cases))
        rows.append([goal.name, kind, asked, counts, mean, f"{least:.1%} ({shape})", f"{beyond:.2f} us"])
    return table(["shapes", "dtype", "goal", "met", "mean share of a copy", "least", "most beyond a copy"], rows)


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
    functions = [name for name in SoftmaxProblem.functions if any(name == function for *_, function in found)]
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


def _of_copy(case: Case) -> float:
    """Our rate by that of PyTorch's copy."""
    return float(case["copies"]["torch"]["us"] / case["ours"]["us"] * case["bytes"] / case["copy_bytes"])


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
