"""What rows have beside their elements: temperatures, log-sum-exp, losses; wider outputs; results over the input."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.check.verify import MODES, emulated_runs, judge, poisoned
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError, ProblemError
from schedules.core.registry import operator
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.operators.softmax.reference import reference
from tests.conftest import assert_correct, assert_mutants_caught, is_right

Fields = dict[str, Any]
LOSS: Fields = dict(function="cross_entropy")
LOSS_GRAD: Fields = dict(function="cross_entropy_grad")
ALL: Fields = dict(smoothing=0.1, z=1e-3, temperature=True)
# (schedule, columns, problem): each form in each program
CASES: list[tuple[str, int, Fields]] = [
    ("frames", 37, dict(temperature=True, scale=-0.5, mask="full")),
    ("frames", 37, dict(lse=True, keep=0.8, mask="cols")),
    ("frames", 37, dict(y_dtype="float32", keep=0.8, drop="drawn")),
    ("frames", 36, dict(y_dtype="float32", function="softmax_grad")),
    ("frames", 37, dict(y_dtype="float32", function="log_softmax_grad", dtype="bfloat16", lse=True)),
    ("frames", 1023, dict(LOSS, **ALL)),
    ("frames", 1023, dict(LOSS_GRAD, **ALL, dtype="bfloat16")),
    ("tiles", 5, dict(lse=True, temperature=True)),
    ("tiles", 36, dict(LOSS, smoothing=0.3)),
    ("tiles", 5, dict(LOSS_GRAD, scale=-0.5)),
    ("parts", 5003, dict(lse=True, mask="lengths")),
    ("parts", 5003, dict(LOSS, **ALL)),
    ("parts", 5003, dict(LOSS_GRAD, smoothing=0.1, y_dtype="same")),
    ("cluster", 9001, dict(LOSS_GRAD, **ALL)),
    ("cluster", 9000, dict(lse=True, y_dtype="float32")),
    ("warp", 36, dict(lse=True, function="log_softmax", temperature=True)),
    ("warp", 36, dict(LOSS, **ALL)),
    ("block_registers", 300, dict(LOSS_GRAD, **ALL)),
    ("block_streaming", 300, dict(y_dtype="float32", lse=True)),
    ("block_registers", 300, dict(lse=True, function="softmax_grad", temperature=True)),
    ("split", 1300, dict(LOSS_GRAD, **ALL)),
    ("split", 1300, dict(LOSS, dtype="float32")),
    ("split", 1300, dict(lse=True, keep=0.8, drop="drawn")),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_each_form_in_each_schedule(emulation: None, sm_90a: Arch, case: int) -> None:
    """One build serves any number of rows."""
    schedule, cols, fields = CASES[case]
    built = build(SoftmaxProblem(13, cols, **fields), sm_90a, schedule, device_code=False)
    for mode, rows in enumerate((1, 5) if cols > 4000 else (1, 2, 13)):
        assert is_right(built, rows, (case + mode) % 3), rows


@pytest.mark.parametrize("cols", [1, 37])
@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=True, scale=-0.5, function="log_softmax"),
        dict(temperature=True, lse=True, function="softmax_grad"),
        dict(lse=True, mask="lengths", y_dtype="float32"),
        dict(y_dtype="float32", function="log_softmax_grad", keep=0.8),
        dict(LOSS, **ALL),
        dict(LOSS_GRAD, **ALL, dtype="bfloat16"),
    ],
    ids=str,
)
def test_on_the_cpu(host: Arch, cols: int, fields: Fields) -> None:
    assert_correct(SoftmaxProblem(7, cols, **fields), host)


# schedules whose output may lie where the input does, with the columns of a row
IN_PLACE = [("frames", 37), ("frames", 1023), ("tiles", 5), ("parts", 5003), ("cluster", 9001), ("warp", 36)]
IN_PLACE += [("block_registers", 300), ("block_streaming", 300), ("split", 1300)]


@pytest.mark.parametrize(("schedule", "cols"), IN_PLACE)
def test_the_output_over_the_input(emulation: None, sm_90a: Arch, schedule: str, cols: int) -> None:
    """In every order of the emulator; a loss, whose target's element TE schedules read late, by those in TIRx."""
    function = "cross_entropy_grad" if operator("softmax").schedule(schedule).tirx else "softmax"
    problem = SoftmaxProblem(3 if cols > 4000 else 13, cols, function)
    built = build(problem, sm_90a, schedule, device_code=False)
    assert all(call.passed for call in _over_the_input(problem, built, str(built.sources["cu"])))


def test_a_target_read_late_is_caught(emulation: None, sm_90a: Arch) -> None:
    """As `warp` reads it: the test above would see that."""
    problem = SoftmaxProblem(13, 36, "cross_entropy_grad")
    built = build(problem, sm_90a, "warp", device_code=False)
    assert not all(call.passed for call in _over_the_input(problem, built, str(built.sources["cu"])))


