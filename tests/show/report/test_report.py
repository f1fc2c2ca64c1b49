"""The command ``schedules report``: whatever the journals hold, a page that needs nothing else."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from schedules.build.builder import build
from schedules.bundle.bundle import write_bundle
from schedules.core.arch import parse_arch
from schedules.measure.records import Record
from schedules.show.report.tables import TABLES
from tests.command import Run, one_line
from tests.conftest import problem_of
from tests.fake import record_of
from tests.show.report.conftest import CONV, DEVICE, SEARCH, SOFTMAX, write_journal

pytestmark = pytest.mark.usefixtures("drawn")
LOGS = Path(__file__).parents[3] / "tuning_logs"
VOID = {"meta", "link", "img", "br", "hr"}


class Page(HTMLParser):
    """A page's texts, links and identifiers, after checking that every element is closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: set[str] = set()
        self.identifiers: list[str] = []
        self.text = ""
        self.source = file.read_text()
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag not in ("script", "link", "img", "iframe"), "not self-contained"
        assert not {"src", "onclick", "onload", "srcset"} & values.keys()
        if tag == "a":
            self.links.add(values.get("href") or values.get("xlink:href") or "")
        if values.get("id"):
            self.identifiers.append(values["id"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(out: Path) -> Page:
    """The page in `out`, whose links all lead somewhere on it, with its plots and tables beside it."""
    page = Page(out / "index.html")
    assert len(page.identifiers) == len(set(page.identifiers))
    for place in page.links:
        assert place[1:] in page.identifiers if place.startswith("#") else (out / place).is_file()
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page.source)
    assert not re.search(r"url\((?!#)|@import|https?://", outside)
    manifest = json.loads((out / "manifest.json").read_text())
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files == {*manifest["files"], "manifest.json"}
    for name in TABLES:
        rows = json.loads((out / "tables" / f"{name}.json").read_text())
        with open(out / "tables" / f"{name}.csv", newline="") as stream:
            read = list(csv.DictReader(stream))
        assert len(read) == len(rows) and all(list(row) == list(rows[0]) for row in read)
    return page


def rows_of(out: Path, name: str) -> list[dict]:
    return json.loads((out / "tables" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def everything(drawn: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The report of the repository's own journals, and the seconds of CPU that it took."""
    from schedules.cli import main

    out = tmp_path_factory.mktemp("report") / "all"
    start = time.process_time()
    assert main(["report", "--logs", str(LOGS), "--out", str(out)]) == 0
    return out, time.process_time() - start


@pytest.mark.slow
def test_all_that_is_kept_here(everything: tuple[Path, float]) -> None:
    out, seconds = everything
    assert seconds < 60
    assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) < 5 * 2**20
    page = page_of(out)
    problems = rows_of(out, "problems")
    journals = [line for file in LOGS.glob("*/*.jsonl") for line in file.read_text().splitlines()]
    kept = [json.loads(line) for line in journals]
    assert len(problems) == len({(r["device"], r["target"], Record.from_json(r).problem) for r in kept})
    assert "Roofline of NVIDIA H200" in page.text and "Not read" not in page.text
    for row in problems:
        assert row["name"] in page.text
        assert row["best_us"] is None or f"{row['best_us']:.2f} us" in page.text
    tutorial = next(row for row in problems if row["name"] == "tutorial")
    trials = [row for row in rows_of(out, "trials") if row["name"] == "tutorial"]
    assert tutorial["trials"] == len(trials) >= 600
    assert min(row["us"] for row in trials if row["us"]) == min(row["best_us"] for row in trials)
    shares = [row["share"] for row in rows_of(out, "roofline")]
    assert all(0 < share < 3 for share in shares) and len(shares) >= len(problems)
    above = sum(share > 1 for share in shares)
    assert above == sum(map(page.text.count, ("product reaches", "L2 cache of", "it reads", "timed in another run")))
    drawn = {f"{name}-nvidia-h200.png" for name in ("copies", "peers", "roofline")}
    assert {file.name for file in (out / "plots").iterdir()} == drawn


def test_a_journal_with_a_torn_line_and_failures(run: Run, tmp_path: Path) -> None:
    reason = 'no <b>room</b> & no "time"'
    records = [
        record_of(CONV, 40.0, search=SEARCH),
        record_of(CONV, 20.0, {"chunk": 16}, search=SEARCH, more={"registers": 8, "spilled": 0}),
        record_of(CONV, None, {"vector": 4}, search=SEARCH, outcome="timeout", reason=reason),
    ]
    file = write_journal(tmp_path / "logs", records)
    with open(file, "a") as stream:
        stream.write('{"schema":1,"operator":"conv2d_h')
    out = tmp_path / "out"
    result = run("report", "--logs", tmp_path / "logs", "--out", out)
    assert result.code == 0 and f"{out}/index.html: 1 problems" in result.out
    assert "line 4: cut off in writing" in result.err
    page = page_of(out)
    assert "Not read" in page.text and "line 4: cut off in writing" in page.text
    assert reason in page.text and "1 failed (1 timeout)" in page.text and "2.00 x the default" in page.text
    assert "8 registers a thread, 0 bytes spilled, by the journal" in page.text
    (failure,) = rows_of(out, "failures")
    assert (failure["outcome"], failure["count"], failure["example"]) == ("timeout", 1, reason)
    assert [row["us"] for row in rows_of(out, "trials")] == [40.0, 20.0, None]
    assert file.read_text().endswith("conv2d_h")  # a report mends nothing


def test_journals_with_little_in_them(run: Run, tmp_path: Path) -> None:
    logs, out = tmp_path / "logs", tmp_path / "out"
    only = [record_of(CONV, None, search=SEARCH, outcome="runtime", reason=f"at {place}") for place in range(3)]
    write_journal(logs, only)
    one = record_of(SOFTMAX, 7.0, search=SEARCH, device=DEVICE, target="cuda:sm_90a")
    final = record_of(problem_of("softmax", rows=8, cols=8), 3.0, stage="final", search=SEARCH)
    write_journal(logs, [one])
    write_journal(logs, [final])
    assert run("report", "--logs", logs, "--out", out).code == 0
    page = page_of(out)
    assert "Nothing was correct: 3 trials, 3 failed (3 runtime)" in page.text
    assert "GB/s, 1.00 x the default.  1 trial." in page.text and "no trials kept" in page.text
    assert {row["best_us"] for row in rows_of(out, "problems")} == {None, 7.0, 3.0}
    # again, of one of them: what is not of this report any more goes
    found = run("report", "softmax", "--device", DEVICE, "--logs", logs, "--out", out, "--json").json
    assert (found["problems"], found["devices"], found["notes"]) == (1, [DEVICE], [])
    page = page_of(out)
    assert "Nothing was correct" not in page.text and sorted(found["files"]) == sorted(
        str(file) for file in out.rglob("*") if file.is_file()
    )


def test_kernels_from_here_and_from_bundles(run: Run, tmp_path: Path) -> None:
    arch, logs, out = parse_arch("llvm"), tmp_path / "logs", tmp_path / "out"
    small = problem_of("softmax", rows=4, cols=8)
    best = record_of(SOFTMAX, 5.0, search=SEARCH)
    far = record_of(small, 5.0, search=SEARCH, device="A CPU that is not here")
    write_journal(logs, [far])
    write_journal(logs, [best])
    held = write_bundle(
        build(SOFTMAX, arch, best.schedule, best.config), tmp_path / "bundles" / "a", measured=best.to_json()
    )
    other = problem_of("softmax", rows=3, cols=5)
    write_bundle(build(other, arch), tmp_path / "bundles" / "deep" / "b")
    words = ("report", "--logs", logs, "--out", out, "--source", "--bundle", tmp_path / "bundles")
    assert run(*words).code == 0
    page = page_of(out)
    assert "not built here: the code is for the CPU A CPU that is not here" in page.text
    assert str(other) in page.text and "Not measured." in page.text
    stories = [Page(file) for file in sorted((out / "kernels").iterdir())]
    assert len(stories) == 2 == sum(place.startswith("kernels/") for place in page.links)
    for story in stories:
        assert story.source.count('class="story"') == 1 and "LLVM IR" in story.text
        # a story in brief has the whole program once, at its beginning
        assert story.text.count("The whole program") == 1 and story.text.count("What changes in the program") >= 2
    origins = {row["problem"]: row["origin"] for row in rows_of(out, "kernels")}
    assert origins[str(SOFTMAX)] == f"bundle {held.path}" and origins[str(small)] == ""
    # without the bundle the best is built
    shutil.rmtree(tmp_path / "bundles")
    assert run("report", "softmax", "rows=64", "--logs", logs, "--out", out, "--source").code == 0
    (row,) = rows_of(out, "kernels")
    page_of(out)
    assert row["origin"] == "built for this report" and row["counts"] and len(list((out / "kernels").iterdir())) == 1
    assert run("report", "softmax", "rows=64", "--logs", logs, "--out", out).code == 0
    page_of(out)
    assert not list((out / "kernels").iterdir())


def test_a_kernel_that_is_not_built_any_more(run: Run, tmp_path: Path) -> None:
    best = record_of(SOFTMAX, 5.0, target="cuda:sm_90a", device=DEVICE)
    illegal = type(best.config).parse({**best.config.to_json(), "threads": 7})
    write_journal(tmp_path / "logs", [replace(best, config=illegal)])
    assert run("report", "--logs", tmp_path / "logs", "--out", tmp_path / "out", "--source").code == 0
    assert "not built here: illegal config: threads" in page_of(tmp_path / "out").text


def test_mistakes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert "there are no journals in" in one_line(run("report", "--logs", tmp_path / "empty"))
    assert "is not a folder" in one_line(run("report", "--logs", tmp_path / "none"))
    logs = tmp_path / "logs"
    write_journal(logs, [record_of(SOFTMAX, 5.0)])
    nothing = run("report", "oneflow-32", "--logs", logs, "--out", tmp_path / "out")
    assert "nothing was measured yet of oneflow-32" in one_line(nothing)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    (mine / "manifest.json").write_text('{"files": ["../logs"]}')
    assert "holds no report" in one_line(run("report", "--logs", logs, "--out", mine))
    assert "is a file; --out needs a folder" in one_line(run("report", "--logs", logs, "--out", mine / "notes.txt"))
    assert "is no bundle and holds none" in one_line(run("report", "--logs", logs, "--bundle", mine))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "te-schedules[plot]" in one_line(run("report", "--logs", logs, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
