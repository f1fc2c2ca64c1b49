"""Studies and results files of things that were never measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.journal import append, journals
from schedules.measure.lookup import located, summaries
from schedules.measure.records import Record, Search
from schedules.show.report.data import Comparison, Study, comparisons, studies
from tests.conftest import problem_of

# of stride 2, which every CPU multiplies directly
CONV = problem_of("conv2d_hwcn", n=32, h=12, w=12, ci=16, co=32, kh=3, kw=3, pad=1, stride=2)
SOFTMAX = problem_of("softmax", rows=64, cols=64)
SEARCH = Search("template", 1, 0, trials=40)
DEVICE = "Test GPU"


@pytest.fixture(scope="session")
def drawn() -> None:
    """Skips where there is no matplotlib."""
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the plots, is not installed (the extra plot)")


@pytest.fixture(scope="session")
def model() -> None:
    """Skips where there is no xgboost."""
    pytest.importorskip("xgboost", reason="xgboost, which importance is told by, is not installed (the extra tune)")


def write_journal(folder: Path, records: Sequence[Record]) -> Path:
    """A journal of `records`, all of one device and operator."""
    for record in records:
        append(folder, record)
    return next(journals(folder))


def study_of(folder: Path, records: Sequence[Record], compared: Sequence[Comparison] = ()) -> Study:
    """The study of the only problem that `records` are of."""
    (study,) = studies(summaries(located([write_journal(folder, records)])), compared)
    return study


def case(problem: Problem, ours: float | None, peers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A case of a results file; what `peers` says of each is kept."""
    spec = operator_of(problem).schedules[0]
    words: dict[str, Any] = {"failed": "it hung"} if ours is None else {"us": ours, "p10_us": ours, "p90_us": ours}
    return {
        "operator": operator_of(problem).name,
        "problem": problem.to_json(),
        "launch": "stream",
        "date": "2026-11-21T10:00:00+00:00",
        "ours": {"schedule": spec.name, "config": {}, **words},
        "peers": peers,
        **more,
    }


def write_results(file: Path, cases: Sequence[dict[str, Any]], **head: Any) -> list[Comparison]:
    """A results file of `cases`, and what its folder is read as."""
    known = {"schema": 1, "kind": "softmax", "device": DEVICE, "versions": {}, "date": "2026-11-21T11:00:00+00:00"}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**known, **head, "cases": list(cases)}))
    return comparisons([file.parent])[0]
