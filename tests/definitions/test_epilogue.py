"""The epilogue as a tensor expression against its reference, and the mistakes that the comparison has to notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from schedules.core.arch import parse_arch
from schedules.core.epilogue import AXES, Activation, Epilogue, Term
from schedules.core.problem import Conv2dProblem, numpy_dtype
from schedules.core.reference import finished
from schedules.core.registry import operator
from schedules.core.tolerance import compare
from schedules.definitions import epilogue as expressions
from schedules.definitions.epilogue import finish, operands_at, placeholders
from schedules.operators.conv2d_nchw.definition import NchwProblem
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem
from tests.conftest import problem_of

ACTIVATIONS = (*NchwProblem.activations, "clamp:-0.5:1.25")
# of whole sums; a factor of 1 may not be contracted with a product that is rounded
SCALES: tuple[dict[str, Any], ...] = (
    dict(alpha=2.0, beta=3.0, gamma=1.0),
    dict(alpha=0.1 / 3, beta=1.0, gamma=1.0),
    dict(alpha=0.1, beta="alpha", gamma=0.7),
    dict(alpha="channel", beta="channel", gamma="tensor"),
    dict(alpha="tensor", beta="alpha", gamma="channel"),
)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -1e-30, 30.0, -30.0, -200.0)
LAYOUTS = ("conv2d_hwcn", "conv2d_nchw", "conv2d_nhwc", "conv2d_nchw32")


def arrays_of(problem: Conv2dProblem, special: bool = True) -> tuple[np.ndarray, list[np.ndarray]]:
    """Sums in the output's layout, and the terms."""
    rng = np.random.default_rng(0)
    shape = problem.shapes()[2]
    if problem.dtype == "int8":
        sums = rng.integers(-(2**16), 2**16, shape, dtype="int32")
        terms = [
            rng.uniform(0.001, 0.01, a.shape).astype("f4")
            if a.name in ("alpha", "beta", "gamma")
            else rng.integers(-100, 100, a.shape).astype(a.dtype)
            for a in problem.arguments()[2:-1]
        ]
        return sums, terms
    sums = rng.standard_normal(shape, dtype=np.float32) * 3
    if special:
        sums.reshape(-1)[: len(SPECIAL)] = SPECIAL
    arguments = problem.arguments()[2:-1]
    return sums, [rng.standard_normal(a.shape, dtype=np.float32).astype(numpy_dtype(a.dtype)) for a in arguments]


def computed(problem: Conv2dProblem, sums: np.ndarray, terms: list[np.ndarray]) -> np.ndarray:
    """The output of the expression, on this machine."""
    given = placeholders(problem)
    total = te.placeholder(sums.shape, name="sums", dtype=sums.dtype.name)
    e = problem.epilogue
    output = te.compute(sums.shape, lambda *at: finish(e, total(*at), operands_at(problem, given, at)), name="output")
    tensors = [given[operand.name] for operand in e.operands]
    # a target with fused multiply-adds
    function = tirx.build(te.create_prim_func([total, *tensors, output]), parse_arch("llvm").target())
    arguments = [tvm.runtime.tensor(array) for array in (sums, *terms, np.empty(sums.shape, numpy_dtype(e.out_dtype)))]
    function["main"](*arguments)
    return arguments[-1].numpy()


def error(problem: Conv2dProblem, sums: np.ndarray, terms: list[np.ndarray], got: np.ndarray) -> float:
    magnitude = np.abs(sums.astype(np.float64)) if sums.dtype == np.float32 else None
    total = sums.astype(np.float64 if magnitude is not None else np.int64)
    expected = finished(problem, total, terms, magnitude)
    return compare(got, expected, problem.epilogue.out_dtype).error


def problem_with(layout: str, **fields: Any) -> Conv2dProblem:
    problem = problem_of(layout, n=3, h=4, w=2, ci=1, co=5, kh=1, kw=1, **fields)
    assert isinstance(problem, Conv2dProblem)
    return problem


