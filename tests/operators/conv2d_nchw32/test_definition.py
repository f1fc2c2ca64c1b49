"""The definition against loops that share nothing with it, and the arithmetic of its epilogue."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.core.arch import parse_arch
from schedules.core.errors import ProblemError
from schedules.core.reference import finished, fma
from schedules.core.registry import operator
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem, inputs, reference
from schedules.operators.conv2d_nchw32.packing import pack_data, pack_filter, pack_scales, unpack_output
from tests.conftest import problem_of

SMALL = problem_of("conv2d_nchw32", n=2, h=5, w=4, ci=35, co=3, kh=3, kw=2, stride="2,1", pad="1,2", dilation="1,2")


def rounded(value: Fraction) -> np.float32:
    """The float32 nearest to `value`, ties to even."""
    low = np.float32(float(value))
    near = [np.nextafter(low, np.float32(-np.inf)), low, np.nextafter(low, np.float32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.int32)) & 1))


def naive_sums(p: Nchw32Problem, data: Any, weight: Any) -> Any:
    """(n, co, out_h, out_w) of data (n, ci, h, w) and weight (co, ci, kh, kw), by loops."""
    out = np.zeros((p.n, p.co, p.out_h, p.out_w), dtype=object)
    for b, f, y, x in np.ndindex(*out.shape):
        for c, ky, kx in product(range(p.ci), range(p.kh), range(p.kw)):
            row = y * p.stride[0] + ky * p.dilation[0] - p.pad[0]
            column = x * p.stride[1] + kx * p.dilation[1] - p.pad[1]
            if 0 <= row < p.h and 0 <= column < p.w:
                out[b, f, y, x] += int(data[b, c, row, column]) * int(weight[f, c, ky, kx])
    return out


def naive_epilogue(
    p: Nchw32Problem, total: int, bias: int, residual: float, alpha: float, beta: float, gamma: float
) -> float:
    """Exact rational arithmetic, rounded where the epilogue says."""
    terms = [(beta, bias, p.bias), (gamma, residual, p.residual)]
    if p.out_dtype == "int32" and p.alpha == 2.0:
        y = int(alpha) * total + sum(int(factor) * int(term) for factor, term, used in terms if used)
        return {"none": y, "relu": max(y, 0), "clamp:-1000:90": min(max(y, -1000), 90)}[p.activation]
    if p.beta == "alpha":
        total, terms = total + bias, terms[1:]
    value = rounded(Fraction(alpha) * Fraction(float(np.float32(total))))
    for factor, term, used in terms:
        if used:
            value = rounded(Fraction(factor) * Fraction(float(np.float32(term))) + Fraction(float(value)))
    value = {"none": value, "relu": max(value, np.float32(0))}.get(p.activation, min(max(value, -1000), 90))
    if p.out_dtype.startswith("float"):
        return float(np.float16(value)) if p.out_dtype == "float16" else float(value)
    least, most = (-128, 127) if p.out_dtype == "int8" else (-(2**31), 2**31 - 128)
    return round(min(max(Fraction(float(value)), least), most))


WHOLE: dict[str, Any] = dict(alpha=2.0, beta=3.0, gamma=5.0)
PARTS: dict[str, Any] = dict(alpha=2.0**-10, beta=0.0625, gamma=0.75)
GIVEN: tuple[dict[str, Any], ...] = (
    dict(alpha="channel", beta="channel", gamma="tensor"),
    dict(alpha="tensor", beta="alpha", gamma="channel"),
)


@pytest.mark.parametrize("out_dtype", ["int8", "int32", "float16", "float32"])
@pytest.mark.parametrize("activation", ["none", "relu", "clamp:-1000:90"])
@pytest.mark.parametrize(("bias", "residual"), list(product([False, True], repeat=2)))
def test_reference_is_the_naive_loop(out_dtype: str, activation: str, bias: bool, residual: bool) -> None:
    for scales in (WHOLE if out_dtype == "int32" else PARTS, *GIVEN):
        fields = dict(out_dtype=out_dtype, activation=activation, bias=bias, residual=residual)
        assert_naive(replace(SMALL, **fields, **scales))


def assert_naive(p: Nchw32Problem) -> None:
    arrays = inputs(p, np.random.default_rng(0))
    names = [argument.name for argument in p.arguments() if not argument.output]
    assert [(a.shape, a.dtype.name) for a in arrays] == [(a.shape, a.dtype) for a in p.arguments() if not a.output]
    given = dict(zip(names, arrays, strict=True))
    data = unpack_output(given["data"], p.ci)
    weight = given["filter"].transpose(3, 0, 4, 1, 2).reshape(32, 64, p.kh, p.kw)[: p.co, : p.ci]
    total = naive_sums(p, data, weight)
    got = unpack_output(reference(p, arrays)[0].values, p.co)
    residual = unpack_output(given["residual"], p.co) if p.residual else np.zeros_like(got)
    bias = given["bias"] if p.bias else np.zeros(p.co, "int32")
    for at in np.ndindex(*total.shape):
        scales = [given.get(name, np.array([getattr(p, name)])) for name in ("alpha", "beta", "gamma")]
        numbers = [0.0 if each.dtype.kind == "U" else float(each[at[1] if each.size > 1 else 0]) for each in scales]
        wanted = naive_epilogue(p, total[at], int(bias[at[1]]), float(residual[at]), *numbers)
        assert got[at].astype(p.out_dtype) == wanted, at


@pytest.mark.parametrize("images", [1, 2, 4])
def test_reference_is_the_same_for_some_images_at_a_time(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    p = replace(SMALL, n=5, bias=True, residual=True)
    arrays = inputs(p, np.random.default_rng(0))
    (whole,) = reference(p, arrays)
    monkeypatch.setitem(reference.__globals__, "PART", images * whole.values[0].size)
    (parts,) = reference(p, arrays)
    assert np.array_equal(parts.values, whole.values) and len(np.unique(whole.values)) > 100


def test_channels_added_by_packing_compute_zero() -> None:
    p = replace(SMALL, bias=True, residual=True)
    output = reference(p, inputs(p, np.random.default_rng(1)))[0].values
    assert not output[..., p.co :].any()
    assert output[..., : p.co].any()


def test_few_lanes_compute_the_same() -> None:
    """The same bytes in fewer lanes make the same sums, and schedules of whole groups do not take them."""
    wide = replace(SMALL, ci=3)
    narrow = replace(wide, lanes=4)
    data, weight, *rest = inputs(wide, np.random.default_rng(0))
    few = [np.ascontiguousarray(array[..., :4]) for array in (data, weight)]
    assert [array.shape for array in few] == [argument.shape for argument in narrow.arguments()[:2]]
    assert (reference(wide, [data, weight, *rest])[0].values == reference(narrow, [*few, *rest])[0].values).all()
    assert str(wide) == str(replace(narrow, lanes=32)) and "lanes=4" in str(narrow) and "lanes" not in wide.to_json()
    for name in ("tma_wgmma", "mma"):
        spec = operator("conv2d_nchw32").schedule(name)
        assert "lanes=4 of data" in str(spec.default(narrow, parse_arch("sm_90a")).check(narrow, parse_arch("sm_90a")))


@settings(max_examples=20)
@given(n=st.integers(1, 3), c=st.integers(1, 70), h=st.integers(1, 4), w=st.integers(1, 4))
def test_packed_data_comes_back(n: int, c: int, h: int, w: int) -> None:
    data = np.random.default_rng(c).integers(-128, 128, (n, c, h, w), dtype="int8")
    packed = pack_data(data)
    assert packed.shape == (n, -(-c // 32), h, w, 32)
    assert packed.flags["C_CONTIGUOUS"]
    assert np.array_equal(unpack_output(packed, c), data)
    assert packed[:, c // 32, :, :, c % 32 :].any() == 0 if c % 32 else True


@settings(max_examples=20)
@given(co=st.integers(1, 70), ci=st.integers(1, 70), kh=st.integers(1, 3), kw=st.integers(1, 3))
def test_packed_filter_is_in_the_order_of_the_reduction(co: int, ci: int, kh: int, kw: int) -> None:
    weight = np.random.default_rng(co).integers(-128, 128, (co, ci, kh, kw), dtype="int8")
    packed = pack_filter(weight)
    assert packed.shape == (-(-ci // 32), kh, kw, -(-co // 32) * 32, 32)
    for f, c in ((0, 0), (co - 1, ci - 1), (co // 2, ci // 2)):
        assert np.array_equal(packed[c // 32, :, :, f, c % 32], weight[f, c])
    assert np.count_nonzero(packed) == np.count_nonzero(weight)


@settings(max_examples=200)
@given(
    a=st.floats(-4, 4, width=32),
    b=st.integers(-(2**31), 2**31 - 1),
    c=st.floats(-(2.0**40), 2.0**40, width=32),
)
def test_fma_rounds_once(a: float, b: int, c: float) -> None:
    factor = np.array([b]).astype(np.float32)
    exact = Fraction(a) * Fraction(float(factor[0])) + Fraction(c)
    assert fma(np.float32(a), factor, np.array([c], np.float32))[0] == rounded(exact)


@pytest.mark.parametrize(
    ("scales", "shape"), [(0.1, (1,)), (np.float32(3), (1,)), ([0.25] * 40, (64,)), (np.full(32, 7.0), (32,))]
)
def test_scales_are_packed(scales: Any, shape: tuple[int]) -> None:
    packed = pack_scales(scales, np.size(scales))
    assert packed.dtype == np.float32 and packed.shape == shape
    assert np.array_equal(packed[: np.size(scales)], np.float32(scales).reshape(-1))
    assert (packed[np.size(scales) :] == 1).all()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ([0.5, 0.0, 1.0], "alpha=0 is not a positive float32"),
        ([0.5, 1.0, np.nan], "alpha=nan is not a positive float32"),
        ([0.5, 1.0], r"alpha has shape \(2,\); give one number, or 3, one for each output channel"),
        (np.ones((3, 1)), r"alpha has shape \(3, 1\); give"),
    ],
)
def test_bad_scales_are_not_packed(scales: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message) as caught:
        pack_scales(scales, 3, "alpha")
    assert "\n" not in str(caught.value)


def test_fields_of_scales() -> None:
    p = problem_of("conv2d_nchw32", n=1, h=3, w=3, ci=4, co=40, kh=1, kw=1, alpha="channel", beta="alpha", gamma="0.1")
    assert isinstance(p, Nchw32Problem) and (p.alpha, p.beta, p.gamma) == ("channel", "alpha", float(np.float32(0.1)))
    assert "alpha=channel beta=alpha gamma=0.1000000" in str(p) and type(p).parse(p.to_json()) == p
    assert p.bare() == replace(p, alpha=2.0**-11, beta=2.0**-11, gamma=1.0)
    assert [(a.name, a.shape) for a in replace(p, bias=True, gamma="tensor", residual=True).arguments()[2:-1]] == [
        ("bias", (64,)), ("residual", (1, 2, 3, 3, 32)), ("alpha", (64,)), ("gamma", (1,)),
    ]  # fmt: skip


def test_fma_differs_from_two_roundings() -> None:
    """(1 + 2^-12)^2 - 1 - 2^-11 is 2^-24; the product rounded by itself loses it."""
    a, c = np.float32(1 + 2.0**-12), np.float32(-(1 + 2.0**-11))
    assert fma(a, np.array([a]), np.array([c]))[0] == np.float32(2.0**-24)
    assert a * a + c == 0


@pytest.mark.parametrize(
    ("total", "wanted"), [(1, 0), (3, 2), (5, 2), (-1, 0), (-3, -2), (-5, -2), (255, 127), (-257, -128), (10**6, 127)]
)
def test_int8_rounds_ties_to_even_and_saturates(total: int, wanted: int) -> None:
    p = replace(SMALL, alpha=0.5)
    assert finished(p, np.array([total]), []).values[0] == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"out_dtype": "bfloat16"}, "out_dtype=bfloat16"),
        ({"activation": "gelu"}, "activation=gelu cannot be exact"),
        ({"dtype": "float32"}, "dtype=float32"),
        ({"alpha": "element"}, "alpha=element is not a number, tensor or channel"),
        ({"gamma": "alpha"}, "gamma=alpha is not a number, tensor or channel"),
        ({"alpha": float("nan")}, "alpha=nan is not a positive"),
        ({"alpha": 0.0}, "alpha=0 is not a positive"),
        ({"alpha": -2.0}, "alpha=-2 is not a positive"),
        ({"beta": float("inf")}, "beta=inf is not a positive"),
        ({"gamma": 1e-40}, "gamma=1e-40 is not a positive"),
        ({"lanes": 16}, "lanes=16 is not 32 for ci=35"),
        ({"lanes": 4, "ci": 5}, "lanes=4 is not 8 or 16 or 32 for ci=5"),
        ({"ci": 4096, "kh": 7, "kw": 7, "h": 9, "w": 9}, "can exceed int32"),
    ],
)
def test_problem_says_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        replace(SMALL, **fields)
