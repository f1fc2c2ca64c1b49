"""What layers are drawn: of the sorts that are asked for, finished as networks do."""

from __future__ import annotations

from itertools import islice

from schedules.core.registry import operator_of
from scripts import drawn_layers


def test_layers_are_of_the_sorts_asked_for() -> None:
    found = [problem for _, problem in islice(drawn_layers.problems(None, 0, ["few", "flat"]), 40)]
    assert all(drawn_layers.words_of(problem) & {"few", "flat"} for problem in found)
    assert len({(type(problem), str(problem)) for problem in found}) == 40
    assert {problem.dtype for problem in found} > {"float16", "int8"}


def test_words_of_a_sort_must_all_hold() -> None:
    sorts = ["nchw+ragged+float16", "float32"]
    found = [problem for _, problem in islice(drawn_layers.problems(None, 1, sorts), 30)]
    odd = [p for p in found if p.dtype != "float32"]
    assert 0 < len(odd) < 30
    assert all(operator_of(p).name == "conv2d_nchw" and p.dtype == "float16" and p.out_w % 8 for p in odd)


def test_sorts_tell_planes_and_channels_apart() -> None:
    sorts = ["large+narrow+float16", "uneven+other+float16"]
    found = [problem for _, problem in islice(drawn_layers.problems(None, 3, sorts), 30)]
    wide = [p for p in found if not (p.h * p.w > drawn_layers.LARGE and p.ci <= drawn_layers.NARROW)]
    assert 0 < len(wide) < 30
    assert all(p.ci % 8 and p.ci > 16 for p in wide)


def test_results_are_finished_as_networks_do() -> None:
    found = [problem for _, problem in islice(drawn_layers.problems(None, 2, ["few", "flat", "other"]), 80)]
    for whole, activations in ((False, {"none", "relu", "silu"}), (True, {"none", "relu"})):
        of = [p for p in found if (p.dtype == "int8") is whole]
        terms = [tuple(sorted(term.name for term in p.epilogue.terms)) for p in of]
        assert {("bias",), ("bias", "residual"), ()} == set(terms)
        assert {p.activation for p in of} == activations
    scales = {str(p.alpha) for p in of if p.epilogue.terms}
    assert scales == {"channel"} and {p.gamma for p in of if p.residual} == {"tensor"}