@pytest.mark.parametrize("dtype", NchwProblem.dtypes)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_expression_is_the_reference(dtype: str, activation: str) -> None:
    for bias, residual in ((False, False), (True, True)):
        problem = problem_with("conv2d_nchw", dtype=dtype, bias=bias, residual=residual, activation=activation)
        sums, terms = arrays_of(problem)
        got = computed(problem, sums, terms)
        assert np.isnan(got.astype("f4").reshape(-1)[0])  # an activation must not hide a NaN
        assert error(problem, sums, terms, got) <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_terms_lie_as_the_layout_says(layout: str) -> None:
    problem = problem_with(layout, bias=True, residual=True)
    sums, terms = arrays_of(problem)
    assert error(problem, sums, terms, computed(problem, sums, terms)) <= 1
    channels = np.moveaxis(terms[1], problem.channel_axes, range(-len(problem.channel_axes), 0))
    assert terms[0].size == np.prod(channels.shape[-len(problem.channel_axes) :])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", Nchw32Problem.out_dtypes)
def test_whole_sums(out_dtype: str, activation: str) -> None:
    if not out_dtype.startswith("float") and not Activation.parse(activation).exact:
        return
    fields = dict(out_dtype=out_dtype, activation=activation, bias=True, residual=True)
    for scales in SCALES[ACTIVATIONS.index(activation) % 2 :: 2]:
        problem = problem_with("conv2d_nchw32", **fields, **scales)
        sums, terms = arrays_of(problem)
        got = computed(problem, sums, terms)
        assert error(problem, sums, terms, got) <= 1 and len(np.unique(got)) > 1
        if Activation.parse(activation).exact:
            with np.errstate(over="ignore"):  # float16
                assert np.array_equal(got, finished(problem, sums.astype(np.int64), terms).values.astype(got.dtype))


class AnyTerms(NchwProblem):
    """A problem with terms that no operator offers."""

    epilogue = Epilogue(
        "float32",
        tuple(Term(f"{axis}_{factor}", axis, "float32", factor) for axis in AXES for factor in (1.0, -0.5)),
        scale=0.25,
        activation=Activation("silu"),
    )


def test_terms_of_every_axis_with_factors() -> None:
    problem = AnyTerms(2, 3, 4, 1, 5, 1, 1)
    assert [a.shape for a in problem.arguments()[2:-1:2]] == [(1,), (5,), (2, 3, 4), (2, 5, 3, 4)]
    sums, terms = arrays_of(problem, special=False)
    assert error(problem, sums, terms, computed(problem, sums, terms)) <= 1


MUTANTS = {
    "no bias": lambda e: replace(e, terms=tuple(replace(t, factor=0.0) if t.name == "bias" else t for t in e.terms)),
    "no residual": lambda e: replace(
        e, terms=tuple(replace(t, factor=0.0) if t.name == "residual" else t for t in e.terms)
    ),
    "no activation": lambda e: replace(e, activation=Activation()),
    "no scale": lambda e: replace(e, scale=1.0),
    "another gelu": lambda e: replace(e, activation=Activation("gelu_tanh")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("layout", ["conv2d_nhwc", "conv2d_nchw32"])
def test_what_is_left_out_is_noticed(layout: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = layout == "conv2d_nchw32"
    if (mutant == "no scale" and not whole) or (mutant == "another gelu" and whole):
        pytest.skip("the problem has none")
    problem = problem_with(layout, bias=True, residual=True, activation="relu6" if whole else "gelu")
    sums, terms = arrays_of(problem, special=False)
    assert error(problem, sums, terms, computed(problem, sums, terms)) <= 1
    true = expressions.unrounded
    monkeypatch.setattr(expressions, "unrounded", lambda e, *rest: true(MUTANTS[mutant](e), *rest))
    assert error(problem, sums, terms, computed(problem, sums, terms)) > 1


def test_slopes_bound_what_an_error_grows_by() -> None:
    from schedules.core.reference import activated

    y = np.linspace(-8, 8, 200001)
    for name in ACTIVATIONS:
        activation = Activation.parse(name)
        slope = np.abs(np.diff(activated(activation, y)) / np.diff(y)).max()
        assert 0.97 * activation.slope <= slope <= activation.slope + 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_nothing_to_do_there_is_no_epilogue(layout: str) -> None:
    fields = dict(alpha=1.0) if layout == "conv2d_nchw32" else {}
    plain, more = (problem_with(layout, **given).epilogue for given in (fields, {**fields, "bias": True}))
    assert plain == Epilogue(plain.out_dtype) and more != Epilogue(more.out_dtype)
    assert operator(layout).problem is type(problem_with(layout))
