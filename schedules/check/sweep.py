"""Random problems and configs of a schedule: the shapes that nobody thought of.

A problem says how its fields are drawn (`Problem.draws`).  Every second problem has a config drawn from the schedule's
search space, the others its default.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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
    """What is to be built and verified."""

    problem: Problem
    config: Config


def random_problem(operator: Operator, r: random.Random, near: Problem | None = None) -> Problem:
    """A problem of `operator` that fits FLOPS and ELEMENTS; most fields of `near` are kept, if there is one.

    Raises UsageError for a field that is neither drawn nor has a default, and if none of TRIES draws is a problem.
    """
    kind = operator.problem
    draws = kind.draws()
    for field in fields(kind):
        if field.init and field.name not in draws and field.default is field.default_factory is MISSING:
            raise UsageError(
                f"{kind.__name__}.{field.name} has no default, and no draw for random problems; "
                f"add one to {kind.__name__}.draws"
            )
    why = ""
    for _ in range(TRIES):
        values = {f.name: draws[f.name](r) for f in fields(kind) if f.name in draws}
        if near:
            values |= {name: getattr(near, name) for name in values if r.random() < KEEP}
        try:
            problem = kind(**values)
        except ProblemError as error:
            why = str(error)
            continue
        largest = max(math.prod(argument.shape) for argument in problem.arguments())
        if problem.flops <= FLOPS and largest <= ELEMENTS:
            return problem
        why = f"{problem} takes more than {FLOPS} operations or {ELEMENTS} elements of a tensor"
    raise UsageError(f"none of {TRIES} draws is a problem of {operator.name} ({why}); refine {kind.__name__}.draws")


def random_config(spec: ScheduleSpec, problem: Problem, arch: Arch, r: random.Random) -> Config | None:
    """A legal config from the search space, or None if CONFIGS draws found none."""
    space = spec.numbered_space(problem, arch)
    drawn = (space[number] for number in r.sample(range(len(space)), min(CONFIGS, len(space))))
    return next((config for config in drawn if config.check(problem, arch) is None), None)


def cases(operator: Operator, spec: ScheduleSpec, arch: Arch, seed: int = 0) -> Iterator[Case]:
    """Cases without end, the same for the same `seed`.

    Raises UsageError if the schedule takes none of REFUSED problems in a row.
    """
    spec.require_kind(arch)
    r = random.Random(f"{operator.name} {spec.name} {seed}")
    refused = count = 0
    last: Problem | None = None
    while refused < REFUSED:
        problem = random_problem(operator, r, last if refused or count % AFRESH else None)
        config = random_config(spec, problem, arch, r) if count % 2 else None
        config = config or spec.default(problem, arch)
        if config.check(problem, arch) is None:
            refused, count, last = 0, count + 1, problem
            yield Case(problem, config)
        else:
            refused += 1
    raise UsageError(f"{spec.name} takes none of {REFUSED} random problems of {operator.name} on {arch}")