def _over_the_input(problem: SoftmaxProblem, built: Any, source: str) -> list[Any]:
    """The verdict on each mode of the emulator, where kernels read x out of the tensor that they write."""
    arrays = list(built.operator.inputs(problem, np.random.default_rng(0)))
    outputs = poisoned(problem)
    outputs[0] = arrays[0].copy()
    head = r"(main_kernel\w*\([^;{]*\b(\w+)\* __restrict__ (y|dx|out)_ptr\b[^;{]*\) \{)"

    def alias(match: re.Match[str]) -> str:
        if "x_ptr" not in match.group(1).replace("dx_ptr", ""):
            return match.group(1)
        return f"{match.group(1)} x_ptr = {match.group(3)}_ptr;"

    changed, count = re.subn(head, alias, source)
    assert count and changed != source
    return [judge(problem, arrays, call([*arrays, *outputs])) for _, call in emulated_runs(built, changed)]


MUTANTS = {
    "the target's element of another row": (r"(target_ptr\[)[^\]]*\]", r"\g<1>0]"),
    "loss stored by no thread": (r"loss_ptr\[", "if (false) loss_ptr["),
    "gradient without the target": (r"== \(\(int\)target\)", "== -5"),
}


def test_faults_are_caught(emulation: None, sm_90a: Arch) -> None:
    built = build(SoftmaxProblem(13, 203, "cross_entropy_grad"), sm_90a, "frames", device_code=False)
    assert_mutants_caught(built, MUTANTS)


def test_the_reference_is_that_of_its_definition() -> None:
    """Loss by -log of the probability; its gradient by differences; log-sum-exp by its name."""
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((3, 7)), np.array([2, 6, 0])
    p = SoftmaxProblem(3, 7, "cross_entropy_grad", "float32", smoothing=0.2, z=0.05)

    def losses(x: Any) -> Any:
        lse = np.log(np.exp(x).sum(-1))
        log_p = x - lse[:, None]
        return -0.8 * log_p[np.arange(3), target] - 0.2 * log_p.mean(-1) + 0.05 * lse**2

    dx, loss = reference(p, [x, target, np.array([1.0, -2.0, 0.5])])
    np.testing.assert_allclose(loss.values, losses(x))
    for i, j in np.ndindex(3, 7):
        step = np.zeros((3, 7))
        step[i, j] = 1e-6
        slope = (losses(x + step) - losses(x - step)) / 2e-6
        np.testing.assert_allclose(dx.values[i, j], (slope * [1.0, -2.0, 0.5])[i], atol=1e-7)
    _, lse = reference(SoftmaxProblem(3, 7, dtype="float32", lse=True), [x])
    np.testing.assert_allclose(lse.values, np.log(np.exp(x).sum(-1)))


def test_targets_and_temperatures_that_are_none(emulation: None, sm_90a: Arch, host: Arch) -> None:
    """Ignored: nothing.  No column: NaN, and no other row's memory is read.  Not positive: NaN."""
    problem = replace(SoftmaxProblem(5, 9, "cross_entropy_grad", "float32", ignore_index=-1), temperature=True)
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    temperature = np.array([1, 1, 1, 0, -2], np.float32)
    target = np.array([-1, 9, -(2**40), 3, 3])
    arrays = [x, temperature, target, np.ones(5, np.float32)]
    built = build(problem, sm_90a, "frames", device_code=False)
    _, run = next(emulated_runs(built, str(built.sources["cu"]), MODES[:1]))
    on_cpu = poisoned(problem)
    build(problem, host)(*arrays, *on_cpu)
    for dx, loss in (run([*arrays, *poisoned(problem)]), on_cpu):
        assert loss[0] == 0 and not dx[0].any()
        assert np.isnan(loss[1:]).all() and np.isnan(dx[1:]).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(function="cross_entropy", mask="cols"), "mask=cols has no part in cross_entropy"),
        (dict(function="cross_entropy", lse=True), "lse=True has no part in cross_entropy"),
        (dict(smoothing=0.1), "smoothing, z and ignore_index have no part in softmax"),
        (dict(function="cross_entropy", smoothing=1.5), "smoothing=1.5 is not from 0 to 1"),
        (dict(function="cross_entropy", z=-1.0), "z=-1.0 is not from 0 to"),
        (dict(y_dtype="float16", dtype="float32"), "y_dtype=float16 is not one of same, float32"),
        (dict(cols_from=3, temperature=True), "cols_from=3 is for softmax as it stands"),
    ],
)
def test_what_cannot_be_meant(fields: Fields, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        SoftmaxProblem(4, 9, **fields)


def test_names_of_problems_stay(sm_90a: Arch) -> None:
    """New fields at their defaults are not written; a y_dtype that is the dtype is none."""
    assert SoftmaxProblem(4, 9, dtype="float32", y_dtype="float32") == SoftmaxProblem(4, 9, dtype="float32")
    assert "temperature" not in str(SoftmaxProblem(4, 9)) and "z=" not in str(SoftmaxProblem(4, 9, "cross_entropy"))
    with pytest.raises(ConfigError, match="leaves results no place"):
        build(SoftmaxProblem(4, 9, y_dtype="float32"), sm_90a, "tiles")


def test_rocm_builds_each_form() -> None:
    arch = parse_arch("rocm:gfx942")
    for fields in (dict(lse=True), dict(LOSS), dict(LOSS_GRAD, **ALL), dict(y_dtype="float32", temperature=True)):
        problem = SoftmaxProblem(5, 100, **fields)
        assert "row_out" in str(build(problem, arch, device_code=False).sources) or not problem.row_output
