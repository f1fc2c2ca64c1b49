"""Problems and configs that make no sense, drawn for every operator and schedule: refused in a line, and never more."""

from __future__ import annotations

import dataclasses
import math
from random import Random
from typing import Any

import pytest

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError, ProblemError, SchedulesError, UsageError
from schedules.core.fields import Fields
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Problem
from schedules.core.registry import operators

NUMBERS = (0, -1, 1, 3, 7, 17, 100, 2**16, 2**20 + 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(10**40))
WORDS = ("", " ", "many", "none", "1,2,3", "0,0", "1.5", "9" * 5000, "a\nb", "\x1b[2J", "float16", "٣", "relu:relu")
OTHERS = (None, True, 0.5, -0.0, math.nan, math.inf, -1e308, [], [1, [2]], {}, {"n": 1}, b"1", (0, -1))
pytestmark = pytest.mark.filterwarnings("error")  # which would be more lines
ARCHES = [parse_arch(name) for name in ("llvm", "cuda:sm_75", "cuda:sm_80", "cuda:sm_90a", "rocm:gfx942")]
LONG = 400  # letters of a message that names what was given


def changed(r: Random, words: dict[str, Any], kind: type[Fields]) -> dict[str, Any]:
    """`words` with one to three fields as somebody may get them wrong."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    found = dict(words)
    for name in r.sample(names, min(len(names), r.randint(1, 3))):
        found[name] = r.choice(r.choice((NUMBERS, NUMBERS, WORDS, OTHERS)))
    if r.random() < 0.1:
        found.pop(r.choice(sorted(found)))
    if r.random() < 0.1:
        found[r.choice(("dtyp", "block", "\n", "N"))] = 1
    return found


def line(error: SchedulesError) -> str:
    said = str(error)
    assert isinstance(error, UsageError) and said and "\n" not in said and len(said) < LONG, said
    return said


def drawn(r: Random, op: Operator) -> Problem:
    while True:
        try:
            return op.problem.parse(op.problem.drawn(r))
        except ProblemError:
            continue


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.name)
def test_problems(op: Operator) -> None:
    r, refused, kept = Random(op.name), 0, []
    for _ in range(900):
        words = changed(r, drawn(r, op).to_json(), op.problem)
        try:
            kept.append(op.problem.parse(words))
        except SchedulesError as error:
            line(error)
            refused += 1
    assert refused > 200 and len(kept) > 20
    for problem in kept[:20]:  # however odd: each has a config, or a line that says why it has none
        arch = r.choice(ARCHES)
        try:
            assert op.schedule_for(problem, arch).config_for(problem, arch).check(problem, arch) is None
        except ConfigError as error:
            line(error)


SCHEDULES = [
    (op, spec, arch) for op in operators() for spec in op.schedules for arch in ARCHES if arch.kind in spec.kinds
]


@pytest.mark.parametrize(("op", "spec", "arch"), SCHEDULES, ids=lambda value: getattr(value, "name", str(value)))
def test_configs(op: Operator, spec: ScheduleSpec, arch: Arch) -> None:
    r, refused = Random(spec.name), 0
    for _ in range(6):
        problem = drawn(r, op)
        default = spec.default(problem, arch)
        for _ in range(30):
            try:
                reason = spec.config.parse(changed(r, default.to_json(), spec.config)).check(problem, arch)
            except SchedulesError as error:
                reason = line(error)
            refused += reason is not None
            assert reason is None or (reason and "\n" not in reason and len(reason) < LONG), reason
    assert refused > 60
