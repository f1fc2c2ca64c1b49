from __future__ import annotations

import json
import signal
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from schedules.core.errors import UnknownNameError, UsageError  # noqa: E402


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with one small network, and two measurements."""
    module = import_module("benchmarks.compare_networks")

    def small(n: int) -> Any:
        layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
        return torch.nn.Sequential(*layers), torch.randn(n, 3, 6, 6)

    monkeypatch.setattr(module, "NETWORKS", {"small": (small, (1,), (2,))})
    monkeypatch.setattr(module, "ROUNDS", 4)
    return module


def test_it_keeps_a_line_of_each_network(compare: ModuleType, tmp_path: Path) -> None:
    assert compare.main(["--device", "cpu", "--peers", "eager", "ours", "--logs", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/compare_networks.json")
    (line,) = json.loads(file.read_text())["networks"]
    assert (line["network"], line["n"], line["layers"], line["replaced"], line["notes"]) == ("small", 2, 1, 1, [])
    for peer in ("eager", "ours"):
        assert 0 < line[peer]["p10_us"] <= line[peer]["median_us"] <= line[peer]["p90_us"]
    assert line["first_s"].keys() == {"eager", "ours"} and line["first_s"]["ours"] > 0


def test_int8_is_beside_them(compare: ModuleType, tmp_path: Path) -> None:
    assert compare.main(["--device", "cpu", "--peers", "ours", "int8", "--logs", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/compare_networks.json")
    (line,) = json.loads(file.read_text())["networks"]
    assert line["int8"]["median_us"] > 0 and line["errors"]["ours"] < 1e-5 < line["errors"]["int8"] < 0.1


def test_results_are_added_to_those_of_other_runs(compare: ModuleType, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--peers", "eager", "ours", "--logs", str(tmp_path)]
    for more in ([], ["--batches", "1"], ["--beside", "1"], ["--beside", "1"], ["--peers", "ours"]):
        assert compare.main([*words, *more]) == 0
    (file,) = tmp_path.glob("*/compare_networks.json")
    kept = json.loads(file.read_text())
    assert [(row["n"], row.get("beside")) for row in kept["networks"]] == [(2, None), (1, None), (2, 1), (2, None)]
    assert {row["date"] for row in kept["networks"]} == {kept["date"][:10]}
    file.write_text(json.dumps({**kept, "versions": {**kept["versions"], "torch": "1.0"}}))
    assert compare.main(words) == 0
    assert len(json.loads(file.read_text())["networks"]) == 1, "those of other versions are not beside"


def test_company_is_busy_and_ends(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, words: list[str]) -> None:
            super().__init__(words)
            started.append(self)

    monkeypatch.setattr(compare.subprocess, "Popen", Kept)
    with compare.busy(2):
        assert [process.poll() for process in started] == [None, None]
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2


def test_what_computes_something_else_is_not_timed(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: Any, inputs: Any, **options: Any) -> Any:
        return torch.nn.Sequential(model, torch.nn.Sigmoid())

    monkeypatch.setattr(compare.kernels, "optimize", wrong)
    with pytest.raises(UsageError, match="small n=2: ours differs from eager"):
        compare.main(["--device", "cpu", "--peers", "eager", "ours", "--logs", str(tmp_path)])


def test_other_networks_are_refused(compare: ModuleType) -> None:
    with pytest.raises(UnknownNameError, match="resnet9000"):
        compare.main(["resnet9000", "--device", "cpu"])
