"""Every TE schedule of every convolution, with terms, activations and extents that fit no tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedules.check.verify import verify
from schedules.core.arch import Arch, parse_arch
from schedules.core.epilogue import Activation
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Conv2dProblem
from schedules.core.registry import operator
from schedules.definitions import epilogue as expressions
from tests.conftest import assert_correct, of_problem

CONVOLUTIONS = ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc", "depthwise_conv2d", "conv2d_nchw32", "depthwise_nchw32")
TARGETS = {"cuda": "cuda:sm_90a", "rocm": "rocm:gfx942", "llvm": "llvm"}
ODD: dict[str, Any] = dict(n=3, h=7, w=6, ci=5, co=13, kh=3, kw=2, pad="1,0", stride="2,1")
ONE: dict[str, Any] = dict(n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1)
EPILOGUES: dict[str, dict[str, Any]] = {
    "float32": dict(bias=True, residual=True, activation="gelu"),
    "float16": dict(residual=True, activation="clamp:-1:2", dtype="float16"),
    "bfloat16": dict(bias=True, residual=True, activation="hardswish", dtype="bfloat16"),
    "one of everything": dict(ONE, residual=True, activation="silu", dtype="float16"),
    "int8": dict(bias=True, residual=True, alpha="channel", beta="alpha", gamma="tensor", activation="relu6"),
    "int32": dict(bias=True, activation="clamp:-900:900", out_dtype="int32", alpha=1.0, beta=1.0),
    "sums to float32": dict(residual=True, activation="gelu_tanh", out_dtype="float32", alpha=2.0**-10),
}
# each schedule with every second, which are others from one to the next
CASES = [
    (name, spec.name, epilogue)
    for name in CONVOLUTIONS
    for i, spec in enumerate(spec for spec in operator(name).schedules if spec.graph is not None)
    for j, epilogue in enumerate(list(EPILOGUES)[4:] if name.endswith("_nchw32") else list(EPILOGUES)[:4])
    if (i + j) % 2 == 0
]


def odd(schedule: str) -> dict[str, Any]:
    """Winograd's tiles share their inputs, and want sums of some products."""
    return {**ODD, "ci": 20, "stride": 1} if schedule.startswith("winograd") else ODD


def served(name: str, schedule: str, epilogue: str) -> tuple[ScheduleSpec, Conv2dProblem, Arch]:
    """A schedule, a problem with that epilogue and a target; skips where the schedule has no such dtype."""
    spec = operator(name).schedule(schedule)
    problem = of_problem(name, odd(schedule) | EPILOGUES[epilogue])
    assert isinstance(problem, Conv2dProblem)
    arch = parse_arch(TARGETS[spec.kinds[0]])
    reason = spec.default(problem, arch).check(problem, arch)
    if reason:
        assert "dtype" in reason
        pytest.skip(reason)
    return spec, problem, arch


@pytest.mark.parametrize(("name", "schedule", "epilogue"), CASES)
def test_every_schedule_computes_it(name: str, schedule: str, epilogue: str) -> None:
    _, problem, arch = served(name, schedule, epilogue)
    assert_correct(problem, arch, schedule, routes=["serial"] if arch.is_gpu else ["device"])


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        (name, spec.name)
        for name in CONVOLUTIONS
        for spec in operator(name).schedules
        if spec.graph is not None and "cuda" in spec.kinds
    ],
)
def test_generated_code_computes_it(emulation: None, name: str, schedule: str) -> None:
    epilogue = "int8" if name.endswith("_nchw32") else "float32"
    spec = operator(name).schedule(schedule)
    problem = of_problem(name, odd(schedule) | EPILOGUES[epilogue])
    arch = parse_arch("cuda:sm_90a")
    if spec.default(problem, arch).check(problem, arch):
        problem = of_problem(name, ODD | EPILOGUES["float32"] | {"dtype": "float16"})
    assert_correct(problem, arch, schedule, routes=["emulated"])


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("lost", ["bias", "residual", "activation"])
def test_what_a_kernel_leaves_out_is_noticed(name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:

    true = expressions.unrounded

    def without(e: Any, *rest: Any) -> Any:
        if lost == "activation":
            return true(replace(e, activation=Activation()), *rest)
        return true(replace(e, terms=tuple(replace(t, factor=0.0) if t.name == lost else t for t in e.terms)), *rest)

    monkeypatch.setattr(expressions, "unrounded", without)
    whole = name.endswith("_nchw32")
    problem = of_problem(name, ODD | (EPILOGUES["int8"] | {"gamma": 0.7} if whole else EPILOGUES["float32"]))
    assert not any(check.passed for check in verify(problem, parse_arch("llvm"), "cpu", routes=["device"]))
