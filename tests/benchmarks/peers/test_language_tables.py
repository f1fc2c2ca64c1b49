from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.comparison import Results, Times
from benchmarks.peers.language_case import KIND, case_result
from benchmarks.peers.tables import selected, tables
from schedules.core.problem import Problem
from schedules.measure.results import is_comparison, read_results
from schedules.operators.softmax.definition import SoftmaxProblem
from tests.conftest import problem_of


def times(us: float) -> Times:
    return Times(us, us, us, 9)


def case(problem: Problem, schedule: str, ours: float | None, **siblings: float) -> dict[str, Any]:
    found = {name: (times(us), {"schedule": name}) for name, us in siblings.items()}
    return case_result(problem, {"ours": (times(ours) if ours else None, {"schedule": schedule}), **found})


def test_a_row_to_each_program(tmp_path: Path) -> None:
    file = tmp_path / "language_compare.json"
    results = Results(file, "Some GPU", {"torch": "2"}, kind=KIND, launch="graph")
    nhwc = problem_of("conv2d_nhwc", n=2, h=8, w=8, ci=16, co=8, kh=3, kw=3, pad=1, dtype="float16")
    results.put(case(SoftmaxProblem(8, 100), "frames", 2.0, block_registers=8.0, warp=4.0))
    results.put(case(SoftmaxProblem(8, 101), "frames", 1.0, block_registers=0.5))
    results.put(case(SoftmaxProblem(8, 103), "frames", None, block_registers=0.5))
    results.put(case(nhwc, "tma_wgmma", 1.0, wgmma=1.5, mma=2.5))
    text = tables(read_results(file))
    title, header, _, first, second, rest = text.replace("\n\n", "\n").split("\n")
    assert title.startswith("Programs in TIRx") and header.startswith("| operator | in TIRx | why | TE siblings |")
    assert first.startswith("| `conv2d_nhwc` | `tma_wgmma` | one warp loads by TMA while others multiply by wgmma")
    assert first.endswith("| `wgmma`, `mma` | 1 | 1.50 | 1.50 |")
    assert second.endswith("| `block_registers`, `warp` | 2 of 3 | 1.00 | 0.50 |")
    assert rest.startswith("Some GPU") and rest.endswith("torch 2")
    assert len(selected(read_results(file), {"operator": "softmax"})["cases"]) == 3
    assert not is_comparison(file)  # no other library's times, which reports count as peers'
