"""What trials are collected of: legal configs, the predicted first."""

from __future__ import annotations

import random

from schedules.core.arch import parse_arch
from schedules.core.registry import operator_of
from schedules.predict.rank import ranked
from scripts import collect_trials, drawn_layers

ARCH = parse_arch("cuda:sm_90a")


def test_what_is_predicted_comes_first() -> None:
    problem = next(p for _, p in drawn_layers.problems(None, 0, ["other"]) if p.dtype == "float16")
    op, drawn = operator_of(problem), collect_trials.draws(problem, ARCH, 12, random.Random(0), 4)
    assert len(drawn) == 12 == len({(name, str(config)) for name, config in drawn})
    assert all(config.check(problem, ARCH) is None and not op.opt_in(name) for name, config in drawn)
    best = ranked(problem, ARCH)[0]
    assert drawn[0] == (best.schedule, best.config)
