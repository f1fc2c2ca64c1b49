"""The script's own part: arguments, kernels built in processes, and a run with a case that is a fake."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import compare_languages
from benchmarks.peers import bench, language_case, runs
from benchmarks.peers.comparison import GRAPH, Times
from benchmarks.peers.language_case import case_result
from schedules.core.arch import Arch
from schedules.core.errors import DeviceError, SchedulesError, UsageError
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.measure.choice import Choice
from schedules.measure.results import read_results
from schedules.operators.softmax.definition import SoftmaxProblem


@pytest.mark.parametrize(
    "words, message",
    [
        ("--operators conv2d_nhcw", "unknown operator 'conv2d_nhcw'; did you mean 'conv2d_nhwc'"),
        ("--search 5 --build-only x", "leave out --build-only"),
        ("--workers 0", "--workers must be at least 1"),
        ("--missing --fresh", "give one of them"),
        ("--builds /nonexistent", "make it with --build-only"),
        ("--build-only x --target cuda:sm_1", "unknown target"),
        ("--build-only x --target cuda:sm_80 --operators conv2d_hwcn", "no problem has such a program in TIRx on"),
        (
            "--build-only x --schedule simt --operators conv2d_hwcn",
            "no problem has such a program in TIRx on cuda:sm_90a",
        ),
    ],
)
def test_mistakes_are_one_line(words: str, message: str) -> None:
    with pytest.raises(SchedulesError, match=message) as raised:
        compare_languages.main(words.split())
    assert "\n" not in str(raised.value)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_languages, "local_gpu", lambda: None)
    with pytest.raises(UsageError, match="no CUDA GPU here"):
        compare_languages.main([])


def two_problems(arch: Arch, operators: list[str]) -> dict[Problem, ScheduleSpec]:
    frames = operator("softmax").schedule("frames")
    return {SoftmaxProblem(64, 100): frames, SoftmaxProblem(64, 1023): frames}


def test_both_sides_are_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], cuda_compiler: None
) -> None:
    monkeypatch.setattr(language_case, "cases", two_problems)
    words = ["--build-only", str(tmp_path / "x"), "--workers", "2", "--log", str(tmp_path / "log")]
    assert compare_languages.main(words) == 0
    made = sorted(file.parent.name for file in tmp_path.glob("x/*/*/kernel.so"))
    assert made == ["block_registers"] * 2 + ["frames"] * 2 + ["warp"] * 2
    assert capsys.readouterr().out == "6 kernels of 2 cases built\n"


class FakeTorch:
    class OutOfMemoryError(RuntimeError):
        pass

    cuda = SimpleNamespace(empty_cache=lambda: None)


def test_a_run_that_the_device_ends_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], sm_90a: Arch
) -> None:
    faults: dict[int, Exception] = {1023: RuntimeError("illegal access\nand a trace")}
    built: list[list[int]] = []

    def run_case(problem: Any, arch: Arch, choice: Choice, siblings: list[Choice], *_: Any, **how: Any) -> Any:
        if problem.cols in faults:
            raise faults[problem.cols]
        assert how["launch"] == GRAPH and choice.schedule == "frames"
        names = ["ours", *(sibling.schedule for sibling in siblings)]
        return case_result(problem, {name: (Times(2.0, 2.0, 2.0, 9), {"schedule": name}) for name in names})

    monkeypatch.setattr(language_case, "cases", two_problems)
    monkeypatch.setattr(language_case, "run_case", run_case)
    monkeypatch.setattr(compare_languages, "local_gpu", lambda: sm_90a)
    monkeypatch.setattr(compare_languages, "device_name", lambda arch: "Some GPU")
    monkeypatch.setattr(compare_languages, "CudaTimer", nullcontext)
    monkeypatch.setattr(compare_languages, "build_all", lambda cases, *_: built.append([p.cols for p in cases]))
    monkeypatch.setattr(bench, "versions_here", lambda arch: {"torch": "2"})
    monkeypatch.setattr(runs, "torch_module", FakeTorch)
    words = ["--log", str(tmp_path)]
    with pytest.raises(DeviceError, match="softmax .*cols=1023.*: RuntimeError: illegal access; --missing goes on"):
        compare_languages.main(words)
    out = tmp_path / "some-gpu" / "language_compare.json"
    assert [case["problem"]["cols"] for case in read_results(out)["cases"]] == [100]
    faults.clear()
    capsys.readouterr()
    assert compare_languages.main([*words, "--missing"]) == 0
    found = read_results(out)["cases"]
    assert [set(case["peers"]) for case in found] == [{"block_registers", "warp"}] * 2
    assert "1 cases compared, 2 in" in capsys.readouterr().out and built == [[100, 1023], [1023]]
    faults[100] = FakeTorch.OutOfMemoryError("no room")
    assert compare_languages.main([*words, "--builds", str(tmp_path)]) == 0  # nothing is built
    assert "frames" not in str(read_results(out)["cases"][0]["peers"]) and len(built) == 2
    assert "OutOfMemoryError: no room" in capsys.readouterr().out
