"""Our softmax beside its peers and the device copies that bound it: the cases, and one of them run.

A results file of kind "softmax"; see `comparison`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.bench import Bench
from benchmarks.peers.comparison import STREAM, Call, Entrant, Times, compare, head_of
from benchmarks.peers.graphs import launching
from benchmarks.peers.softmax import COPIES, PEERS
from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.measure.choice import Choice
from schedules.measure.timer import Timer
from schedules.operators.softmax.definition import FUNCTIONS, LOSSES, SoftmaxProblem

KIND = "softmax"
ROWS = 49152
WIDTHS = (32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768)
ODD_WIDTHS = (100, 1000, 1023, 50257)
FEW_ROWS, LONG_ROWS = (1, 8, 132), (65536, 262144, 1048576)
SCALE, MASK, KEEP = 0.125, "full", 0.9  # of what is fused
GRIDS: dict[str, dict[str, Any]] = json.loads((Path(__file__).resolve().parents[1] / "softmax_grids.json").read_text())
SETS = ("widths", "odd", "few", "fused", "losses", "map", *GRIDS)
LOSS_ROWS, VOCABULARIES = (1024, 8192), (32000, 50257, 128256, 151936)

# rows and columns of a map: powers of two, those of vocabularies and images, odd ones
MAP_ROWS = (1, 2, 8, 32, 132, 512, 2048, 8192, 32768, 131072, 524288)
MAP_COLS = (
    *(1, 2, 3, 5, 8, 13, 16, 32, 37, 64, 77, 100, 128, 197, 256, 333, 501, 512, 1000, 1024, 2048, 3000, 4096, 8192),
    *(10000, 16384, 32000, 32768, 50257, 65536, 100001, 128256, 151936, 262144, 393216, 524287, 1048576),
)
MAP_MOST = 2**28  # elements
# of sets that are not compared often
FILES = {"losses": "softmax_losses.json", "map": "softmax_map.json", **dict.fromkeys(GRIDS, "softmax_grids.json")}

DISTINCT_ELEMENTS = 2**19
FEWEST_DISTINCT = 5  # rows


def cases(
    sets: Sequence[str], widths: Sequence[int], functions: Sequence[str], dtype: str, rows: int = ROWS
) -> list[SoftmaxProblem]:
    """The problems of `sets` (of SETS), each once, narrow ones first; "fused" is softmax and its gradient with scale,
    mask (forward only) and dropout; "losses" is those of `functions` that are, over vocabularies, and the other sets
    have the rest.  A grid has those of dtypes that its authors measure.

    Raises UsageError (ProblemError for a dtype or extent that no softmax takes).
    """
    if unknown := [name for name in sets if name not in SETS]:
        raise UsageError(f"unknown set {unknown[0]!r}; use {', '.join(SETS)}")
    if unknown := [name for name in functions if name not in SoftmaxProblem.functions]:
        raise UsageError(f"unknown function {unknown[0]!r}; use {', '.join(SoftmaxProblem.functions)}")

    def plain(shapes: Iterable[tuple[int, int]]) -> Iterator[SoftmaxProblem]:
        return (SoftmaxProblem(r, c, f, dtype) for r, c in shapes for f in functions if f in FUNCTIONS)

    found: list[SoftmaxProblem] = []
    for name in SETS:
        if name not in sets:
            continue
        if name == "few":
            found += plain((r, c) for c in LONG_ROWS for r in FEW_ROWS)
        elif name == "fused":
            for cols in widths:
                if "softmax" in functions:
                    found.append(SoftmaxProblem(rows, cols, "softmax", dtype, SCALE, MASK, KEEP))
                if "softmax_grad" in functions:
                    found.append(SoftmaxProblem(rows, cols, "softmax_grad", dtype, SCALE, "none", KEEP))
        elif name == "losses":
            shapes = [(r, c) for c in VOCABULARIES for r in LOSS_ROWS]
            found += [SoftmaxProblem(r, c, f, dtype) for r, c in shapes for f in functions if f in LOSSES]
        elif name == "map":
            found += plain((r, c) for c in MAP_COLS for r in MAP_ROWS if r * c <= MAP_MOST)
        elif name in GRIDS:
            if dtype in GRIDS[name]["dtypes"]:
                theirs = [f for f in functions if f in GRIDS[name]["functions"]]
                found += [SoftmaxProblem(r, c, f, dtype) for r, c in GRIDS[name]["shapes"] for f in theirs]
        else:
            found += plain((rows, c) for c in (widths if name == "widths" else ODD_WIDTHS))
    return list(dict.fromkeys(found))


def file_of(sets: Sequence[str]) -> str:
    """The name of the file in which results of `sets` are kept.  Raises UsageError for sets of several."""
    files = sorted({FILES.get(name, "softmax_compare.json") for name in sets})
    if len(files) > 1:
        raise UsageError(f"these sets belong to {' and '.join(files)}; compare them one after the other")
    return files[0]


def name_of(problem: SoftmaxProblem) -> str:
    """A short name that no other case has; also that of its bundle's folder."""
    p = problem
    steps = [f"scale{p.scale:g}"] * (p.scale != 1) + [f"mask-{p.mask}"] * (p.mask != "none")
    steps += [f"keep{p.keep:g}"] * p.has_dropout
    return "-".join([p.function, f"{p.rows}x{p.cols}", p.dtype, *steps])


