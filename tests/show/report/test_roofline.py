from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.show.report.roofline import Ceiling, Point, Roofline, roofline
from tests.conftest import problem_of
from tests.fake import record_of
from tests.show.report.conftest import CONV, DEVICE, SOFTMAX, case, study_of, write_results

ROOF = Roofline(DEVICE, (Ceiling("float32", 50.0, 67.0), Ceiling("bfloat16", None, 900.0)), 1000.0, ())


@pytest.mark.parametrize(
    ("arithmetic", "intensity", "roof"),
    [
        ("float32", 10.0, 10.0),  # under the copy
        ("float32", 500.0, 50.0),  # the product that was measured, not the datasheet's
        ("bfloat16", 5000.0, 900.0),
        ("bf16x3", 5000.0, 300.0),  # three products for one
        ("int8", 5000.0, 5000.0),  # only the copy is known
    ],
)
def test_the_lower_bound_is_the_roof(arithmetic: str, intensity: float, roof: float) -> None:
    assert ROOF.roof(arithmetic, intensity) == pytest.approx(roof)


def test_nothing_is_known_of_this_device(tmp_path: Path) -> None:
    found = roofline(DEVICE, [study_of(tmp_path, [record_of(CONV, 20.0, device=DEVICE)])], [])
    assert found.ceilings == () and found.bandwidth is None
    (point,) = found.points
    assert point.roof is None and point.share is None and point.tflops == pytest.approx(CONV.flops / 20e6)
    assert point.intensity == CONV.flops / CONV.min_bytes


def test_the_datasheet_of_a_known_device() -> None:
    found = roofline("NVIDIA H200", [], [])
    assert found.ceiling("int8") == Ceiling("int8", None, 1979) and found.roof("int8", 1.0) == 1979


def test_points_come_from_records_before_comparisons(tmp_path: Path) -> None:
    copies = {"torch": {"us": 1.0, "gbytes_per_s": 250.0}}
    other = problem_of("softmax", rows=8, cols=8)
    old, new = ({"date": f"2026-11-2{day}T00:00:00+00:00"} for day in (1, 2))
    compared = write_results(
        tmp_path / "a.json",
        [
            case(SOFTMAX, 1.0, {}, copies=copies),
            case(other, 3.0, {}, launch="graph", **new),
            case(other, 2.0, {}, **old),
            case(problem_of("softmax", rows=9, cols=9), None, {}),
        ],
        ceilings={"float32": {"tflops": 40.0}},
    )
    record = record_of(SOFTMAX, 4.0, device=DEVICE, more={"copy_gbytes_per_s": 300.0})
    study = study_of(tmp_path / "logs", [record], compared)
    found = roofline(DEVICE, [study], compared)
    assert found.bandwidth == 250.0 and found.ceilings == (Ceiling("float32", 40.0, None),)
    points = {point.name: point for point in found.points}
    assert len(points) == 2
    assert (points["rows=64 cols=64"].us, points["rows=64 cols=64"].key) == (4.0, study.key)
    assert (points["rows=8 cols=8"].us, points["rows=8 cols=8"].source) == (3.0, "a.json, graph")  # the newest
    assert points["rows=64 cols=64"].share == pytest.approx(SOFTMAX.min_bytes / 4e3 / 250)
    assert roofline(DEVICE, [study], []).bandwidth == 300.0


def test_the_roof_is_the_same_whichever_problems_are_meant(tmp_path: Path) -> None:
    cases = [
        case(SOFTMAX, 1.0, {}, copies={"torch": {"us": 1.0, "gbytes_per_s": 250.0}}),
        case(problem_of("softmax", rows=8, cols=8), 3.0, {}),
    ]
    compared = write_results(tmp_path / "a.json", cases)
    found = roofline(DEVICE, [], compared, lambda whole: replace(whole, cases=whole.cases[1:]))
    assert found.bandwidth == 250.0 and [point.name for point in found.points] == ["rows=8 cols=8"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (dict(tflops=60.0, roof=50.0), "the library's product reaches 50; this is 90% of the datasheet's 67"),
        (dict(read=2**20, written=2**20), "its 2 MiB fit the L2 cache of 60, the copy's do not"),
        (dict(read=2**26, written=2**26), "part of its 128 MiB stays in the L2 cache of 60"),
        (dict(read=2**30, written=2**29), "it reads 2 bytes for each that it writes"),
        (dict(read=2**30, written=2**30), "the copy was timed in another run; by 10.0%"),
        (dict(roof=12.0), ""),
        (dict(roof=None), ""),
    ],
)
def test_a_point_above_its_roof_has_a_reason(more: dict[str, Any], reason: str) -> None:
    point = Point("conv2d_nhwc", "a", "", "float32", "simt", 1.0, 10.0, 11.0, 10.0, "journal", 1, 1)
    assert replace(ROOF, device="NVIDIA H200").reason(replace(point, **more)).startswith(reason or "")
    assert bool(replace(ROOF, device="NVIDIA H200").reason(replace(point, **more))) == bool(reason)


def test_each_arithmetic_of_a_problem_is_a_point(tmp_path: Path) -> None:
    split = case(CONV, 3.0, {}, arithmetic="bf16x3")
    compared = write_results(tmp_path / "a.json", [split])
    study = study_of(tmp_path / "logs", [record_of(CONV, 9.0, device=DEVICE)], compared)
    found = {point.arithmetic: (point.us, point.key) for point in roofline(DEVICE, [study], compared).points}
    assert found == {"bf16x3": (3.0, ""), "float32": (9.0, study.key)}


def test_what_products_are_computed_in(tmp_path: Path) -> None:
    half = problem_of("softmax", rows=2, cols=2, dtype="float16")
    records = (
        (record_of(CONV, 9.0, device=DEVICE), "float32"),
        (record_of(half, 9.0, device=DEVICE), "float16"),
    )
    for record, arithmetic in records:
        study = study_of(tmp_path / arithmetic, [record], [])
        assert [point.arithmetic for point in roofline(DEVICE, [study], []).points] == [arithmetic]
