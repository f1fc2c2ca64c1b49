"""The script's own part: arguments, and a run with a case that is a fake."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from schedules.errors import SchedulesError, UsageError
from schedules.peers.comparison import Results

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare_softmax() -> ModuleType:
    return script("compare_softmax")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--peers tensorrt", "unknown peer 'tensorrt'"),
        ("--dtype float61", "did you mean 'float16'"),
        ("--sets wide", "unknown set 'wide'"),
        ("--functions softmin", "unknown function 'softmin'"),
        ("--widths 0", "cols=0 must be at least 1"),
        ("--rows 0", "rows=0 must be at least 1"),
        ("--search 5 --default", "leave out --build-only and --default"),
        ("--missing --fresh", "give one of them"),
        ("--seconds 0", "--seconds must be over 0"),
        ("--builds /nonexistent", "make it with --build-only"),
        ("--build-only x --target cuda:sm_1", "unknown target"),
    ],
)
def test_mistakes_are_one_line(compare_softmax: ModuleType, words: str, message: str) -> None:
    with pytest.raises(SchedulesError, match=message) as raised:
        compare_softmax.main(words.split())
    assert "\n" not in str(raised.value)


def test_the_command_ends_with_the_line() -> None:
    command = [sys.executable, str(SCRIPTS / "compare_softmax.py"), "--peers", "tensorrt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: unknown peer") and done.stderr.count("\n") == 1


def test_without_a_gpu(compare_softmax: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_softmax, "local_gpu", lambda: None)
    with pytest.raises(UsageError, match="no CUDA GPU here"):
        compare_softmax.main([])


def test_builds_are_written(
    compare_softmax: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], cuda_compiler: None
) -> None:
    words = ["--build-only", str(tmp_path), "--widths", "100", "--functions", "softmax", "--log", str(tmp_path / "log")]
    assert compare_softmax.main(words) == 0
    assert (tmp_path / "softmax-49152x100-float16" / "kernel.so").is_file()
    assert "warp" in capsys.readouterr().out


def test_results_are_printed_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = dict(rows=8, cols=32, function="softmax", dtype="float16", scale=1.0, mask="none", keep=1.0)
    rate: dict[str, Any] = {"gbytes_per_s": 100.0}
    case = {
        "problem": problem,
        "date": "2026-11-21",
        "ours": {**rate, "of_copy": 0.5, "schedule": "warp"},
        "copies": {"torch": {"gbytes_per_s": 200.0}},
        "peers": {},
    }
    file = tmp_path / "softmax_compare.json"
    Results(file, "Some GPU", {"torch": "2"}).put(case)
    results_table = script("results_table")
    assert results_table.main([str(file)]) == 0
    assert "| 32 | 50.0% |" in capsys.readouterr().out
    assert results_table.main([]) == 2
    file.write_text(json.dumps({}))
    with pytest.raises(UsageError, match="not a comparison"):
        results_table.main([str(file)])
