"""Kernels by name: what `schedules.load` does."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from schedules.build.builder import Built, build, operator_of
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import UsageError
from schedules.core.frames import apart
from schedules.core.presets import operator_named, preset, resolve
from schedules.core.problem import Config, Problem
from schedules.core.text import warn_once
from schedules.measure.choice import Choice, choose, for_device
from schedules.predict.start import started

logger = logging.getLogger("schedules")


@dataclass(frozen=True)
class Kernel:
    """A built kernel, and why it was built with this schedule and config."""

    built: Built
    choice: Choice

    def __call__(self, *tensors: Any) -> None:
        """Run on tensors of the target's device, in the order of ``problem.arguments()``; outputs are written in place.

        Raises ArgumentError before anything runs if a tensor does not fit.
        """
        self.built(*tensors)

    def __str__(self) -> str:
        made = self.built
        return f"{made.operator.name} {made.problem} for {made.arch}: {made.schedule.name} {made.config}; {self.choice}"


def load_kernel(
    name: str,
    problem: Mapping[str, Any] | Problem | str | None,
    target: str,
    schedule: str | None,
    config: Mapping[str, Any] | None,
    device: str | None,
    logs: Sequence[str | Path] | None,
) -> Kernel:
    """As `schedules.load` says."""
    named = problem_named(name, problem)
    arch = for_device(parse_arch(target), device, operator_of(named).name, logs)
    if config is not None:
        spec, given = started(named, arch, schedule, config)
        chosen = Choice(named, spec.name, given, None, given=True)
    else:
        chosen = choose(named, arch, schedule, folders=logs, device=device)
    chosen = warned(chosen)
    kernel = Kernel(_built(named, arch, chosen.schedule, chosen.config), chosen)
    logger.info("%s", kernel)
    return kernel


def warned(chosen: Choice) -> Choice:
    """`chosen` without what it says of journals that it could not use, which is logged, each text once."""
    for text in chosen.warnings:
        warn_once(text)
    return replace(chosen, unused=(), passed_over="")


def problem_named(name: str, problem: Mapping[str, Any] | Problem | str | None) -> Problem:
    """The problem that an operator's or preset's name and fields, a Problem or a preset's name stand for.

    Raises UsageError and its kinds.
    """
    if isinstance(problem, str):
        problem = preset(problem).problem()
    if isinstance(problem, Problem):
        owner = operator_named(name)
        if owner is not operator_of(problem):
            raise UsageError(f"{problem} is a problem of {operator_of(problem).name}, not of {owner.name}")
        return problem
    return resolve(name, problem or {})[1]


@cache
def _built(problem: Problem, arch: Arch, schedule: str, config: Config) -> Built:
    return apart(build, problem, arch, schedule, config)
