"""The cases that TIRx and TE are compared on; a case from end to end on this CPU, PyTorch being a fake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import language_case
from benchmarks.peers.bench import write_build
from benchmarks.peers.comparison import GRAPH, STREAM, Times
from benchmarks.peers.language_case import bundle_of, case_result, cases, line_of, name_of, program_for, run_case
from schedules.core.arch import Arch
from schedules.core.arithmetic import TF32
from schedules.core.operator import ScheduleSpec
from schedules.core.presets import presets
from schedules.core.problem import Problem
from schedules.core.registry import operator_modules, operator_of, operators
from schedules.measure.choice import Choice, default_choice
from schedules.operators.softmax.definition import SoftmaxProblem
from tests.benchmarks.peers import fake_torch
from tests.benchmarks.peers.fake_device import Clock
from tests.conftest import problem_of

PROBLEM = SoftmaxProblem(300, 64)


@pytest.fixture(scope="module")
def found(sm_90a: Arch) -> dict[Problem, ScheduleSpec]:
    return cases(sm_90a, list(operator_modules()))


def test_every_program_in_tirx_has_problems(sm_90a: Arch, found: dict[Problem, ScheduleSpec]) -> None:
    known = list(dict.fromkeys(language_case._problems()))
    programs = {  # those that this arch has: each that serves anything here
        (op.name, spec.name)
        for op in operators()
        for spec in op.schedules
        if spec.tirx and any(spec.serves(problem, sm_90a) for problem in known if operator_of(problem) is op)
    }
    assert {(operator_of(problem).name, spec.name) for problem, spec in found.items()} == programs
    assert all(spec.tirx and spec.serves(problem, sm_90a) for problem, spec in found.items())
    assert len({bundle_of(Path("x"), problem, spec.name) for problem, spec in found.items()}) == len(found)
    assert len({name_of(problem) for problem in found}) == len(found)
    assert set(cases(sm_90a, ["softmax"])) == {problem for problem in found if isinstance(problem, SoftmaxProblem)}


def test_each_case_has_a_sibling_that_takes_it(sm_90a: Arch, found: dict[Problem, ScheduleSpec]) -> None:
    for problem, spec in found.items():
        assert spec.tirx
        served = [name for name in spec.tirx.siblings if operator_of(problem).schedule(name).serves(problem, sm_90a)]
        assert served, f"{spec.name}: {problem}"


def test_the_program_of_a_problem(sm_90a: Arch) -> None:
    def program(problem: Problem) -> str | None:
        spec = program_for(problem, sm_90a)
        return spec.name if spec else None

    assert program(presets()["k100-nhwc-2"].problem()) == "tma_wgmma"
    assert program(presets()["k100-nhwc-2"].problem({"dtype": "float32"})) == "winograd_bf16x6"
    wide = problem_of("conv2d_nhwc", n=8, h=56, w=56, ci=512, co=512, kh=3, kw=3, pad=1, dtype="float32")
    assert program(wide) == "winograd_bf16x6"
    # where a TE schedule is chosen: TMA takes no six channels
    assert program(problem_of("conv2d_nhwc", n=2, h=9, w=9, ci=16, co=6, kh=3, kw=3)) is None


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch.install(monkeypatch)


def two_choices(host: Arch) -> tuple[Choice, Choice]:
    choice = default_choice(PROBLEM, host, "cpu")
    return choice, replace(choice, config=replace(choice.config, unroll=1), given=True)  # type: ignore[call-arg]


def test_both_sides_are_verified_and_timed(torch: None, host: Arch) -> None:
    choice, other = two_choices(host)
    case = run_case(PROBLEM, host, choice, [other], Clock(), 0.001, launch=STREAM)
    assert case["ours"]["error"] <= 1 and case["peers"]["cpu"]["error"] <= 1
    assert case["ours"]["config"] != case["peers"]["cpu"]["config"]
    assert case["best"] == "cpu" and case["ratio"] == round(case["peers"]["cpu"]["us"] / case["ours"]["us"], 4)
    assert case["operator"] == "softmax" and case["launch"] == STREAM
    json.dumps(case, allow_nan=False)


def test_kernels_come_from_bundles_that_fit(
    torch: None, host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, other = two_choices(host)
    write_build(choice, host, bundle_of(tmp_path, PROBLEM, "cpu"))
    built: list[Any] = []

    def refused(chosen: Any, disk: Any) -> None:
        built.append(chosen.config)
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("benchmarks.peers.bench.kernel_of", refused)
    case = run_case(PROBLEM, host, choice, [other], Clock(), 0.001, builds=tmp_path, launch=STREAM)
    assert case["ours"]["us"] > 0 and built == [other.config.to_json()]
    assert case["peers"]["cpu"]["failed"] == "RuntimeError: no compiler here" and "ratio" not in case
    assert "cpu - (RuntimeError: no compiler here)" in line_of(case)


def test_the_fastest_sibling_counts() -> None:
    problem = problem_of("conv2d_hwcn", n=8, h=4, w=4, ci=32, co=32, kh=3, kw=3, pad=1)
    found = {
        "ours": (Times(2.0, 2.0, 2.0, 9), {"schedule": "tf32"}),
        "simt": (Times(9.0, 9.0, 9.0, 9), {"schedule": "simt"}),
        "mma_split": (Times(5.0, 5.0, 5.0, 9), {"schedule": "mma_split"}),
    }
    case = case_result(problem, found, GRAPH, TF32)
    assert (case["best"], case["ratio"], case["arithmetic"]) == ("mma_split", 2.5, "tf32")
    assert line_of(case).endswith("tf32 2.00 us  simt 9.00 us  mma_split 5.00 us  2.50 of mma_split")
