from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedules.arch import Arch
from schedules.build import build
from schedules.errors import UsageError
from schedules.measure import Measurement
from schedules.records import append, record, slug
from tests.conftest import problem_of


def test_device_folders() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("AMD EPYC 9B14 x2") == "amd-epyc-9b14-x2"


def test_lines_are_whole_and_say_everything(host: Arch, tmp_path: Path) -> None:
    built = build(problem_of("softmax", rows=4, cols=64), host)
    entry = record(built, Measurement(10.0, 9.0, 12.0, 7, "Some CPU"), 0.5, trials=3)
    for _ in range(2):
        path = append(tmp_path, entry)
    assert path == tmp_path / "some-cpu" / "softmax.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == lines[1] == json.loads(json.dumps(entry))
    assert lines[0]["gbytes_per_s"] == pytest.approx(2 * 4 * 64 * 2 / 10e-6 / 1e9)
    assert {"apache-tvm", "apache-tvm-ffi", "python", "compiler"} <= set(lines[0]["versions"])
    assert built.problem.parse(lines[0]["problem"]) == built.problem


def test_a_folder_that_cannot_be_written(host: Arch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        append(tmp_path / "file", {"device": "x", "operator": "y"})
