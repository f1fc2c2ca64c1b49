"""Random problems and configs of a schedule: the shapes that nobody thought of.

Extents are drawn evenly over their logarithm, so that small and odd ones are as likely as large ones; every other
number of channels is a multiple of 8, 32 or 64, which most schedules want.  Every second problem has a config drawn
from the schedule's search space, the others its default.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import ProblemError, UsageError
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.problem import Config, Problem

FLOPS = 2**30  # of a problem, at most: its reference is computed in float64 on the CPU
ELEMENTS = 2**21  # of a tensor, at most
REFUSED = 20000  # problems in a row that the schedule does not take, until it is given up
KEPT = 0.6  # of the fields of the last problem, so that few are refused; every TENTH is drawn anew
TENTH = 10
CONFIGS = 64  # drawn from the space for a problem, until a legal one is found

Draw = Callable[[random.Random, type[Problem]], Any]


@dataclass(frozen=True)
class Case:
    """What is to be built and verified."""

    problem: Problem
    config: Config


def _up_to(most: int) -> Draw:
    return lambda r, _: round(math.exp(r.uniform(0, math.log(most + 0.49))))


def _channels(r: random.Random, kind: type[Problem]) -> int:
    step = r.choice((1, 8, 32, 64))
    return step * _up_to(300 // step)(r, kind)


def _one_of(*values: Any) -> Draw:
    return lambda r, _: r.choice(values)


def _pair(draw: Draw) -> Draw:
    return lambda r, kind: (draw(r, kind), draw(r, kind))


def _of_class(name: str) -> Draw:
    return lambda r, kind: r.choice(getattr(kind, name))


# by field; fields that are not here keep their defaults
DRAWS: dict[str, Draw] = {
    "n": lambda r, kind: r.choice((1, 1, 8, 32)) * _up_to(3)(r, kind),
    "h": _up_to(48),
    "w": lambda r, kind: r.choice((1, 1, 8)) * _up_to(40)(r, kind),
    "ci": _channels,
    "co": _channels,
    "kh": _one_of(1, 1, 2, 3, 3, 4, 5, 7),
    "kw": _one_of(1, 1, 2, 3, 3, 4, 5, 7),
    "stride": _pair(_one_of(1, 1, 1, 2, 3)),
    "pad": _pair(_one_of(0, 0, 1, 1, 2, 3)),
    "dilation": _pair(_one_of(1, 1, 1, 2, 3)),
    "dtype": _of_class("dtypes"),
    "out_dtype": _of_class("out_dtypes"),
    "alpha": _one_of(2.0**-11, 1.0),
    "beta": _one_of(2.0**-11, 1.0),
    "bias": _one_of(False, True),
    "residual": _one_of(False, True),
    "activation": _of_class("activations"),
    "filter_layout": _of_class("filter_layouts"),
    "rows": _up_to(300),
    "cols": _up_to(70000),
    "function": _of_class("functions"),
    "scale": _one_of(1.0, 1.0, 0.125, -0.5),
    "mask": _of_class("masks"),
    "keep": _one_of(1.0, 1.0, 0.8),
}


def random_problem(operator: Operator, r: random.Random, near: Problem | None = None) -> Problem:
    """A problem of `operator` that fits FLOPS and ELEMENTS; most fields of `near` are kept, if there is one."""
    kind = operator.problem
    while True:
        words = {f.name: DRAWS[f.name](r, kind) for f in fields(kind) if f.name in DRAWS}
        if near:
            words |= {name: getattr(near, name) for name in words if r.random() < KEPT}
        try:
            problem = kind(**words)
        except ProblemError:
            continue
        largest = max(math.prod(argument.shape) for argument in problem.arguments())
        if problem.flops <= FLOPS and largest <= ELEMENTS:
            return problem


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
        problem = random_problem(operator, r, last if refused or count % TENTH else None)
        config = random_config(spec, problem, arch, r) if count % 2 else None
        config = config or spec.default(problem, arch)
        if config.check(problem, arch) is None:
            refused, count, last = 0, count + 1, problem
            yield Case(problem, config)
        else:
            refused += 1
    raise UsageError(f"{spec.name} takes none of {REFUSED} random problems of {operator.name} on {arch}")
