"""What a problem is built with where no record says better: whoever asks, the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from schedules.core.arch import Arch
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator_of
from schedules.predict.rank import ranked


def started(
    problem: Problem, arch: Arch, schedule: str | None = None, config: Config | Mapping[str, Any] | None = None
) -> tuple[ScheduleSpec, Config]:
    """The schedule (`schedule`, if it is named) and a legal config for `problem`.

    `config` is taken as it is, or says fields (name to value or text) that the config must have: then it is the one
    predicted to be fastest that is legal with them, or the schedule's default with them where none is or nothing is
    predicted.
    Raises ConfigError, UnknownNameError.
    """
    op = operator_of(problem)
    if schedule:
        op.schedule(schedule).require_kind(arch)
        op.schedule(schedule).require_shape(problem)
    given = {} if config is None or isinstance(config, Config) else config
    complete = schedule and {field.name for field in fields(op.schedule(schedule).config) if field.init} <= given.keys()
    found = () if schedule and (complete or isinstance(config, Config)) else ranked(problem, arch, schedule)
    if isinstance(config, Config):
        of_kind = (each.schedule for each in found if type(each.config) is type(config))
        spec = op.schedule_for(problem, arch, schedule or next(of_kind, None))
        return spec, spec.config_for(problem, arch, config)
    having = [each for each in found if given.keys() <= vars(each.config).keys()]
    for each in having:
        changed = type(each.config).parse({**each.config.to_json(), **given}) if given else each.config
        if changed.check(problem, arch) is None:
            return op.schedule(each.schedule), changed
    spec = op.schedule_for(problem, arch, schedule or (found[0].schedule if found else None))
    return spec, spec.config_for(problem, arch, dict(given))
