"""Random problems and configs: the shapes that nobody thought of.

A problem says how its fields are drawn (`Problem.drawn`).  Of a schedule, every second problem has a config drawn from
its search space, the others its default; of an operator, each has what a user gets, the rule's schedule and default; of
several operators, each problem is for every schedule that takes it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields

from schedules.core.arch import Arch
from schedules.core.errors import ProblemError, UsageError
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Config, Problem

FLOPS = 2**30  # of a problem, at most: its reference is computed in float64 on the CPU
ELEMENTS = 2**21  # of a tensor, at most
TRIES = 20000  # draws for one problem
REFUSED = 20000  # problems in a row that the schedule does not take, until it is given up
KEEP = 0.6  # chance that a field is the last problem's, so that few are refused
AFRESH = 10  # every so many problems all fields are drawn
CONFIGS = 64  # drawn from the space for a problem, until a legal one is found


@dataclass(frozen=True)
class Case:
    """What is to be built, and verified or not; without a schedule, what the operator's rule chooses."""

    problem: Problem
    schedule: str | None = None
    config: Config | None = None


def random_problem(
    operator: Operator, r: random.Random, near: Problem | None = None, *, large: bool = False
) -> Problem:
    """A problem of `operator` that fits FLOPS and ELEMENTS, or a `large` one of any size, only to be built; most fields
    of `near` are kept, if there is one.

    Raises UsageError for a field that is neither drawn nor has a default, and if none of TRIES draws is a problem.
    """
    kind = operator.problem
    drawn = kind.draws(large)
    for field in fields(kind):
        if field.init and field.name not in drawn and field.default is field.default_factory is MISSING:
            raise UsageError(
                f"{kind.__name__}.{field.name} has no default, and no draw for random problems; "
                f"add one to {kind.__name__}.draws"
            )
    why = ""
    for _ in range(TRIES):
        values = kind.drawn(r, large)
        if near:
            values |= {name: getattr(near, name) for name in values if r.random() < KEEP}
        try:
            problem = kind(**values)
        except ProblemError as error:
            why = str(error)
            continue
        largest = max(math.prod(argument.shape) for argument in problem.arguments())
        if large or problem.flops <= FLOPS and largest <= ELEMENTS:
            return problem
        why = f"{problem} takes more than {FLOPS} operations or {ELEMENTS} elements of a tensor"
    raise UsageError(f"none of {TRIES} draws is a problem of {operator.name} ({why}); refine {kind.__name__}.draws")


def random_config(spec: ScheduleSpec, problem: Problem, arch: Arch, r: random.Random) -> Config | None:
    """A legal config from the search space, or None if CONFIGS draws found none."""
    space = spec.numbered_space(problem, arch)
    drawn = (space[number] for number in r.sample(range(len(space)), min(CONFIGS, len(space))))
    return next((config for config in drawn if config.check(problem, arch) is None), None)


def rule_cases(operators: Sequence[Operator], seed: int = 0) -> Iterator[Case]:
    """Large problems of each of `operators` in turn, without end, the same for the same `seed`."""
    drawing = [(operator, random.Random(f"{operator.name} {seed}")) for operator in operators]
    while True:
        for operator, r in drawing:
            yield Case(random_problem(operator, r, large=True))


def all_cases(operators: Sequence[Operator], arch: Arch, seed: int = 0) -> Iterator[Case]:
    """A problem of each of `operators` in turn, for every schedule that takes it on `arch`, without end; every second
    turn has configs drawn."""
    drawing = [(operator, random.Random(f"{operator.name} {arch} {seed}")) for operator in operators]
    for turn in itertools.count():
        for operator, r in drawing:
            problem = random_problem(operator, r)
            for spec in operator.schedules:
                if spec.serves(problem, arch):
                    config = random_config(spec, problem, arch, r) if turn % 2 else None
                    yield Case(problem, spec.name, config or spec.default(problem, arch))


def cases(operator: Operator, spec: ScheduleSpec, arch: Arch, seed: int = 0, *, large: bool = False) -> Iterator[Case]:
    """Cases of a schedule without end, the same for the same `seed`; of `large` problems, only to be built.

    Raises UsageError if the schedule takes none of REFUSED problems in a row.
    """
    spec.require_kind(arch)
    r = random.Random(f"{operator.name} {spec.name} {seed}")
    refused = count = 0
    last: Problem | None = None
    while refused < REFUSED:
        problem = random_problem(operator, r, last if refused or count % AFRESH else None, large=large)
        config = random_config(spec, problem, arch, r) if count % 2 else None
        config = config or spec.default(problem, arch)
        if config.check(problem, arch) is None:
            refused, count, last = 0, count + 1, problem
            yield Case(problem, spec.name, config)
        else:
            refused += 1
    raise UsageError(f"{spec.name} takes none of {REFUSED} random problems of {operator.name} on {arch}")
