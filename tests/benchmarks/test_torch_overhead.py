from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from benchmarks.peers.overhead import read_overhead
from schedules.core.errors import UsageError


@pytest.fixture(scope="module")
def torch_overhead() -> ModuleType:
    return import_module("benchmarks.torch_overhead")


def test_keeps_each_operator_and_mode(
    torch_overhead: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_overhead, "ROUNDS", 2)
    monkeypatch.setattr(torch_overhead, "CALLS", 2)
    words = ["--device", "cpu", "--modes", "kernel,eager,grad,graph", "--logs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["torch_overhead.py", *words])
    assert torch_overhead.main() == 0
    (file,) = tmp_path.glob("*/torch_overhead.json")
    kept = read_overhead(file)
    assert {"torch", "apache-tvm"} <= kept["versions"].keys()
    found = [(call["operator"], call["mode"]) for call in kept["calls"]]
    assert found == [
        ("softmax", "kernel"), ("softmax", "eager"), ("softmax", "grad"),
        ("conv2d_nchw", "kernel"), ("conv2d_nchw", "eager"),
    ]  # fmt: skip
    for call in kept["calls"]:
        assert ("torch" in call) == (call["mode"] != "kernel")
        assert 0 < call["ours"]["p10_us"] <= call["ours"]["median_us"] <= call["ours"]["p90_us"]
    assert "softmax      eager" in capsys.readouterr().out


def test_refuses_other_modes(torch_overhead: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["torch_overhead.py", "--modes", "lazy"])
    with pytest.raises(UsageError, match="lazy"):
        torch_overhead.main()
