from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.core.epilogue import ACTIVATIONS, Activation, Epilogue, Term
from schedules.core.errors import ProblemError
from schedules.core.registry import operator
from tests.conftest import problem_of

SIZES = dict(n=1, h=4, w=4, ci=2, co=3, kh=1, kw=1)
LOGS = Path(__file__).resolve().parents[2] / "tuning_logs"


@pytest.mark.parametrize("text", [*ACTIVATIONS, "clamp:-1:1", "clamp:-0.5:2.25"])
def test_an_activation_has_one_spelling(text: str) -> None:
    assert str(Activation.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("clamp:0:6", "relu6"),
        ("clamp:0.0:6.0", "relu6"),
        ("clamp:-1.0:1e0", "clamp:-1:1"),
        ("clamp:-0.0:1", "clamp:0:1"),
    ],
)
def test_other_spellings_are_the_same_problem(text: str, canonical: str) -> None:
    problem = problem_of("conv2d_nhwc", **SIZES, activation=text)
    assert problem == problem_of("conv2d_nhwc", **SIZES, activation=canonical)
    assert f"activation={canonical}" in str(problem)


@given(st.floats(-100, 100), st.floats(-100, 100))
def test_every_clamp_comes_back(a: float, b: float) -> None:
    clamp = Activation.parse(f"clamp:{min(a, b)!r}:{max(a, b)!r}")
    assert Activation.parse(str(clamp)) == clamp and (clamp.low, clamp.high) == (min(a, b), max(a, b))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(activation="swish"), "activation=swish is not none, relu, silu, .*, relu6 or clamp:LOW:HIGH"),
        (dict(activation="clamp"), "write clamp:LOW:HIGH"),
        (dict(activation="clamp:1"), "write clamp:LOW:HIGH"),
        (dict(activation="clamp:a:b"), "write clamp:LOW:HIGH"),
        (dict(activation="clamp:2:1"), "LOW <= HIGH"),
        (dict(activation="clamp:0:inf"), "both finite"),
        (dict(activation="clamp:nan:1"), "LOW <= HIGH"),
    ],
)
def test_senseless_activations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message) as caught:
        problem_of("conv2d_nchw", **SIZES, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(activation="gelu"), "activation=gelu cannot be exact, as out_dtype=int8 is; use out_dtype=float32"),
        (dict(activation="silu", out_dtype="int32", alpha=1.0), "activation=silu cannot be exact"),
    ],
)
def test_whole_outputs_are_exact_or_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        problem_of("conv2d_nchw32", **SIZES, **fields)


def test_clamps_of_whole_outputs() -> None:
    assert problem_of("conv2d_nchw32", **SIZES, activation="clamp:-0.5:2").epilogue.activation.low == -0.5
    problem = problem_of("conv2d_nchw32", **SIZES, activation="clamp:-3:2", out_dtype="int32", alpha=1.0)
    assert problem.epilogue.work == "int32"


@pytest.mark.parametrize("name", ["conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc"])
def test_terms_are_arguments_in_order(name: str) -> None:
    problem = problem_of(name, **SIZES, bias=True, residual=True, dtype="bfloat16")
    arguments = problem.arguments()
    assert [a.name for a in arguments] == ["data", "filter", "bias", "residual", "output"]
    assert arguments[2].shape == (3,) and arguments[3].shape == arguments[4].shape
    assert {a.dtype for a in arguments} == {"bfloat16"}


def test_names_of_problems_are_those_of_before() -> None:
    """What fields a class got later is not in names of files and journals while it has its default."""
    common = "n=1 h=4 w=4 ci=2 co=3 kh=1 kw=1 stride=1 pad=0 dilation=1 dtype=float32"
    wanted = {
        "conv2d_hwcn": common,
        "conv2d_nhwc": f"{common} bias=false activation=none",
        "conv2d_nchw": f"{common} bias=false activation=none filter_layout=oihw",
    }
    for name, text in wanted.items():
        assert str(problem_of(name, **SIZES)) == text
        more = problem_of(name, **SIZES, residual=True, activation="clamp:-1:1")
        assert "residual=true" in str(more) and type(more).parse(more.to_json()) == more
        assert not set(more.key) & set(":,= ")


def test_lines_of_old_journals_are_problems_that_are_written_as_then() -> None:
    seen = set()
    for path in sorted(LOGS.glob("*/conv2d_*.jsonl")):
        with path.open() as lines:
            words = [json.loads(line).get("problem") for line in (next(lines), next(lines, "{}"))]
        for fields in filter(None, words):
            problem = operator(path.stem).problem.parse(fields)
            assert set(problem.to_json()) - set(fields) <= {"filter_layout"}  # which the first had not yet
            seen.add(path.stem)
    assert {"conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc", "conv2d_nchw32"} <= seen


def test_what_comes_at_run_time_is_an_operand() -> None:
    scale, factor = Term("alpha", "channel", "float32"), Term("gamma", "tensor", "float32")
    terms = Term("bias", "channel", "int32", None), Term("residual", "element", "int8", factor)
    e = Epilogue("int8", terms, scale)
    assert [operand.name for operand in e.operands] == ["bias", "residual", "alpha", "gamma"]
    assert e.sorted([1, 2, 3, 4]) == (3, [(None, 1), (4, 2)])
    assert [operand.name for operand in e.of_axis("tensor", "channel")] == ["bias", "alpha", "gamma"]
    assert not e.saturates_below
    assert Epilogue("int8", terms, scale, Activation("relu")).saturates_below
    assert not Epilogue("float32", terms[:1], scale, Activation("relu")).saturates_below


@pytest.mark.parametrize(
    ("fields", "work"),
    [
        (dict(scale=2.0), "int32"),
        (dict(scale=2.0, activation=Activation.parse("clamp:-3:9")), "int32"),
        (dict(scale=0.5), "float32"),
        (dict(scale=Term("alpha", "tensor", "float32")), "float32"),
        (dict(activation=Activation.parse("clamp:-0.5:9")), "float32"),
        (dict(activation=Activation("hardswish")), "float32"),
        (dict(terms=(Term("bias", "channel", "int32", None),)), "int32"),
        (dict(terms=(Term("bias", "channel", "int32", 0.5),)), "float32"),
    ],
)
def test_int32_is_computed_in_whole_numbers_where_all_are(fields: dict[str, Any], work: str) -> None:
    assert Epilogue("int32", **fields).work == work and Epilogue("int8", **fields).work == "float32"
