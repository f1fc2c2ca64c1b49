"""The script's own part: arguments, and a run whose PyTorch is a fake."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import compare_cpu
from benchmarks.peers import cpu_case
from benchmarks.peers.tables import tables
from schedules.core.arch import physical_cores
from schedules.core.errors import SchedulesError, ToolchainError
from schedules.measure.results import read_results
from tests.benchmarks.peers import fake_torch
from tests.benchmarks.peers.fake_device import Clock


@pytest.mark.parametrize(
    "words, message",
    [
        ("--operators conv2d_nhcw", "unknown operator of the comparison 'conv2d_nhcw'; did you mean 'conv2d_nhwc'"),
        ("--batches 0", "n=0 must be at least 1"),
        ("--threads 0", "--threads 0 is not between 1 and"),
        ("--missing --fresh", "give one of them"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str) -> None:
    with pytest.raises(SchedulesError, match=message) as raised:
        compare_cpu.main(words.split())
    assert "\n" not in str(raised.value)


def test_without_pytorch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    with pytest.raises(ToolchainError, match=r"pip install 'te-schedules\[torch\]'"):
        compare_cpu.main(["--out", str(tmp_path / "x.json"), "--log", str(tmp_path)])


def test_from_cases_to_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_torch.install(monkeypatch)
    asked: list[int] = []
    monkeypatch.setattr(fake_torch.module, "set_num_threads", asked.append, raising=False)
    monkeypatch.setattr(fake_torch.module, "__version__", "2.0", raising=False)
    monkeypatch.setattr(cpu_case, "LAYERS", ((6, 3, 4, 3, 1), (5, 2, 3, 1, 2)))
    monkeypatch.setattr(cpu_case, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(compare_cpu, "CpuTimer", lambda evict: Clock())
    monkeypatch.setenv("TVM_NUM_THREADS", "7")
    out = tmp_path / "x.json"
    words = ["--operators", "conv2d_nchw", "conv2d_hwcn", "--batches", "2", "--out", str(out), "--log", str(tmp_path)]
    assert compare_cpu.main([*words, "--seconds", "0.001"]) == 0
    cores = physical_cores()
    assert asked == [cores] and os.environ["TVM_NUM_THREADS"] == "7"
    text = tables(read_results(out))
    assert f"`conv2d_nchw`, float32, {cores} threads\n" in text and "| 2x5x5 2->3 1x1 stride 2 |" in text
    assert "\n4 cases in" in capsys.readouterr().out
    assert compare_cpu.main([*words, "--missing"]) == 0
    assert capsys.readouterr().out.startswith("4 cases in")
    assert compare_cpu.main([*words, "--until", "0"]) == 0
    assert capsys.readouterr().out.startswith("4 cases in")
    sets = tmp_path / "sets.json"
    sets.write_text('{"runs": {"conv2d_nhwc float32": 1}, "sets": {"any": ["1x4x4 2->3 3x3"]}}')
    words = ["--layers", str(sets), "--default", "--seconds", "0.001", "--log", str(tmp_path)]
    assert compare_cpu.main(words) == 0
    (kept,) = tmp_path.glob("*/cpu_layers.json")
    assert "| 1x4x4 2->3 3x3 |" in tables(read_results(kept))
