"""The script's own part: arguments, and a run with a case that is a fake."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers import bench, runs, softmax_case
from benchmarks.peers.comparison import Results, Times
from benchmarks.peers.softmax_case import case_result
from schedules.core.arch import Arch
from schedules.core.errors import BuildError, DeviceError, SchedulesError, TuningError, UsageError
from schedules.measure.choice import Choice
from schedules.measure.journal import append
from schedules.measure.results import read_results
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.tune import crew, session
from tests.documents import ROOT
from tests.fake import record_of


@pytest.fixture(scope="module")
def compare_softmax() -> ModuleType:
    return import_module("benchmarks.compare_softmax")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--peers tensorrt", "unknown peer 'tensorrt'"),
        ("--dtype float61", "did you mean 'float16'"),
        ("--sets wide", "unknown set 'wide'"),
        ("--functions softmin", "unknown function 'softmin'"),
        ("--widths 0", "cols=0 must be at least 1"),
        ("--rows 0", "rows=0 must be at least 1"),
        ("--search 5 --default", "leave out --default"),
        ("--search 5 --build-only x", "leave out --build-only"),
        ("--search-minutes 1", "give that too"),
        ("--missing --fresh", "give one of them"),
        ("--seconds 0", "--seconds must be over 0"),
        ("--jobs 0", "--jobs must be at least 1"),
        ("--builds /nonexistent", "make it with --build-only"),
        ("--build-only x --target cuda:sm_1", "unknown target"),
    ],
)
def test_mistakes_are_one_line(compare_softmax: ModuleType, words: str, message: str) -> None:
    with pytest.raises(SchedulesError, match=message) as raised:
        compare_softmax.main(words.split())
    assert "\n" not in str(raised.value)


def test_the_command_ends_with_the_line() -> None:
    command = [sys.executable, "-m", "benchmarks.compare_softmax", "--peers", "tensorrt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown peer") and done.stderr.count("\n") == 1


def test_without_a_gpu(compare_softmax: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_softmax, "local_gpu", lambda: None)
    with pytest.raises(UsageError, match="no CUDA GPU here"):
        compare_softmax.main([])


def test_builds_are_written(
    compare_softmax: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], cuda_compiler: None
) -> None:
    words = ["--build-only", str(tmp_path), "--widths", "77", "--functions", "softmax", "--log", str(tmp_path / "log")]
    assert compare_softmax.main(words) == 0
    assert (tmp_path / "softmax-49152x77-float16" / "kernel.so").is_file()
    assert " tiles threads=" in capsys.readouterr().out


class FakeTorch:
    class OutOfMemoryError(RuntimeError):
        pass

    cuda = SimpleNamespace(empty_cache=lambda: None)


@pytest.fixture
def device(compare_softmax: ModuleType, monkeypatch: pytest.MonkeyPatch, host: Arch) -> dict[int, Exception]:
    """This CPU in place of a GPU; a case takes its choice down and is done, or raises what is set for its width."""
    faults: dict[int, Exception] = {}

    def run_case(problem: SoftmaxProblem, arch: Arch, choice: Choice, *_: object, **__: object) -> dict[str, Any]:
        if problem.cols in faults:
            raise faults[problem.cols]
        return case_result(
            problem, {"ours": (Times(1.0, 1.0, 1.0, 9), {"schedule": choice.schedule, "chosen": choice.source})}
        )

    def ready(problem: SoftmaxProblem) -> str:
        if problem.cols == 100:
            raise BuildError("softmax-49152x100-float16: no compiler")
        return ""

    monkeypatch.setattr(compare_softmax, "local_gpu", lambda: host)
    monkeypatch.setattr(compare_softmax, "CudaTimer", nullcontext)
    monkeypatch.setattr(compare_softmax, "builds_of", lambda *_: nullcontext(ready))
    monkeypatch.setattr(softmax_case, "run_case", run_case)
    monkeypatch.setattr(bench, "versions_here", lambda arch: {"torch": "2"})
    monkeypatch.setattr(runs, "torch_module", FakeTorch)
    return faults


def test_a_run_that_the_device_ends_goes_on_where_it_was(
    compare_softmax: ModuleType, device: dict[int, Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    words = ["--widths", "32", "64", "128", "--functions", "softmax", "--out", str(out), "--log", str(tmp_path)]
    device[64] = FakeTorch.OutOfMemoryError("no room")
    device[128] = RuntimeError("illegal access\nand a trace")
    with pytest.raises(DeviceError, match="softmax-49152x128-float16: RuntimeError: illegal access; --missing goes on"):
        compare_softmax.main(words)
    found = read_results(out)["cases"]
    assert [case["problem"]["cols"] for case in found] == [32, 64]
    assert found[1]["ours"]["failed"] == "OutOfMemoryError: no room"
    device.clear()
    capsys.readouterr()
    assert compare_softmax.main([*words, "--missing"]) == 0
    assert all("us" in case["ours"] for case in read_results(out)["cases"])
    assert "2 cases compared, 3 in" in capsys.readouterr().out
    assert compare_softmax.main([*words, "--fresh"]) == 0


def test_a_case_without_room_is_told(
    compare_softmax: ModuleType, device: dict[int, Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device[32] = FakeTorch.OutOfMemoryError("no room")
    words = ["--widths", "32", "--functions", "softmax", "--out", str(tmp_path / "x.json"), "--log", str(tmp_path)]
    assert compare_softmax.main(words) == 0
    assert "FAILED: OutOfMemoryError: no room" in capsys.readouterr().out


def test_a_case_that_is_not_built_is_told(
    compare_softmax: ModuleType, device: dict[int, Exception], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--widths", "100", "32", "--functions", "softmax", "--out", str(tmp_path / "x.json"), "--log"]
    assert compare_softmax.main([*words, str(tmp_path)]) == 0
    assert "FAILED: softmax-49152x100-float16: no compiler" in capsys.readouterr().out
    assert "us" in read_results(tmp_path / "x.json")["cases"][1]["ours"]


def test_a_search_comes_first_and_its_best_is_used(
    compare_softmax: ModuleType, device: dict[int, Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def tune(work: session.Work, crew: object, *, folder: Path) -> object:
        assert work.limits.trials == 7
        if work.problem.to_json()["cols"] == 64:
            raise TuningError("nothing that was tried is correct")
        append(folder, record_of(work.problem, 3.0))
        return SimpleNamespace(status=SimpleNamespace(done=7, outcomes={"correct": 7}))

    monkeypatch.setattr(crew, "LocalCrew", lambda arch, **_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(session, "tune", tune)
    out = tmp_path / "result.json"
    words = ["--widths", "32", "64", "--rows", "100", "--functions", "log_softmax", "--search", "7"]
    assert compare_softmax.main([*words, "--out", str(out), "--log", str(tmp_path)]) == 0
    first, second = read_results(out)["cases"]
    assert first["ours"]["chosen"] == "record" and first["search"] == {"trials": 7, "outcomes": {"correct": 7}}
    assert second["search"] == {"failed": "nothing that was tried is correct"}
    assert closed == [True]


def test_results_are_printed_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = dict(rows=8, cols=32, function="softmax", dtype="float16", scale=1.0, mask="none", keep=1.0)
    rate: dict[str, Any] = {"gbytes_per_s": 100.0}
    case = {
        "operator": "softmax",
        "problem": problem,
        "launch": "stream",
        "date": "2026-11-21",
        "ours": {**rate, "of_copy": 0.5, "schedule": "warp"},
        "copies": {"torch": {"gbytes_per_s": 200.0}},
        "peers": {},
    }
    file = tmp_path / "softmax_compare.json"
    Results(file, "Some GPU", {"torch": "2"}).put(case)
    results_table = import_module("benchmarks.results_table")
    assert results_table.main([str(file)]) == 0
    assert "| 32 | 50.0% |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        results_table.main([])
    assert "required: results" in capsys.readouterr().err
    file.write_text(json.dumps({}))
    with pytest.raises(UsageError, match="not a comparison"):
        results_table.main([str(file)])


def test_a_case_of_few_bytes_has_a_rate(tmp_path: Path) -> None:
    problem, times = SoftmaxProblem(rows=1, cols=1, dtype="float16"), Times(3.4, 3.3, 3.5, 100)
    case = case_result(problem, {"ours": (times, {"schedule": "tiles"}), "copy:torch": (times, {})})
    assert case["ours"]["gbytes_per_s"] == case["copies"]["torch"]["gbytes_per_s"] == pytest.approx(4 / 3.4e3, rel=1e-4)
