"""Named problems, read from presets.toml."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.operator import Operator
from schedules.core.problem import Problem
from schedules.core.registry import operator, operator_modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Preset:
    """A named problem: fields of the problem of `operator`."""

    name: str
    operator: str
    fields: Mapping[str, Any]

    @property
    def available(self) -> bool:
        """Whether this version has the operator."""
        return self.operator in operator_modules()

    def require_available(self) -> None:
        """Raise UsageError if this version does not have the operator."""
        if not self.available:
            raise UsageError(
                f"preset {self.name} is a problem of {self.operator}, which is planned and not in this version; "
                f"`schedules list` shows what is"
            )

    def problem(self, overrides: Mapping[str, Any] | None = None) -> Problem:
        """The problem, with `overrides` in place of its own fields.  Raises the UsageError that fits."""
        self.require_available()
        return operator(self.operator).problem.parse({**self.fields, **(overrides or {})})


@lru_cache
def presets() -> dict[str, Preset]:
    """All presets by name, in the order of the file."""
    return parse_presets(resources.files("schedules.core").joinpath("presets.toml").read_text())


def parse_presets(text: str) -> dict[str, Preset]:
    """Presets from TOML with one table for each operator.  Raises UsageError for a name that stands twice."""
    by_name: dict[str, Preset] = {}
    for owner, problems in tomllib.loads(text).items():
        for name, fields in problems.items():
            if name in by_name or name in operator_modules():
                raise UsageError(f"preset {name} of {owner} has the name of another preset or operator; rename it")
            by_name[name] = Preset(name, owner, fields)
    return by_name


def preset(name: str) -> Preset:
    """The preset called `name`.  Raises UnknownNameError with the nearest name."""
    if name not in presets():
        raise UnknownNameError("preset", name, presets())
    return presets()[name]


def resolve(name: str, words: Mapping[str, Any]) -> tuple[Operator, Problem]:
    """The problem of the operator or preset `name` with fields `words`, and its operator.

    Raises UnknownNameError, UsageError or ProblemError.
    """
    owner = operator_named(name)
    return owner, preset(name).problem(words) if name in presets() else owner.problem.parse(words)


def operator_named(name: str) -> Operator:
    """The operator called `name`, or that of the preset `name`.  Raises UnknownNameError, UsageError."""
    if name in operator_modules():
        return operator(name)
    if name in presets():
        preset(name).require_available()
        return operator(preset(name).operator)
    if name in planned():
        raise UsageError(f"operator {name} is planned and not in this version; `schedules list` shows what is")
    unknown = UnknownNameError("operator or preset", name, [*operator_modules(), *presets()])
    if unknown.nearest is None:  # all the names there are would fill the screen
        raise UsageError(f"unknown operator or preset {name!r}; `schedules list` shows them")
    raise unknown


def planned() -> list[str]:
    """Operators that have presets and are not in this version."""
    return sorted({p.operator for p in presets().values() if not p.available})


def short(operator: str, problem: Problem) -> str:
    """A problem for a table: the preset's name if it is one, else the fields that are not at their defaults."""
    if name := _names().get((operator, problem)):
        return name
    defaults = {field.name: field.default for field in dataclasses.fields(problem)}
    given = [name for name in problem.to_json() if getattr(problem, name) != defaults[name]]
    texts = dict(zip(problem.to_json(), str(problem).split(" "), strict=True))
    return " ".join(texts[name] for name in given)


@lru_cache
def _names() -> dict[tuple[str, Problem], str]:
    """The first preset of each problem."""
    names: dict[tuple[str, Problem], str] = {}
    for preset in presets().values():
        if preset.available:
            names.setdefault((preset.operator, preset.problem()), preset.name)
    return names
