from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.measure.records import Search
from schedules.show.report.data import OTHER, PEER, comparisons, curves, failures, journal_times, pattern
from tests.fake import record_of
from tests.show.report.conftest import CONV, DEVICE, SEARCH, SOFTMAX, case, study_of, write_results


def test_hostile_comparisons_cost_themselves(tmp_path: Path) -> None:
    """A case, or a file, that is not as a comparison writes it is told in a line."""
    problem = {"rows": 64, "cols": 64}
    ours = {"us": 2.0, "schedule": "warp", "config": {}}
    case = {"operator": "softmax", "problem": problem, "launch": "stream", "date": "2026", "ours": ours, "peers": {}}
    whole = {"schema": 1, "kind": "softmax", "device": "A GPU", "versions": {}, "cases": [case]}
    hostile: list[Any] = [None, "", [], [1], {"a": 1}, -1, 0, True, math.inf, "x", [[[]]]]
    wrong = [{**case, name: value} for name in ("operator", "problem", "ours", "peers") for value in hostile]
    wrong += [{**case, "ours": {**ours, name: value}} for name in ("us", "p10_us", "schedule") for value in hostile[1:]]
    files = [{**whole, "cases": [case, *wrong]}, *({**whole, "cases": value} for value in hostile)]
    files += [{**whole, name: value} for name in ("device", "versions", "ceilings") for value in hostile]
    for number, words in enumerate(files):
        (tmp_path / f"{number}.json").write_text(json.dumps(words))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.json")
    found, notes = comparisons([tmp_path])
    assert found[0].cases[0].beside.ours and len(notes) > 20
    assert all(timing.us is None or timing.us > 0 for each in found for c in each.cases for timing in c.beside.timings)


def test_curves_are_one_for_each_search() -> None:
    times = (40.0, None, 20.0, 25.0)
    first = [
        record_of(CONV, us, {"chunk": 2**place}, search=SEARCH, more={"elapsed": 1.5 * place})
        for place, us in enumerate(times)
    ]
    again = record_of(CONV, 30.0, search=Search("template", 2, 0, schedules=("cpu",)), more={"elapsed": 3.0})
    narrowed = replace(again, search=Search("template", 1, 0, schedules=("cpu",)))
    final = record_of(CONV, 1.0, stage="final", search=SEARCH)
    bench = record_of(CONV, 1.0, stage="bench")
    found = curves([*first[:2], again, bench, *first[2:], narrowed, final])
    assert [curve.name for curve in found] == ["template", "template: cpu (search 2)", "template: cpu"]
    assert found[0].us == (40.0, math.inf, 20.0, 25.0) and found[0].best == (40.0, 40.0, 20.0, 20.0)
    assert found[0].seconds == (0.0, 1.5, 3.0, 4.5) and not found[0].dated


def test_seconds_are_told_by_dates_where_the_journal_has_none() -> None:
    dates = ("2026-11-20T23:59:50+00:00", "2026-11-21T00:00:10+00:00")
    (curve,) = curves([record_of(CONV, 9.0, search=SEARCH, date=date) for date in dates])
    assert curve.dated and curve.seconds == (0.0, 20.0)


def test_failures_alike_fall_together() -> None:
    def failed(reason: str, outcome: str = "compile") -> object:
        return record_of(CONV, None, search=SEARCH, outcome=outcome, reason=reason)

    reasons = ["needs 4096 bytes\nat 0xff", "needs 8 bytes at 0x1", "needs 1.5e+3 bytes at 0x0", "no", ""]
    found = failures([*map(failed, reasons), failed("needs 1 bytes at 0x0", "runtime"), record_of(CONV)])
    assert [(item.outcome, item.reason, item.count) for item in found] == [
        ("compile", "needs # bytes at #", 3),
        ("compile", "no", 1),
        ("compile", "no reason was given", 1),
        ("runtime", "needs # bytes at #", 1),
    ]
    assert found[0].example == reasons[0] and found[0].config == str(record_of(CONV).config)
    assert pattern("sm_90a") == "sm_#a"


