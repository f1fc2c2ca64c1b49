from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedules.bundle.bundle import Bundle
from schedules.core.arch import Arch
from schedules.core.errors import TuningError
from schedules.tune import plan_run
from schedules.tune.crew import Crew, LocalCrew
from schedules.tune.plan import read_plan
from tests.command import Run
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
    assert bundle.manifest["config"] == conv["config"] and bundle.manifest["measured"]["median_us"] == conv["best_us"]
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
