"""Workspaces as arguments, on the emulator: the same results, and no allocation by TVM."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.build.builder import Built, build, build_scheduled
from schedules.build.workspace import workspaces_as_arguments
from schedules.check.verify import emulated_runs, judge, poisoned
from schedules.core.arch import Arch
from schedules.core.problem import Argument, Problem
from schedules.core.registry import operator_of
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.softmax.definition import SoftmaxProblem

SPLIT = SoftmaxProblem(rows=3, cols=2100, dtype="float32")
CONV = NchwProblem(n=2, h=5, w=5, ci=16, co=16, kh=3, kw=3, pad=(1, 1), dtype="float16")

HWCN = HwcnProblem(n=8, h=3, w=2, ci=19, co=16, kh=3, kw=3, pad=(1, 1))


def rebuilt(problem: Problem, arch: Arch, schedule: str, **config: int) -> tuple[Built, Built, tuple[Argument, ...]]:
    """A build, and the same with its workspaces as arguments."""
    plain = build(problem, arch, schedule, config, device_code=False)
    mod, spaces = workspaces_as_arguments(plain.scheduled)
    made = build_scheduled(operator_of(problem), problem, plain.schedule, plain.config, arch, mod, device_code=False)
    return plain, made, spaces


@pytest.mark.parametrize(
    ("problem", "schedule", "config", "shapes"),
    [
        (SPLIT, "split", {"threads": 64, "packs": 1}, {"partials": (3, 9, 2)}),
        (CONV, "mma_channels_last", {}, {"weight_last": (3, 3, 16, 16), "data_last": (2, 25, 16)}),
        (HWCN, "tf32", {}, {"packed": (9, 16, 24)}),
    ],
)
def test_given_workspaces_serve(
    emulation: None,
    sm_90a: Arch,
    problem: Problem,
    schedule: str,
    config: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    plain, made, spaces = rebuilt(problem, sm_90a, schedule, **config)
    assert "TVMBackendAllocWorkspace" in plain.module.inspect_source("ll")
    assert "TVMBackendAllocWorkspace" not in made.module.inspect_source("ll")
    extent = problem.arguments()[0].shape[0]
    memory = {}
    for space in spaces:
        shape = [extent if axis == space.runtime_axis else size for axis, size in enumerate(space.shape)]
        memory[space.name] = np.full(shape, np.nan, space.dtype)
    assert {name: array.shape for name, array in memory.items()} == shapes
    inputs = plain.operator.inputs(problem, np.random.default_rng(0))
    source = str(made.sources["cu"])
    _, run = next(iter(emulated_runs(made, source)))
    outputs = run([*inputs, *poisoned(problem), *memory.values()])
    assert judge(problem, inputs, outputs, arithmetic=plain.schedule.arithmetic).passed


def test_programs_without_workspaces_stay(sm_90a: Arch) -> None:
    for problem, schedule in ((SoftmaxProblem(rows=3, cols=64), "warp"), (SoftmaxProblem(rows=3, cols=1001), "frames")):
        scheduled = build(problem, sm_90a, schedule, device_code=False).scheduled
        mod, spaces = workspaces_as_arguments(scheduled)
        assert mod is scheduled and spaces == ()
