from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from schedules.core.errors import ToolchainError
from schedules.show.report import plots
from schedules.show.report.importance import Importance
from schedules.show.report.plots import COLOURS, Plot
from schedules.show.report.roofline import roofline
from tests.conftest import problem_of
from tests.fake import record_of
from tests.show.report.conftest import CONV, DEVICE, SEARCH, SOFTMAX, case, study_of, write_results

pytestmark = pytest.mark.usefixtures("drawn")


def assert_self_contained(plot: Plot) -> ElementTree.Element:
    """SVG that is well formed, refers only to itself, and takes its colours from the page; a wide one has a PNG."""
    assert plot.png.startswith(b"\x89PNG\r\n") and len(plot.png) > 2000 if plot.wide else plot.png == b""
    root = ElementTree.fromstring(plot.svg)
    assert "<style" not in plot.svg and root.get("viewBox") and root.get("width") is None
    for light, _ in COLOURS.values():
        assert light not in plot.svg
    assert not re.search(r"#[0-9a-f]{6}\b", plot.svg), "a colour of its own"
    identifiers = re.findall(r' id="([^"]*)"', plot.svg)
    assert len(identifiers) == len(set(identifiers))
    references = set(re.findall(r'xlink:href="#([^"]*)"|url\(#([^)]*)\)', plot.svg))
    assert {one or other for one, other in references} - set(identifiers) <= {link(plot)}
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", plot.svg)
    return root


def link(plot: Plot) -> str:
    found = re.search(r'<a xlink:href="#([^"]*)"', plot.svg)
    return found[1] if found else ""


def names(made: list[Plot]) -> list[str]:
    return [re.sub(r"^.*-[0-9a-f]{8}-", "", plot.name) for plot in made]


def test_a_whole_study(tmp_path: Path) -> None:
    peers = {"a & b": {"us": 8.0, "p10_us": 7.0, "p90_us": 9.0}, "far": {"us": 900.0}, "broken": {"failed": "no"}}
    compared = write_results(tmp_path / "a.json", [case(CONV, 10.0, peers)], device=DEVICE)
    here = {"device": DEVICE, "search": SEARCH}
    records = [
        record_of(CONV, 40.0, more={"elapsed": 1.0}, **here),
        record_of(CONV, None, {"chunk": 16}, more={"elapsed": 2.0}, **here),
        record_of(CONV, 20.0, {"chunk": 1}, more={"elapsed": 3.0}, **here),
    ]
    study = study_of(tmp_path / "logs", records, compared)
    weights = Importance("cpu", 80, 0.75, (("chunk", 0.5), ("vector", -0.01)))
    made = plots.study_plots(study, [weights, replace(weights, fields=())])
    assert names(made) == ["trials", "time", "importance-cpu"]
    for plot in made:
        assert_self_contained(plot)
    assert "75%" in made[2].caption
    assert [plot.svg for plot in plots.study_plots(study, [weights])] == [plot.svg for plot in made]


def test_nothing_to_draw(tmp_path: Path) -> None:
    failed = study_of(tmp_path / "failed", [record_of(CONV, None, search=SEARCH)] * 2)
    assert plots.study_plots(failed, []) == []
    one = study_of(tmp_path / "one", [record_of(CONV, 10.0, {"chunk": 1}, search=SEARCH)])
    assert plots.study_plots(one, []) == []  # a dot is no curve
    final = study_of(tmp_path / "final", [record_of(CONV, 10.0, {"chunk": 1}, search=SEARCH, stage="final")])
    assert plots.study_plots(final, []) == []
    empty = roofline(DEVICE, [], [])
    assert plots.of_roofline(empty) is None and plots.of_comparisons(DEVICE, []) is None


