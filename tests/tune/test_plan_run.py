from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedules.bundle.bundle import Bundle
from schedules.core.arch import Arch
from schedules.core.errors import BundleError, TuningError
from schedules.tune import plan_run, summary
from schedules.tune.crew import Crew, LocalCrew
from schedules.tune.plan import read_plan
from tests.command import Run, one_line
from tests.fake import record_of
from tests.tune.plans import TWO, plan_file


def entries(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "report.json").read_text())["entries"]
    return {entry["name"]: entry for entry in found}


def test_a_plan_on_the_cpu(run: Run, tmp_path: Path) -> None:
    """Two searches and one that this machine cannot do: bundles, a report; again, and nothing is measured again."""
    gpu = '[[work]]\nproblem = "tutorial"\ntargets = ["rocm:gfx942"]\npriority = 3\n'
    file, logs, out = plan_file(tmp_path, TWO + gpu), tmp_path / "logs", tmp_path / "out"
    words = ["tune", "--plan", file, "--log", logs, "--out", out, "--builders", "1"]
    result = run(*words)
    assert result.code == 1 and "no device for rocm:gfx942 here" in result.out, result.err
    assert "== 1 of 3: tutorial-gfx942" in result.out and "== 3 of 3: softmax-rows64-cols64-llvm" in result.out
    found = entries(out)
    assert [entry["state"] for entry in found.values()] == ["failed", "done", "done"]
    conv = found["small-conv-llvm"]
    assert conv["trials"] == 5 and conv["outcomes"] == {"correct": 5} and conv["why"] == "5 trials"
    assert conv["default_us"] > 0 and conv["speedup"] >= 0.9 and conv["error"] <= 1 and "seed 1" in conv["verified"]
    bundle = Bundle.open(conv["bundle"])
    assert bundle.manifest["config"] == conv["config"] and bundle.manifest["measured"]["p10_us"] == conv["best_us"]
    page = (out / "report.md").read_text()
    assert "2 of 3 searches done" in page and "## small-conv-llvm" in page and "no device for rocm:gfx942" in page
    lines = {file: file.read_text() for file in logs.rglob("*.jsonl")}
    assert len(lines) == 2

    before = (Path(conv["bundle"]) / "kernel.json").stat().st_mtime_ns
    again = run(*words, "--json")
    assert again.code == 1 and {file: file.read_text() for file in logs.rglob("*.jsonl")} == lines
    assert [entry["resumed"] for entry in again.json["entries"]] == [0, 5, 4]
    assert (Path(conv["bundle"]) / "kernel.json").stat().st_mtime_ns == before
    assert run("verify", conv["bundle"]).code == 0