def test_what_the_journal_has_beside_each_other(tmp_path: Path) -> None:
    records = [
        record_of(CONV, 40.0, search=SEARCH),
        record_of(CONV, 20.0, {"chunk": 16}, search=SEARCH, more={"peers": {"torch": 30.0, "other": 50.0}}),
    ]
    study = study_of(tmp_path, records)
    own = journal_times(study.summary)
    assert [(t.name, t.us) for t in own.timings] == [
        ("default", 40.0),
        ("best", 20.0),
        ("torch", 30.0),
        ("other", 50.0),
    ]
    assert own.ratio == 1.5 and study.ratio == (1.5, "torch") and study.beside == (own,)


def test_a_comparison_counts_before_the_journal(tmp_path: Path) -> None:
    peers = {"cudnn": {"us": 8.0}, "tf32": {"us": 1.0, "counts": False}, "triton": {"failed": "no"}}
    compared = write_results(tmp_path / "gpu" / "compare.json", [case(CONV, 10.0, peers)], device=DEVICE)
    record = record_of(CONV, 20.0, device=DEVICE, more={"peers": {"torch": 30.0}}, date="2027-01-01T00:00:00+00:00")
    study = study_of(tmp_path / "logs", [record], compared)
    run = study.beside[1]
    assert [(t.name, t.kind, t.us) for t in run.timings[1:]] == [
        ("cudnn", PEER, 8.0),
        ("tf32", OTHER, 1.0),
        ("triton", PEER, None),
    ]
    assert run.timings[3].note == "no" and study.ratio == (0.8, "cudnn")
    tf32 = case(CONV, 5.0, {"tf32": {"us": 1.0}}, arithmetic="tf32", date="2027-06-01T00:00:00+00:00")
    compared = write_results(tmp_path / "gpu" / "compare.json", [tf32, case(CONV, 10.0, peers)], device=DEVICE)
    asked = study_of(tmp_path / "asked", [record], compared)
    assert asked.beside[1].place == "compare.json, stream, in tf32" and asked.ratio == (0.8, "cudnn")
    other = study_of(tmp_path / "more", [record_of(CONV, 20.0, device="Another")], compared)
    assert len(other.beside) == 1  # a device's comparisons are its own


def test_results_that_are_not_understood_are_told(tmp_path: Path) -> None:
    strange = case(SOFTMAX, 5.0, {}) | {"operator": "conv9d"}
    gone = case(SOFTMAX, 5.0, {}) | {"ours": {"schedule": "gone", "us": 5.0}}
    torn = {"operator": "softmax", "problem": SOFTMAX.to_json()}
    failed = case(SOFTMAX, None, {"torch": {"us": 3.0}}, copies={"torch": {"us": 1.0, "gbytes_per_s": 100.0}})
    write_results(
        tmp_path / "a.json", [strange, torn, failed, gone], ceilings={"int8": {"tflops": 9.0}, "tf32": {"failed": "no"}}
    )
    (tmp_path / "scaling.json").write_text('{"counts": []}')
    write_results(tmp_path / "new.json", [], schema=99)
    (tmp_path / "torn.json").write_text('{"kind": "softmax", "cases')
    (found,), notes = comparisons([tmp_path])
    assert len(notes) == 3 and "1 of 4 cases not read: unknown operator 'conv9d'" in notes[0]
    assert "not a comparison of schema 1" in notes[2]
    assert "not a case: KeyError 'ours'" in " ".join(notes)
    assert found.ceilings == {"int8": 9.0} and found.bandwidth == 100.0
    only, old = found.cases
    assert old.schedule == "gone" and old.beside.ours and old.beside.ours.us == 5.0  # of an earlier version
    assert only.beside.ours is None and only.beside.ratio is None and only.beside.timings[0].note == "it hung"


@pytest.mark.parametrize("field", ["device", "target"])
def test_no_two_studies_share_a_key(tmp_path: Path, field: str) -> None:
    one = record_of(CONV, 1.0)
    other = replace(one, **{field: "llvm:haswell"})
    keys = {study_of(tmp_path / str(place), [record]).key for place, record in enumerate((one, other))}
    assert len(keys) == 2
