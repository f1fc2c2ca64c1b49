"""Plans and libraries of a model's layers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from torch import nn  # noqa: E402

import schedules.torch as kernels  # noqa: E402
from schedules.cli import command_parser  # noqa: E402
from schedules.cli import tune as command  # noqa: E402
from schedules.cli.arguments import parse  # noqa: E402
from schedules.core.errors import UsageError  # noqa: E402
from schedules.torch import work  # noqa: E402

MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()), torch.randn(1, 3, 6, 6)
def alone():
    return model()[0]
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    kernels.use_bundles()
    torch._dynamo.reset()


def model() -> Any:
    """Two layers alike, and one with a ninth of their work."""
    alike = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(alike, alike, nn.Conv2d(8, 8, 1)).eval()


def test_minutes_go_where_the_time_is() -> None:
    plan = kernels.plan(model(), torch.randn(64, 8, 30, 30), 20, target="llvm")
    first, second = plan.entries
    assert (first.problem.kh, second.problem.kh) == (3, 1) and plan.minutes == 20
    assert first.priority > 2 * second.priority and first.limits.minutes > 2 * second.limits.minutes
    assert sum(entry.limits.minutes for entry in plan.entries) == pytest.approx(20)


def test_what_is_above_the_roof_counts(sm_90a: Any) -> None:
    """In the layout that a GPU has, whatever the model is on."""
    half, x = model().half(), torch.randn(2, 8, 9, 9).half()
    (first, *_) = kernels.plan(half, x, target="cuda:sm_90a").entries
    assert type(first.problem).__name__ == "NhwcProblem"
    assert first.priority > 0 and work.least_us(first.problem, sm_90a) < first.priority


def test_a_model_without_layers_has_no_plan() -> None:
    with pytest.raises(UsageError, match="no layer that kernels serve"):
        kernels.plan(nn.Linear(3, 4), torch.randn(2, 3))
    with pytest.raises(UsageError, match="minutes=0 must be over 0"):
        kernels.plan(model(), torch.randn(1, 8, 6, 6), 0)


def test_a_library_serves_the_model(tmp_path: Path) -> None:
    network, x = model(), torch.randn(2, 8, 7, 6)
    folder = kernels.export(network, x, tmp_path)
    (index,) = folder.glob("*/index.json")
    assert len(json.loads(index.read_text())["kernels"]) == len(kernels.use_bundles(folder)) == 2
    optimized = kernels.optimize(network, x)
    assert {row.kernel for row in optimized.report.replaced} == {"bundle"}
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), network(x), rtol=1e-4, atol=1e-5)


def test_the_command_takes_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[Any] = []

    def run_plan(plan: Any, view: Any, **options: Any) -> list[Any]:
        searched.append((plan, options))
        return []

    (tmp_path / "some_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("schedules.tune.plan_run.run_plan", run_plan)
    args = parse(command_parser("tune")[1], ["--model", "some_model:model", "--minutes", "3", "--log", "logs"])
    assert command.run(args) == 0 and "out/some_model-model/report.md" in capsys.readouterr().out
    ((plan, options),) = searched
    (entry,) = plan.entries
    assert (entry.problem.h, entry.problem.activation, entry.limits.minutes) == (6, "relu", 3)
    assert options["folder"] == "logs" and str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["some_model:other"], "has no attribute 'other'"),
        (["no_such_module:model"], "No module named"),
        (["some_model:alone"], "returns a Sequential"),
        (["some_model:model", "--trials", "3"], "--trials is for a single search; leave it or --model out"),
        (["some_model:model", "--plan", "plan.toml"], "--model is for a single search; write it into the plan"),
    ],
)
def test_mistakes_are_named(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    args = parse(command_parser("tune")[1], ["--model", *words])
    with pytest.raises(UsageError, match=text):
        command.run(args)
