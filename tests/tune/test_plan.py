from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedules.bundle.bundle import Bundle
from schedules.core.arch import Arch
from schedules.core.errors import TuningError, UsageError
from schedules.core.presets import presets
from schedules.tune import night
from schedules.tune.crew import Crew, LocalCrew
from schedules.tune.plan import read_plan
from schedules.tune.tuner import Limits
from tests.command import Run, one_line

TWO = """
[defaults]
targets = ["llvm"]
trials = 4

[[work]]
problem = "softmax"
set = { rows = 64, cols = 64 }

[[work]]
name = "small-conv"
problem = "tutorial"
set = { n = 32, h = 6, w = 6, ci = 16, co = 32 }
trials = 5
priority = 2
"""


def plan_file(folder: Path, text: str) -> Path:
    file = folder / "plan.toml"
    file.write_text(text)
    return file


def test_entries_in_the_order_of_their_priority(tmp_path: Path, host: Arch) -> None:
    plan = read_plan(plan_file(tmp_path, TWO))
    assert [entry.name for entry in plan.entries] == ["small-conv", "softmax-rows64-cols64"]
    first, second = plan.entries
    assert first.limits == Limits(trials=5) and second.limits == Limits(trials=4)
    assert first.targets == (host,) and first.problem.words()["kh"] == 3
    assert plan.out == Path("out/plan") and plan.minutes is None


def test_all_fields(tmp_path: Path) -> None:
    text = """
    minutes = 12.5
    [defaults]
    export = "somewhere"
    seed = 3
    [[work]]
    problem = "tutorial"
    targets = ["sm_80", "cuda:sm_90a"]
    minutes = 3
    patience = 7
    search = "random"
    schedules = ["simt"]
    export = false
    [[work]]
    problem = "oneflow-10*"
    targets = ["cuda:sm_90a"]
    search = "auto"
    space = "cuda"
    """
    plan = read_plan(plan_file(tmp_path, text))
    first, *others = plan.entries
    assert plan.minutes == 12.5 and plan.out == Path("somewhere")
    assert [str(arch) for arch in first.targets] == ["cuda:sm_80", "cuda:sm_90a"]
    assert (first.limits, first.search, first.schedules) == (Limits(None, 3, 7), "random", ("simt",))
    assert not first.export and first.seed == 3
    assert [entry.name for entry in others] == ["oneflow-100", "oneflow-1000", "oneflow-1024"]
    assert others[0].space == "cuda" and others[0].limits == Limits()  # the plan's minutes are its limit
    work = first.work(first.targets[1], until=5.0)
    assert work.limits == Limits(None, 3, 7, 5.0) and work.arch is first.targets[1]


ONE = '[[work]]\nproblem = "tutorial"\ntargets = ["llvm"]\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no [[work]]"),
        ("minutes = ", "is not TOML"),
        ("minutes = -1\n" + ONE, "plan.toml: minutes = -1 is not a number over 0"),
        ("minuts = 1\n" + ONE, "plan.toml: unknown field 'minuts'; did you mean 'minutes'?"),
        ("work = 1", "work = 1 is not a list of tables"),
        ("[defaults]\ntrails = 1\n" + ONE, "defaults: unknown field 'trails'; did you mean 'trials'?"),
        ("[defaults]\nexport = true\n" + ONE, "defaults: export = True is not a text"),
        (ONE + "trials = 2.5", "work 1 (tutorial): trials = 2.5 is not a whole number over 0"),
        (ONE + "patience = true", "work 1 (tutorial): patience = True is not a whole number"),
        (ONE + "seed = -1", "seed = -1 is not a whole number that is not negative"),
        (ONE + 'export = "x"', "export = 'x' is not true or false"),
        (ONE + "priority = 'high'", "priority = 'high' is not a number"),
        (ONE + 'search = "lucky"', "search = 'lucky' is not one of template, random, auto"),
        (ONE + 'space = "cuda"', 'space is for search = "auto"'),
        (ONE + 'schedules = ["smit"]', "schedules: unknown schedule of conv2d_hwcn 'smit'; did you mean 'simt'?"),
        (ONE + 'schedules = ["simt"]', "schedules: schedule simt runs on cuda, not on llvm"),
        (ONE + "set = { m = 1 }", "work 1 (tutorial): problem: unknown problem field 'm'"),
        (ONE + "set = { n = 0 }", "problem: n=0 must be at least 1"),
        ("[[work]]\ntrials = 1", "work 1: problem is missing"),
        (
            '[[work]]\nproblem = "tutorail"',
            "work 1 (tutorail): problem: unknown operator or preset 'tutorail'; did you",
        ),
        ('[[work]]\nproblem = "zzz*"', "work 1: problem = 'zzz*' fits no preset"),
        ('[[work]]\nproblem = "tutorial"', "work 1 (tutorial): targets is missing"),
        (ONE.replace("llvm", "lvm"), "targets: unknown target 'lvm'; did you mean 'llvm'?"),
        (ONE + ONE.replace("llvm", "lvm"), "work 2 (tutorial): targets: unknown target"),
        (ONE.replace('["llvm"]', '"llvm"'), "targets = 'llvm' is not a list of texts"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_plan(plan_file(tmp_path, text))
    assert says in str(caught.value) and "plan.toml" in str(caught.value)


def test_a_plan_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert "cannot read the plan" in one_line(run("tune", "--plan", tmp_path / "no.toml"))
    file = plan_file(tmp_path, ONE)
    assert "--trials is for a single search" in one_line(run("tune", "--plan", file, "--trials", "3"))
    assert "tutorial is for a single search" in one_line(run("tune", "tutorial", "--plan", file))


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_the_examples(name: str) -> None:
    plan = read_plan(Path(__file__).parents[2] / "scripts" / "plans" / f"{name}.toml")
    assert plan.minutes and len({entry.name for entry in plan.entries}) == len(plan.entries)
    if name == "h200":  # every preset for a GPU, each once, beside searches of one schedule
        planned = [entry.name.removesuffix("-n256") for entry in plan.entries if not entry.schedules]
        assert sorted(planned) == sorted(set(presets()) - {"cpu-conv"})


# ---- running one


def entries(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "report.json").read_text())["entries"]
    return {entry["name"]: entry for entry in found}