def distinct_rows(problem: SoftmaxProblem) -> int:
    """How many different rows a case's data has: few enough for a quick reference, and an odd number, so that a row
    taken for another is seen."""
    return min(problem.rows, max(FEWEST_DISTINCT, DISTINCT_ELEMENTS // problem.cols) | 1)


def run_case(
    problem: SoftmaxProblem,
    arch: Arch,
    choice: Choice,
    peers: Sequence[str],
    timer: Timer,
    seconds: float,
    *,
    seed: int = 0,
    builds: Path | None = None,
    launch: str = STREAM,
) -> dict[str, Any]:
    """Compare `choice` with the copies and `peers` (names in PEERS); what `case_result` says.

    All are launched the same way: with `launch` = GRAPH each from a CUDA graph, which is what is verified then too.

    Raises DeviceError, ToolchainError, and what a device that is out of order makes TVM or PyTorch raise.
    """
    bench = Bench(problem, arch, seed, replace(problem, rows=distinct_rows(problem)))
    launched = launching(launch)

    def of_peer(name: str) -> Callable[[], Call]:
        return lambda: launched(PEERS[name](problem, bench.tensors))

    def of_copy(name: str) -> Callable[[], Call]:
        return lambda: launched(COPIES[name](problem, bench.tensors))

    entrants = {"ours": bench.ours(choice, builds and builds / name_of(problem), launched)}
    entrants |= {f"copy:{name}": Entrant(of_copy(name), {}, judged=False) for name in COPIES}
    entrants |= {f"peer:{name}": Entrant(of_peer(name), {}) for name in peers}
    return case_result(problem, compare(entrants, timer, bench.judge, bench.poison, seconds), launch)


def _told(times: Times | None, about: Mapping[str, Any], nbytes: int) -> dict[str, Any]:
    """With the rate at which `nbytes` were moved."""
    rate = {**times.to_json(), "gbytes_per_s": float(f"{nbytes / times.us / 1e3:.5g}")} if times else {}
    return {**about, **rate}


def case_result(
    problem: SoftmaxProblem, found: Mapping[str, tuple[Times | None, dict[str, Any]]], launch: str = STREAM
) -> dict[str, Any]:
    """One case as plain data.  Names in `found`: "ours", "copy:<name>", "peer:<name>".

    `bytes` are the problem's tensors, each once: an input read and an output written for a function alone, two inputs
    read and an output written for a gradient.  `of_copy` is a rate as a share of that of PyTorch's copy.
    """
    copied = 2 * problem.arguments()[0].nbytes
    copies: dict[str, Any] = {}
    peers: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for name, (times, about) in found.items():
        kind, _, label = name.partition(":")
        words = _told(times, about, copied if kind == "copy" else problem.min_bytes)
        if kind == "ours":
            ours = words
        else:
            (copies if kind == "copy" else peers)[label] = words
    if copy := copies.get("torch", {}).get("us"):
        for words in (ours, *peers.values()):
            if "us" in words:
                words["of_copy"] = round(copy / words["us"] * problem.min_bytes / copied, 4)
    return {**head_of(problem, launch), "copy_bytes": copied, "ours": ours, "copies": copies, "peers": peers}


def line_of(case: Mapping[str, Any]) -> str:
    """A case in a line, for people who watch."""
    p, ours = case["problem"], case["ours"]
    shape = f"{p['rows']}x{p['cols']}"
    fused = " fused" if (p["scale"], p["mask"], p["keep"]) != (1.0, "none", 1.0) else ""
    name = f"{p['function'] + fused:22} {shape:14} {p['dtype']:8}"
    if "us" in ours:
        what = (
            f"{ours['us']:9.2f} us {ours['gbytes_per_s']:6.0f} GB/s {ours.get('of_copy', float('nan')):6.1%} of a copy"
        )
        what += f"  {ours['schedule']} ({ours['chosen']})"
    else:
        what = f"FAILED: {ours.get('failed', 'not run')}"
    others = "  ".join(
        f"{peer} {words['gbytes_per_s']:.0f}" if "gbytes_per_s" in words else f"{peer} -"
        for peer, words in [("copy", case["copies"].get("torch", {})), *case["peers"].items()]
    )
    return f"{name} {what}  {others}"
