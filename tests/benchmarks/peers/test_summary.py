from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.summary import best_ratio, summary_table


def case(ours: float | None, peers: dict[str, float], **more: Any) -> dict[str, Any]:
    return {
        "operator": "softmax",
        "problem": {"dtype": "float16"},
        "launch": "stream",
        "date": "2026-01-02",
        "ours": {} if ours is None else {"us": ours},
        "peers": {name: {"us": us} for name, us in peers.items()},
        **more,
    }


def results(cases: list[dict[str, Any]], kind: str = "softmax", device: str = "Some GPU") -> dict[str, Any]:
    return {"kind": kind, "device": device, "versions": {"torch": "2"}, "cases": cases}


def test_the_fastest_peer_counts() -> None:
    assert best_ratio(case(2.0, {"a": 8.0, "b": 3.0})) == 1.5
    assert best_ratio(case(2.0, {"a": 8.0}, ratio=0.5)) == 0.5  # the file's own, which leaves out who computes less
    assert best_ratio(case(None, {"a": 8.0})) is None and best_ratio(case(2.0, {})) is None


def test_a_row_has_cases_mean_least_and_share_ahead() -> None:
    cases = [case(1.0, {"a": 4.0}), case(1.0, {"a": 1.0}), case(2.0, {"a": 1.0}), case(None, {"a": 1.0})]
    line = summary_table([results(cases)]).splitlines()[2]
    assert line == "| Some GPU | `softmax` | float16 | a stream | 3 | 1.26 | 0.50 | 33% |"


def test_groups_are_apart() -> None:
    same = {"a": 2.0}
    gpu = [case(1.0, same, launch="graph"), case(1.0, same), case(1.0, same, arithmetic="tf32")]
    lines = summary_table([results(gpu), results([case(1.0, same)], "cpu", "Some CPU")]).splitlines()
    assert [line.split("|")[3:5] for line in lines[2:6]] == [
        [" float16 ", " a stream "],
        [" float16 ", " a graph "],
        [" float16 in tf32 ", " a stream "],
        [" float16 ", "  "],
    ]
    assert lines[-3:] == ["Some GPU, 2026-01-02; torch 2", "", "Some CPU, 2026-01-02; torch 2"]


def test_files_of_the_same_device_and_versions_are_named_once() -> None:
    other = {**case(1.0, {"a": 2.0}), "date": "2026-01-05"}
    text = summary_table([results([case(1.0, {"a": 2.0})]), results([other])])
    assert text.splitlines()[-1] == "Some GPU, 2026-01-02 to 2026-01-05; torch 2" and text.count("torch 2") == 1


def test_no_case_is_an_empty_table() -> None:
    assert len(summary_table([results([])]).splitlines()) == 4


@pytest.mark.parametrize("launch", ["stream", "graph"])
def test_equal_is_not_ahead(launch: str) -> None:
    assert "| 0% |" in summary_table([results([case(1.0, {"a": 1.0}, launch=launch)])])