def test_a_night_on_the_cpu(run: Run, tmp_path: Path) -> None:
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


class Nights:
    """Runs of TWO with a crew that is never asked for work: `tune` is replaced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.opened: list[Arch] = []

    def run(self, tune: Any, stop: Any = lambda: False, text: str = TWO) -> list[night.Outcome]:
        from schedules.tune.progress import watcher_for

        self.monkeypatch.setattr(night, "tune", tune)
        plan = read_plan(plan_file(self.folder, text))
        with watcher_for() as view:
            return night.run_plan(plan, view, out=self.folder / "out", open_crew=self.open, stop=stop)

    def open(self, arch: Arch) -> Crew:
        self.opened.append(arch)
        crew = object.__new__(LocalCrew)
        crew.close = lambda: None  # type: ignore[method-assign]
        return crew


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    return Nights(tmp_path, monkeypatch)


def test_what_fails_costs_no_other_entry(nights: Nights, capfd: pytest.CaptureFixture[str]) -> None:
    def tune(work: Any, *_: Any, **__: Any) -> None:
        raise TuningError("nothing works") if work.problem.words().get("cols") else RuntimeError("a fault")

    first, second = nights.run(tune)
    assert (first.state, first.note) == ("failed", "internal: RuntimeError: a fault")
    assert (second.state, second.note) == ("failed", "nothing works")
    assert len(nights.opened) == 2  # after a fault the crew is not trusted
    assert night.exit_code([first, second]) == 1
    assert entries(nights.folder / "out")["small-conv-llvm"]["note"] == first.note
    assert "nothing works" in capfd.readouterr().out


def test_the_report_is_true_after_each_entry(nights: Nights) -> None:
    seen = []

    def tune(*_: Any, **__: Any) -> None:
        seen.append([entry["state"] for entry in entries(nights.folder / "out").values()])
        raise KeyboardInterrupt if len(seen) == 2 else TuningError("no")

    with pytest.raises(KeyboardInterrupt):
        nights.run(tune)
    assert seen == [["searching", "waiting"], ["failed", "searching"]]
    assert len(nights.opened) == 1


def test_a_stop_ends_the_plan(nights: Nights) -> None:
    asked: list[int] = []

    def tune(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise TuningError("no")

    outcomes = nights.run(tune, stop=lambda: bool(asked))
    assert [outcome.state for outcome in outcomes] == ["failed", "waiting"] and len(asked) == 1
    assert night.exit_code(outcomes) == 130


def test_the_time_is_shared(nights: Nights) -> None:
    shares = []

    def tune(work: Any, *_: Any, **__: Any) -> None:
        shares.append(work.limits.until)
        raise TuningError("no")

    from time import monotonic

    start = monotonic()
    nights.run(tune, text="minutes = 1\n" + TWO)
    assert [round(share - start, 0) for share in shares] == [30, 60]  # what is left over goes to the later ones
    outcomes = nights.run(tune, text="minutes = 0.0000001\n" + TWO)
    assert {outcome.state for outcome in outcomes} == {"no time left"} and night.exit_code(outcomes) == 0
