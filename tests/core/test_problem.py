from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedules.core.errors import ConfigError, ProblemError, UnknownNameError
from schedules.operators.conv2d_hwcn.definition import HwcnProblem
from schedules.operators.conv2d_hwcn.tutorial import TutorialConfig
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.softmax.definition import SoftmaxProblem

TUTORIAL = dict(n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)


def test_words_round_trip() -> None:
    problem = HwcnProblem.parse({**TUTORIAL, "stride": "2,1", "pad": "1x0"})
    assert problem.stride == (2, 1)
    assert problem.pad == (1, 0)
    assert HwcnProblem.parse(problem.to_json()) == problem
    assert HwcnProblem.parse(dict(word.split("=") for word in str(problem).split())) == problem


def test_sizes_of_the_tutorial() -> None:
    problem = HwcnProblem.parse(TUTORIAL)
    assert (problem.out_h, problem.out_w) == (14, 14)
    assert problem.flops == 2 * 256 * 14 * 14 * 512 * 256 * 9
    assert problem.min_bytes == 4 * (14 * 14 * 256 * 256 + 9 * 256 * 512 + 14 * 14 * 512 * 256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"ci": -3}, "ci=-3 must be at least 1"),
        ({"stride": 0}, "stride"),
        ({"pad": -1}, "must not be negative"),
        ({"h": 2, "pad": 0}, "kh=3 reaches over 3 pixels but the padded input has 2"),
        ({"dilation": 9}, "kh=3 reaches over 19 pixels"),
        ({"dtype": "float64"}, "use float32"),
        ({"n": "many"}, "n='many' is not a whole number"),
        ({"n": 1.5}, "not a whole number"),
        ({"stride": "1,2,3"}, "one or two whole numbers"),
    ],
)
def test_senseless_problems_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ProblemError, match=words) as caught:
        HwcnProblem.parse({**TUTORIAL, **change})
    assert "\n" not in str(caught.value)


def test_missing_and_extra_fields_are_named() -> None:
    with pytest.raises(ProblemError, match="missing problem co, kh; give co=... kh=..."):
        HwcnProblem.parse({k: v for k, v in TUTORIAL.items() if k not in ("co", "kh")})
    with pytest.raises(UnknownNameError, match="'strid'; did you mean 'stride'"):
        HwcnProblem.parse({**TUTORIAL, "strid": 1})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(rows=1, cols=0), "cols=0"),
        (dict(rows=1, cols=8, function="softmin"), "function=softmin"),
        (dict(rows=1, cols=8, mask="diagonal"), "mask=diagonal"),
        (dict(rows=1, cols=8, function="softmax_grad", mask="full"), "no part in a gradient"),
        (dict(rows=1, cols=8, scale=0), "scale=0"),
        (dict(rows=1, cols=8, scale="inf"), "scale=inf"),
        (dict(rows=1, cols=8, keep=0), "keep=0"),
        (dict(rows=1, cols=8, keep=1.5), "keep=1.5"),
        (dict(rows=1, cols=8, dtype="int8"), "dtype=int8"),
    ],
)
def test_senseless_softmax_is_refused(fields: dict, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        SoftmaxProblem.parse(fields)


def test_config_fields_parse() -> None:
    assert TutorialConfig.parse({"tile": "8x4", "step": "16"}) == TutorialConfig(tile=(8, 4), step=16)
    assert TutorialConfig.parse({"vthread": 2}).vthread == (2, 2)
    with pytest.raises(ConfigError, match="step='few'"):
        TutorialConfig.parse({"step": "few"})
    for value in (True, 1.0, None, [], "9" * 40, 2**31):
        with pytest.raises(ConfigError, match="config step="):
            TutorialConfig.parse({"step": value})
    for value in ([1, 2, 3], [1.5, 2], [True, 1], {}, [[1]], 2**40):
        with pytest.raises(ConfigError, match="config tile="):
            TutorialConfig.parse({"tile": value})
    with pytest.raises(ProblemError, match="dtype=\\['float32'\\] is not a word"):
        SoftmaxProblem.parse({"rows": 1, "cols": 1, "dtype": ["float32"]})
    with pytest.raises(UnknownNameError, match="did you mean 'tile'"):
        TutorialConfig.parse({"tiles": 8})


@example(n=1, h=7, ci=1, co=1, k=3, dilation=3)  # the kernel reaches into the padding: no smaller image holds it
@given(
    n=st.integers(1, 400),
    h=st.integers(1, 70),
    ci=st.integers(1, 600),
    co=st.integers(1, 600),
    k=st.integers(1, 5),
    dilation=st.integers(1, 3),
)
def test_smaller_problems_stay_legal_and_shrink(n: int, h: int, ci: int, co: int, k: int, dilation: int) -> None:
    if dilation * (k - 1) + 1 > h + 2:
        return
    problem = HwcnProblem(n, h, h, ci, co, k, k, pad=(1, 1), dilation=(dilation, dilation))
    before = problem.flops
    for smaller in problem.smaller():
        assert smaller.flops <= before
        before = smaller.flops
    rows = [smaller.rows for smaller in SoftmaxProblem(n, ci).smaller()]
    assert rows == sorted(rows, reverse=True)
    assert n == 1 or rows[-1] == 1


def test_a_range_of_batches() -> None:
    words = dict(n="8", n_from="5", h=7, w=7, ci=4, co=4, kh=1, kw=1)
    problem = NhwcProblem.parse(words)
    assert "n_from=5" in str(problem) and "n_from" not in str(problem.representative())
    assert NhwcProblem.parse(problem.to_json()) == problem
    assert NhwcProblem.parse({**words, "n_from": 8}) == problem.representative()  # a range of one number is none
    assert [each.n for each in problem.instances()] == [5, 7, 8]
    assert [argument.least for argument in problem.arguments()] == [5, None, 5]
    for n in (4, 5, 8, 9):
        assert problem.covers(replace(problem, n=n, n_from=0)) is (5 <= n <= 8)
    assert not problem.covers(replace(problem, n=6, n_from=0, co=5))
    for smaller in replace(problem, n=300, n_from=150).smaller():
        assert 1 <= smaller.n_from < smaller.n
    assert all(odd.n_from == 1 for odd in problem.odd())


@pytest.mark.parametrize(("n", "least", "most"), [(1, 0, 1), (2, 0, 2), (3, 3, 4), (4, 3, 4), (5, 5, 8), (33, 33, 64)])
def test_batches_are_built_by_powers_of_two(n: int, least: int, most: int) -> None:
    wide = NhwcProblem(n, 7, 7, 4, 4, 1, 1).widened()
    assert (wide.n_from, wide.n) == (least, most)
    assert wide.covers(NhwcProblem(n, 7, 7, 4, 4, 1, 1))


def test_what_has_no_range_is_built_alone() -> None:
    for problem in (HwcnProblem(5, 7, 7, 4, 4, 1, 1), NhwcProblem(5, 4096, 4096, 8, 8, 1, 1, dtype="float16")):
        assert problem.widened() == problem
    for fields, words in (
        (dict(n=4, n_from=5), "n_from=5 is not 1 to n=4"),
        (dict(n=4, n_from=-1), "n_from=-1 is not"),
        (dict(n=2**20, n_from=1), "2 GiB or more"),
    ):
        with pytest.raises(ProblemError, match=words):
            NhwcProblem(**{**dict(h=32, w=32, ci=4, co=4, kh=1, kw=1), **fields})
    with pytest.raises(ProblemError, match="images are not the first axis"):
        HwcnProblem(8, 7, 7, 4, 4, 1, 1, n_from=5)
