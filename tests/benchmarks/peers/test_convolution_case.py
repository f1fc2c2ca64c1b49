"""A case from end to end on this CPU, PyTorch and cuDNN being fakes; and what is made of its times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.peers import bench, cudnn
from benchmarks.peers.comparison import GRAPH, STREAM, Times
from benchmarks.peers.convolution_case import case_result, layer, line_of, name_of, run_case
from schedules.check.device_judge import HostJudge
from schedules.core.arch import Arch
from schedules.core.arithmetic import Arithmetic
from schedules.measure.choice import default_choice
from tests.benchmarks.peers import fake_cudnn, fake_torch
from tests.benchmarks.peers.fake_device import Clock
from tests.conftest import problem_of

FIELDS: dict[str, Any] = dict(n=3, h=6, w=5, ci=8, co=40, kh=3, kw=3, pad=1)
OPERATORS = [
    ("conv2d_nhwc", "float16"),
    ("conv2d_nchw", "float32"),
    ("conv2d_hwcn", "float16"),
    ("conv2d_nchw32", "int8"),
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = fake_torch.install(monkeypatch)
    fake_cudnn.install(monkeypatch)
    yield found
    cudnn._handle.cache_clear()


@pytest.mark.parametrize("operator, dtype", OPERATORS)
def test_everything_is_verified_and_timed(machine: Any, host: Arch, operator: str, dtype: str) -> None:
    problem = problem_of(operator, **FIELDS, dtype=dtype)
    choice = default_choice(problem, host)
    case = run_case(problem, host, choice, ["*"], Clock(), 0.001)
    ours = case["ours"]
    assert ours["error"] <= 1 and ours["us"] > 0 and (ours["schedule"], ours["chosen"]) == ("cpu", "default")
    assert ours["tflops"] == pytest.approx(problem.flops / ours["us"] / 1e6, abs=0.01)
    assert case["operator"] == operator and case["launch"] == STREAM and case["flops"] == problem.flops
    failed = {name for name, words in case["peers"].items() if "failed" in words}
    assert failed == {name for name in case["peers"] if name.endswith("algo 1")}
    for name, words in case["peers"].items():
        if name not in failed:
            assert words.get("error", 0) <= 1, name
            assert ("error" in words) == (dtype != "int8" or "int8" in name)
    assert case["best"] == next(name for name in case["peers"] if name not in failed)  # the clock's turn came first
    json.dumps(case, allow_nan=False)


def test_peers_are_launched_from_graphs_too_and_tvm_is_not_without(machine: Any, host: Arch) -> None:
    """TVM's CPU function runs at once on no stream, as a GPU's would that misses the capture."""
    problem = problem_of("conv2d_nhwc", **FIELDS, dtype="float16")
    case = run_case(problem, host, default_choice(problem, host), ["*"], Clock(), 0.001, launch=GRAPH)
    assert case["launch"] == GRAPH and "ratio" not in case
    assert case["ours"]["failed"] == "the CUDA graph lacks the call, which was launched on another stream"
    assert all(words["error"] <= 1 and words["us"] > 0 for words in case["peers"].values())


def test_a_peer_that_refuses_or_is_wrong_is_kept_with_the_reason(
    machine: Any, host: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of("conv2d_nchw", **FIELDS)
    machine.refused.add(fake_torch.CHANNELS_LAST)
    right = fake_torch.conv2d

    def wrong_in_tf32(*given: Any) -> Any:
        return right(*given) + fake_torch.module.backends.cudnn.allow_tf32

    monkeypatch.setattr(fake_torch.module.nn.functional, "conv2d", wrong_in_tf32)
    case = run_case(problem, host, default_choice(problem, host), ["*nhwc fp32", "*tf32"], Clock(), 0.001)
    assert set(case["peers"]) == {"cudnn nhwc fp32", "cudnn nhwc tf32", "cudnn nchw tf32"}
    assert case["peers"]["cudnn nhwc fp32"]["failed"] == "RuntimeError: no algorithm for channels_last"
    assert case["peers"]["cudnn nchw tf32"]["failed"].startswith("wrong:")
    assert case["ours"]["us"] > 0 and "ratio" not in case


def test_ours_is_held_to_its_schedules_arithmetic(machine: Any, host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from schedules.core.arithmetic import BF16X3, TF32
    from schedules.core.operator import Operator
    from schedules.operators.conv2d_hwcn import cpu

    held: list[Arithmetic] = []

    class Noted(HostJudge):
        def __init__(self, *given: Any) -> None:
            held.append(given[3])
            super().__init__(*given)

    monkeypatch.setattr(bench, "HostJudge", Noted)
    problem = problem_of("conv2d_hwcn", **FIELDS)
    choice = default_choice(problem, host)
    assert run_case(problem, host, choice, [], Clock(), 0.001)["peers"] == {}
    monkeypatch.setattr(Operator, "schedule", lambda self, name: replace(cpu.SCHEDULE, arithmetic=BF16X3))
    case = run_case(problem, host, choice, ["*nhwc*"], Clock(), 0.001)
    assert case["arithmetic"] == "bf16x3" and not case["peers"]["cudnn nhwc tf32"]["counts"]
    monkeypatch.setattr(Operator, "schedule", lambda self, name: replace(cpu.SCHEDULE, arithmetic=TF32))
    case = run_case(problem, host, choice, ["*nhwc*"], Clock(), 0.001)
    assert case["arithmetic"] == "tf32" and case["peers"]["cudnn nhwc tf32"]["counts"]
    assert [arithmetic.name for arithmetic in held] == ["float32", "bf16x3", "tf32"]


def test_the_ratio_is_to_the_best_that_counts() -> None:
    problem = problem_of("conv2d_nhwc", **FIELDS)

    def times(us: float) -> Times:
        return Times(us, us, us, 9)

    ours: tuple[Times, dict[str, Any]] = (times(10.0), {"schedule": "simt", "config": {}, "chosen": "record"})
    found: dict[str, tuple[Times | None, dict[str, Any]]] = {
        "ours": ours,
        "cudnn nhwc fp32": (times(15.0), {"counts": True}),
        "cudnn nchw fp32": (times(12.5), {"counts": True}),
        "cudnn nhwc tf32": (times(5.0), {"counts": False}),
        "broken": (None, {"counts": True, "failed": "why"}),
    }
    case = case_result(problem, found)
    assert (case["best"], case["ratio"]) == ("cudnn nchw fp32", 1.25)
    assert case["peers"]["cudnn nhwc tf32"]["us"] == 5.0 and case["peers"]["broken"] == found["broken"][1]
    line = line_of(case)
    assert "simt (record)  1.25 of cudnn nchw fp32" in line and "broken - (why)" in line and "tf32 5.0" in line
    failed = case_result(problem, {**found, "ours": (None, {"failed": "wrong: 3 times the tolerance"})})
    assert "ratio" not in failed and "FAILED: wrong: 3 times" in line_of(failed)
    assert "ratio" not in case_result(problem, {"ours": ours})


@pytest.mark.parametrize(
    "operator, fields, text",
    [
        ("conv2d_nhwc", {}, "3x6x5 8->40 3x3"),
        ("conv2d_nhwc", dict(pad=0), "3x6x5 8->40 3x3 pad 0"),
        ("conv2d_nhwc", dict(kh=1, kw=1, pad=0, stride=2), "3x6x5 8->40 1x1 stride 2"),
        ("conv2d_nhwc", dict(dilation=2, pad=2), "3x6x5 8->40 3x3 dilation 2"),
        ("conv2d_nhwc", dict(kw=1, stride=(2, 1)), "3x6x5 8->40 3x1 stride 2,1 pad 1"),
        ("conv2d_nchw", dict(bias=True, activation="relu"), "3x6x5 8->40 3x3 bias relu"),
        ("conv2d_nchw32", dict(residual=True, out_dtype="float32"), "3x6x5 8->40 3x3 residual out float32"),
    ],
)
def test_layers_are_told_apart(operator: str, fields: dict[str, Any], text: str) -> None:
    problem = problem_of(operator, **{**FIELDS, **fields})
    assert layer(problem.to_json()) == text == layer(json.loads(json.dumps(problem.to_json())))
    assert text in name_of(problem) and operator in name_of(problem)
