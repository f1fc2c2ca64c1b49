"""What trials are collected of: layers of the sorts that are asked for, and legal configs, the predicted first."""

from __future__ import annotations

import random
from itertools import islice

from schedules.core.arch import parse_arch
from schedules.core.registry import operator_of
from schedules.predict.rank import ranked
from scripts import collect_trials

ARCH = parse_arch("cuda:sm_90a")


def test_layers_are_of_the_sorts_asked_for() -> None:
    found = [problem for _, problem in islice(collect_trials.problems(None, 0, ["few", "flat"]), 40)]
    assert all(collect_trials.words_of(problem) & {"few", "flat"} for problem in found)
    assert len({(type(problem), str(problem)) for problem in found}) == 40
    assert {problem.dtype for problem in found} > {"float16", "int8"}


def test_words_of_a_sort_must_all_hold() -> None:
    sorts = ["nchw+ragged+float16", "float32"]
    found = [problem for _, problem in islice(collect_trials.problems(None, 1, sorts), 30)]
    odd = [p for p in found if p.dtype != "float32"]
    assert 0 < len(odd) < 30
    assert all(operator_of(p).name == "conv2d_nchw" and p.dtype == "float16" and p.out_w % 8 for p in odd)


def test_results_are_finished_as_networks_do() -> None:
    found = [problem for _, problem in islice(collect_trials.problems(None, 2, ["few", "flat", "other"]), 80)]
    for whole, activations in ((False, {"none", "relu", "silu"}), (True, {"none", "relu"})):
        of = [p for p in found if (p.dtype == "int8") is whole]
        terms = [tuple(sorted(term.name for term in p.epilogue.terms)) for p in of]
        assert {("bias",), ("bias", "residual"), ()} == set(terms)
        assert {p.activation for p in of} == activations
    scales = {str(p.alpha) for p in of if p.epilogue.terms}
    assert scales == {"channel"} and {p.gamma for p in of if p.residual} == {"tensor"}


def test_what_is_predicted_comes_first() -> None:
    problem = next(p for _, p in collect_trials.problems(None, 0, ["other"]) if p.dtype == "float16")
    op, drawn = operator_of(problem), collect_trials.draws(problem, ARCH, 12, random.Random(0), 4)
    assert len(drawn) == 12 == len({(name, str(config)) for name, config in drawn})
    assert all(config.check(problem, ARCH) is None and not op.opt_in(name) for name, config in drawn)
    best = ranked(problem, ARCH)[0]
    assert drawn[0] == (best.schedule, best.config)