class Plans:
    """Runs of TWO with a crew that is never asked for work: `tune` is replaced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.opened: list[Arch] = []

    def run(self, tune: Any, stop: Any = lambda: False, text: str = TWO) -> list[plan_run.Outcome]:
        from schedules.tune.progress import watcher_for

        self.monkeypatch.setattr(plan_run, "tune", tune)
        plan = read_plan(plan_file(self.folder, text))
        with watcher_for() as view:
            return plan_run.run_plan(plan, view, out=self.folder / "out", open_crew=self.open, stop=stop)

    def open(self, arch: Arch) -> Crew:
        self.opened.append(arch)
        crew = object.__new__(LocalCrew)
        crew.close = lambda: None  # type: ignore[method-assign]
        return crew


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plans:
    return Plans(tmp_path, monkeypatch)


def test_what_fails_costs_no_other_entry(plans: Plans, capfd: pytest.CaptureFixture[str]) -> None:
    def tune(work: Any, *_: Any, **__: Any) -> None:
        raise TuningError("nothing works") if work.problem.to_json().get("cols") else RuntimeError("a fault")

    first, second = plans.run(tune)
    assert (first.state, first.note) == ("failed", "internal: RuntimeError: a fault")
    assert (second.state, second.note) == ("failed", "nothing works")
    assert len(plans.opened) == 2  # after a fault the crew is not trusted
    assert plan_run.exit_code([first, second]) == 1
    assert entries(plans.folder / "out")["small-conv-llvm"]["note"] == first.note
    assert "nothing works" in capfd.readouterr().out


def test_the_report_is_true_after_each_entry(plans: Plans) -> None:
    seen = []

    def tune(*_: Any, **__: Any) -> None:
        seen.append([entry["state"] for entry in entries(plans.folder / "out").values()])
        raise KeyboardInterrupt if len(seen) == 2 else TuningError("no")

    with pytest.raises(KeyboardInterrupt):
        plans.run(tune)
    assert seen == [["searching", "waiting"], ["failed", "searching"]]
    assert len(plans.opened) == 1


def test_a_stop_ends_the_plan(plans: Plans) -> None:
    asked: list[int] = []

    def tune(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise TuningError("no")

    outcomes = plans.run(tune, stop=lambda: bool(asked))
    assert [outcome.state for outcome in outcomes] == ["failed", "waiting"] and len(asked) == 1
    assert plan_run.exit_code(outcomes) == 130


def test_the_time_is_shared(plans: Plans) -> None:
    shares = []

    def tune(work: Any, *_: Any, **__: Any) -> None:
        shares.append(work.limits.until)
        raise TuningError("no")

    from time import monotonic

    start = monotonic()
    plans.run(tune, text="minutes = 1\n" + TWO)
    assert [round(share - start, 0) for share in shares] == [30, 60]  # what is left over goes to the later ones
    outcomes = plans.run(tune, text="minutes = 0.0000001\n" + TWO)
    assert {outcome.state for outcome in outcomes} == {"no time left"} and plan_run.exit_code(outcomes) == 0


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Found:
    """In place of `tune`: each search finds a record, and what it was asked for is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searches = 0
        monkeypatch.setattr(plan_run, "_look_up", self.look_up)
        monkeypatch.setattr(plan_run, "export_record", self.export)

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.searches += 1
        return SimpleNamespace(finished=True, why="4 trials")

    def look_up(self, outcome: summary.Outcome, *_: Any) -> None:
        outcome.best = record_of(outcome.entry.problem)

    def export(self, record: Any, arch: Arch, out: Path) -> Path:
        return out


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, plans: Plans) -> Found:
    def open_crew(arch: Arch) -> Crew:
        crew = Plans.open(plans, arch)
        crew.device = "Some CPU"
        return crew

    monkeypatch.setattr(plans, "open", open_crew)
    return Found(monkeypatch)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), BundleError("cannot write"), RuntimeError("a fault")]
)
def test_an_export_that_fails_costs_itself(
    plans: Plans, found: Found, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    def export(record: Any, arch: Arch, out: Path) -> Path:
        if out.name == "small-conv-llvm":
            raise error
        return out

    monkeypatch.setattr(plan_run, "export_record", export)
    first, second = plans.run(found)
    assert found.searches == 2 and [first.state, second.state] == ["done", "done"]
    assert first.bundle is None and first.note.startswith("not exported: ") and str(error) in first.note
    assert second.bundle and not second.note and plan_run.exit_code([second]) == 0
    assert plan_run.exit_code([first, second]) == 1
    assert entries(plans.folder / "out")["small-conv-llvm"]["note"] == first.note
    assert capfd.readouterr().out.count("not exported") == 1


def test_what_is_not_to_be_exported_is_not_missed(plans: Plans, found: Found) -> None:
    outcomes = plans.run(found, text=TWO.replace("priority", "export = false\npriority"))
    assert [outcome.bundle is None for outcome in outcomes] == [True, False] and plan_run.exit_code(outcomes) == 0


@pytest.mark.parametrize("writes", [0, 2])
def test_a_report_that_cannot_be_written_ends_nothing(
    plans: Plans, found: Found, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], writes: int
) -> None:
    left = [summary.write_whole] * 2 * writes
    monkeypatch.setattr(summary, "write_whole", lambda *words: (left.pop() if left else no_space)(*words))
    outcomes = plans.run(found)
    assert found.searches == 2 and all(outcome.bundle and not outcome.reported for outcome in outcomes)
    assert plan_run.exit_code(outcomes) == 1
    assert capfd.readouterr().out.count("no report: cannot write") == 1


def test_a_report_that_can_be_written_again_is(plans: Plans, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Callable[..., None]] = [no_space]
    write = summary.write_whole
    monkeypatch.setattr(summary, "write_whole", lambda *words: (first.pop() if first else write)(*words))
    assert plan_run.exit_code(plans.run(found)) == 0
    assert entries(plans.folder / "out")["small-conv-llvm"]["state"] == "done"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nothing", 300 * "n"])
def test_no_place_for_a_report(run: Run, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    words = ["tune", "--plan", plan_file(tmp_path, TWO), "--log", tmp_path / "logs", "--out", tmp_path / place]
    assert "choose another folder" in one_line(run(*words))
    assert not (tmp_path / "logs").exists() and (tmp_path / "file").read_text() == "mine"


def test_the_command_says_that_there_is_no_report(
    run: Run, tmp_path: Path, plans: Plans, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedules.tune.crews import CrewOptions

    monkeypatch.setattr(plan_run, "tune", found)
    monkeypatch.setattr(CrewOptions, "open", lambda options, arch, note: plans.open(arch))
    monkeypatch.setattr(summary, "write_whole", no_space)
    result = run("tune", "--plan", plan_file(tmp_path, TWO), "--log", tmp_path / "logs", "--out", tmp_path / "out")
    assert result.code == 1 and "no report, journals under" in result.out
