from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.peers.comparison import Times
from benchmarks.peers.cpu_case import (
    CONVOLUTIONS,
    LAYERS,
    LAYOUTS,
    ROWS,
    case_result,
    cases,
    line_of,
    name_of,
    peers_of,
    run_case,
)
from benchmarks.peers.tables import tables
from schedules.core.arch import Arch
from schedules.core.errors import ProblemError, UnknownNameError, UsageError
from schedules.measure.choice import default_choice
from schedules.operators.softmax.definition import FUNCTIONS
from tests.benchmarks.peers import fake_torch
from tests.benchmarks.peers.fake_device import Clock
from tests.conftest import problem_of

LAYER: dict[str, Any] = dict(n=2, h=6, w=5, ci=3, co=4, kh=3, kw=3, pad=1)


def test_cases_are_all_there_and_each_once() -> None:
    found = cases(["conv2d_nchw", "conv2d_hwcn", "softmax"], [1, 4])
    assert len(found) == len(set(found)) == 2 * 2 * len(LAYERS) + len(ROWS) * len(FUNCTIONS)
    assert {problem.to_json()["dtype"] for problem in found} == {"float32"}
    assert name_of(found[0]) == "conv2d_nchw 1x224x224 3->64 7x7 stride 2 float32"
    with pytest.raises(UnknownNameError, match="did you mean 'softmax'"):
        cases(["softmx"], [1])
    with pytest.raises(ProblemError, match="n=0 must be at least 1"):
        cases(["conv2d_nchw"], [0])


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_both_layouts_of_pytorch_are_verified_and_timed(
    monkeypatch: pytest.MonkeyPatch, host: Arch, operator: str
) -> None:
    machine = fake_torch.install(monkeypatch)
    problem = problem_of(operator, **LAYER, dtype="float32")
    case = run_case(problem, host, default_choice(problem, host), Clock(), 0.001)
    assert case["ours"]["error"] <= 1 and case["ours"]["us"] > 0
    assert machine.relus and all("between_us" in words for words in (case["ours"], *case["peers"].values()))
    assert case["between_ratio"] > 0
    assert list(case["peers"]) == list(LAYOUTS)
    assert all(words["error"] <= 1 for words in case["peers"].values())
    assert {call["format"] for call in machine.convolutions} == {fake_torch.CHANNELS_LAST, fake_torch.CONTIGUOUS}
    json.dumps(case, allow_nan=False)


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch, host: Arch) -> None:
    fake_torch.install(monkeypatch)
    right = fake_torch.conv2d
    monkeypatch.setattr(fake_torch.module.nn.functional, "conv2d", lambda *given: right(*given)[:, ::-1])
    problem = problem_of("conv2d_nchw", **LAYER)
    case = run_case(problem, host, default_choice(problem, host), Clock(), 0.001)
    assert all(words["failed"].startswith("wrong:") for words in case["peers"].values()) and "ratio" not in case


@pytest.mark.parametrize("function", FUNCTIONS)
def test_softmax_beside_pytorch(host: Arch, function: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    problem = problem_of("softmax", rows=50, cols=33, function=function, dtype="float32")
    case = run_case(problem, host, default_choice(problem, host), Clock(), 0.001)
    assert case["ours"]["error"] <= 1 and case["peers"]["torch"]["error"] <= 1


def test_only_what_is_known_is_compared() -> None:
    with pytest.raises(UsageError, match="conv2d_nchw32 is not compared on the CPU"):
        peers_of(problem_of("conv2d_nchw32", **{**LAYER, "ci": 32, "co": 32}), {})


def timed(problem: Any, ours: float | None, beside: dict[str, float] | None = None, **peers: float) -> dict[str, Any]:
    def times(us: float) -> Times:
        return Times(us, us, us, 9)

    about: dict[str, Any] = {"schedule": "cpu", "chosen": "default"}
    mine = (times(ours), about) if ours else (None, {**about, "failed": "why"})
    others = {name.replace("_", " ", 1): (times(us), {}) for name, us in peers.items()}
    between = {name: times(us) for name, us in (beside or {}).items()}
    return {**case_result(problem, {"ours": mine, **others}, between), "date": "2026-11-21T10:00:00+00:00"}


def test_lines_and_tables() -> None:
    conv = problem_of("conv2d_hwcn", **LAYER)
    rows = problem_of("softmax", rows=8, cols=100, dtype="float32")
    gradient = problem_of("softmax", rows=8, cols=100, function="softmax_grad", dtype="float32")
    found = [
        timed(conv, 10.0, torch_nchw=20.0, torch_channels_last=15.0),
        timed(rows, 4.0, torch=5.0),
        timed(gradient, None, torch=5.0),
    ]
    assert (found[0]["best"], found[0]["ratio"]) == ("torch channels_last", 1.5)
    assert line_of(found[0]).endswith("torch nchw 20.0  torch channels_last 15.0  1.50 of torch channels_last")
    assert "FAILED: why" in line_of(found[2]) and "ratio" not in found[2]
    results = {"kind": "cpu", "device": "CPU x2", "versions": {"torch": "2", "threads": "2"}, "cases": found}
    assert tables(results) == "\n".join(
        [
            "PyTorch's time as a multiple of ours",
            "",
            "|  | problems | least | geometric mean | most |",
            "|---|---|---|---|---|",
            "| conv2d_hwcn n=2, float32 | 1 | 1.50 | 1.50 | 1.50 |",
            "| softmax, float32 | 1 | 1.25 | 1.25 | 1.25 |",
            "",
            "`conv2d_hwcn`, float32, 2 threads",
            "",
            "| layer | us | GFLOP/s | torch nchw us | torch channels_last us | of the best peer |",
            "|---|---|---|---|---|---|",
            "| 2x6x5 3->4 3x3 | 10.0 | 1 | 20.0 | 15.0 | 1.50 |",
            "",
            "Geometric mean of the ratios: 1.50 (1 layers)",
            "",
            "`softmax`, float32, 2 threads",
            "",
            "| rows x cols: us (PyTorch us) ratio | softmax | softmax_grad |",
            "|---|---|---|",
            "| 8 x 100 | 4.0 (5.0) 1.25 | failed (5.0) |",
            "",
            "Geometric mean of the ratios: 1.25 (1 of 2 cases)",
            "",
            "CPU x2, 2026-11-21; torch 2, threads 2",
        ]
    )


def test_ratios_between_operators_have_columns_of_their_own() -> None:
    conv, rows = problem_of("conv2d_hwcn", **LAYER), problem_of("softmax", rows=8, cols=100, dtype="float32")
    found = [
        timed(conv, 10.0, {"ours": 12.0, "torch nchw": 24.0, "torch channels_last": 18.0}, torch_nchw=20.0,
              torch_channels_last=15.0),
        timed(rows, 4.0, torch=5.0),
    ]  # fmt: skip
    assert line_of(found[0]).endswith("1.50 of torch channels_last  1.50 between PyTorch's operators")
    text = tables({"kind": "cpu", "device": "CPU x2", "versions": {"torch": "2", "threads": "2"}, "cases": found})
    assert "| conv2d_hwcn n=2, float32 | 1 | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 |" in text
    assert "| softmax, float32 | 1 | 1.25 | 1.25 | 1.25 |  |  |" in text
    assert "| 2x6x5 3->4 3x3 | 10.0 | 1 | 20.0 | 15.0 | 1.50 | 1.50 |" in text