def test_points_of_the_roofline_lead_to_their_problems(tmp_path: Path) -> None:
    copies = {"torch": {"us": 1.0, "gbytes_per_s": 250.0}}
    cases = [case(problem_of("softmax", rows=8, cols=8), 3.0, {"torch": {"us": 4.0}}, copies=copies)]
    compared = write_results(tmp_path / "a.json", cases, ceilings={"float16": {"tflops": 40.0}})
    study = study_of(tmp_path / "logs", [record_of(SOFTMAX, 4.0, device=DEVICE)], compared)
    plot = plots.of_roofline(roofline(DEVICE, [study], compared))
    assert plot and plot.wide and link(plot) == study.key and plot.svg.count("<a ") == 1
    assert re.search(r"<title>softmax rows=64 cols=64: 4 us, [\d.]+ T\(FL\)OP/s</title>", plot.svg)
    texts = " ".join(assert_self_contained(plot).itertext())
    assert "fastest copy, 250 GB/s" in texts and "float16 40" in texts
    beside = plots.of_comparisons(DEVICE, compared)
    assert beside and "softmax float16 (stream), 1" in " ".join(assert_self_contained(beside).itertext())
    alone = plots.of_roofline(roofline(DEVICE, [study], []))  # a device of which nothing is known
    assert alone and "GB/s" not in alone.svg and "was not measured" in alone.caption and "was not" not in plot.caption


def test_shapes_on_a_map_are_as_their_worst_case(tmp_path: Path) -> None:
    """By the share of the copy's 250 GB/s: 0.9, 0.5 where the other function has 0.99, and one without a copy."""

    def timed(rows: int, cols: int, share: float, function: str = "softmax", **more: Any) -> dict[str, Any]:
        problem = problem_of("softmax", rows=rows, cols=cols, function=function)
        return case(problem, problem.min_bytes / 250e3 / share, {}, **more)

    copies = {"torch": {"us": 1.0, "gbytes_per_s": 250.0}}
    cases = [timed(64, 256, 0.9, copies=copies), timed(8, 16, 0.99, copies=copies), timed(2, 2, 1.0)]
    cases.append(timed(8, 16, 0.5, "log_softmax", copies=copies))
    plot = plots.of_shares(DEVICE, write_results(tmp_path / "a.json", cases))
    assert plot and plot.wide and plots.of_shares(DEVICE, []) is None
    texts = " ".join(assert_self_contained(plot).itertext())
    found = dict(re.findall(r"(under \d+%|\d+% to \d+%|\d+% and more): (\d)", texts))
    assert found == {"97% and more": "0", "92% to 97%": "0", "85% to 92%": "1", "70% to 85%": "0", "under 70%": "1"}


def test_comparisons_stand_in_order(tmp_path: Path) -> None:
    """Whichever case a file has first."""
    fields = ((dict(dtype="float32"), "float32"), (dict(dtype="bfloat16"), "bfloat16"), ({}, "float16"))
    cases = [case(problem_of("softmax", rows=8, cols=8, **some), 3.0, {"torch": {"us": 4.0}}) for some, _ in fields]
    plot = plots.of_comparisons(DEVICE, write_results(tmp_path / "a.json", cases))
    assert plot
    texts = " ".join(assert_self_contained(plot).itertext())
    places = [texts.index(f"softmax {dtype} (stream), 1") for dtype in ("bfloat16", "float16", "float32")]
    assert places == sorted(places)


def test_light_and_dark_have_the_same_names() -> None:
    rules = plots.style_rules()
    light, dark = rules.split("@media")
    for name, pair in COLOURS.items():
        assert f"--plot-{name}:{pair[0]};" in light and f"--plot-{name}:{pair[1]};" in dark
    # the colours are told apart in a file by their value
    assert len({light for light, _ in COLOURS.values()}) == len(COLOURS)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ToolchainError, match=r"pip install 'te-schedules\[plot\]'"):
        plots.require_matplotlib()


def test_labels_that_would_overlap_are_moved_apart() -> None:
    assert plots._spread([50.0, 356.0, 660.0, 694.0]) == [50.0, 356.0, 660.0, 858.0]
    assert plots._spread([]) == []
