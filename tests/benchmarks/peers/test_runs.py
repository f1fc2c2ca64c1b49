"""What the scripts share; their own tests run them from end to end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import runs
from benchmarks.peers.comparison import Results, head_of
from benchmarks.peers.runs import Comparison, Found, Search, add_arguments, check_arguments, run_cases, search_of
from schedules.core.arch import Arch
from schedules.core.errors import BundleError, ConfigError, DeviceError
from schedules.measure.choice import Choice, default_choice
from schedules.operators.softmax.definition import SoftmaxProblem
from tests.benchmarks.peers import fake_torch


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser, 0.5, "x.json").add_argument("--more")
    return parser.parse_args(words)


def test_a_search_is_made_of_the_arguments() -> None:
    plain = arguments("--more", "1")
    check_arguments(plain)
    assert search_of(plain) is None and plain.seconds == 0.5
    found = arguments("--search", "5", "--search-minutes", "2", "--log", "logs", "--schedule", "mma")
    check_arguments(found)
    assert search_of(found) == Search(5, 2.0, ("mma",), Path("logs"))


@pytest.mark.parametrize(
    "fault, kept, raised",
    [
        (fake_torch.OutOfMemoryError("no room"), "OutOfMemoryError: no room", None),
        (ConfigError("illegal config: stages=9"), "illegal config: stages=9", None),
        (BundleError("damaged"), "", BundleError),
        (RuntimeError("illegal access\na trace"), "", DeviceError),
        (KeyboardInterrupt(), "", KeyboardInterrupt),
    ],
)
def test_what_ends_a_run_and_what_does_not(
    tmp_path: Path, host: Arch, monkeypatch: pytest.MonkeyPatch, fault: Any, kept: str, raised: Any
) -> None:
    monkeypatch.setattr(runs, "torch_module", lambda: fake_torch.module)
    problems = [SoftmaxProblem(8, cols) for cols in (32, 64, 128)]

    def run(problem: SoftmaxProblem, choice: Choice) -> dict[str, Any]:
        if problem.cols == 64:
            raise fault
        return result(problem, {"ours": (None, {"us": 1.0})})

    def result(problem: SoftmaxProblem, found: Found) -> dict[str, Any]:
        return {**head_of(problem, "stream"), "ours": found["ours"][1]}

    comparison = Comparison(lambda p: default_choice(p, host), run, result, lambda p: f"cols {p.cols}", str)
    results = Results(tmp_path / "x.json", "CPU", {})
    if raised:
        with pytest.raises(raised) as caught:
            run_cases(comparison, problems, host, results)
        if raised is DeviceError:
            assert str(caught.value) == "cols 64: RuntimeError: illegal access; --missing goes on"
    else:
        run_cases(comparison, problems, host, results)
    words = [case["ours"] for case in results.cases]
    assert words == ([{"us": 1.0}] if raised else [{"us": 1.0}, {"failed": kept}, {"us": 1.0}])
