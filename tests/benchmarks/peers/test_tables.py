from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.tables import SECTIONS, selected, tables
from schedules.core.errors import UsageError
from schedules.measure.results import KINDS, LANGUAGES


def results(*problems: dict[str, Any], dates: tuple[str, ...] = ()) -> dict[str, Any]:
    cases = [
        {"operator": problem.pop("operator"), "launch": problem.pop("launch", "stream"), "problem": problem}
        for problem in problems
    ]
    for case, date in zip(cases, dates, strict=False):
        case["date"] = date
    return {"kind": "softmax", "device": "Some GPU", "versions": {"torch": "2", "cudnn": "9"}, "cases": cases}


def test_every_kind_has_its_tables() -> None:
    assert set(SECTIONS) == {*KINDS, LANGUAGES}
    assert tables(results()) == "Some GPU; torch 2, cudnn 9"


def test_the_days_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "softmax", lambda found: [f"{len(found['cases'])} cases"])  # type: ignore[misc]
    two = [{"operator": "softmax"}, {"operator": "softmax"}]
    found = results(*two, dates=("2026-11-22T01:00:00", "2026-11-21T09:00:00"))
    assert tables(found) == "2 cases\n\nSome GPU, 2026-11-21 to 2026-11-22; torch 2, cudnn 9"


def test_cases_are_selected_by_their_fields() -> None:
    found = results(
        {"operator": "conv2d_nhwc", "n": 2, "dtype": "float16"},
        {"operator": "conv2d_nhwc", "n": 2, "dtype": "float16", "launch": "graph"},
        {"operator": "conv2d_nchw", "n": 4, "dtype": "float16"},
    )

    def chosen(**where: str) -> list[int]:
        return [found["cases"].index(case) for case in selected(found, where)["cases"]]

    assert chosen() == [0, 1, 2] and chosen(operator="conv2d_nhwc") == [0, 1]
    assert chosen(launch="graph") == [1] and chosen(n="4", dtype="float16") == [2]
    assert selected(found, {"n": "4"})["device"] == "Some GPU" and len(found["cases"]) == 3
    with pytest.raises(UsageError, match="no case has operator=conv2d_nhwc n=4"):
        selected(found, {"operator": "conv2d_nhwc", "n": "4"})
    with pytest.raises(UsageError, match="no case has images=2"):
        selected(found, {"images": "2"})
    with pytest.raises(UsageError, match="there are no cases"):
        selected(results(), {})
