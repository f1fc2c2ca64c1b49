"""What the registry knows as Markdown: every operator's schedules by target and language; of one operator the schedules
in detail, and the options of its problems."""

from __future__ import annotations

import dataclasses

from benchmarks.peers.markdown import table
from schedules.core.operator import Operator, ScheduleSpec
from schedules.core.registry import operator, operators

KINDS = {"cuda": "CUDA", "rocm": "ROCm", "llvm": "CPU"}
TE, TIRX = "TE", "TIRx"


def language(spec: ScheduleSpec) -> str:
    """What the schedule is written in: TE is a definition with schedule primitives, TIRx a program of its own."""
    return str(getattr(spec, "language", TIRX if "serial" in spec.no_routes else TE))


def matrix() -> str:
    """Operator x target x language: the names of the schedules; a star marks those that are used only by name."""
    every = [(op, spec) for op in operators() for spec in op.schedules]
    columns = [
        (kind, name)
        for kind in KINDS
        for name in (TE, TIRX)
        if any(kind in spec.kinds and language(spec) == name for _, spec in every)
    ]
    rows = (
        [f"`{op.name}`", " ".join(op.problem.dtypes), *(_names(op, kind, name) for kind, name in columns)]
        for op in operators()
    )
    return table(["operator", "dtypes", *(f"{KINDS[kind]}, {name}" for kind, name in columns)], rows)


def _names(op: Operator, kind: str, name: str) -> str:
    found = [spec for spec in op.schedules if kind in spec.kinds and language(spec) == name]
    return ", ".join(f"`{spec.name}`{' *' if spec.opt_in else ''}" for spec in found)


def details(name: str) -> str:
    """The schedules of the operator `name`, a row each.  Raises UnknownNameError."""
    rows = (
        [
            f"`{spec.name}`{' *' if spec.opt_in else ''}",
            ", ".join(KINDS[kind] for kind in spec.kinds),
            language(spec),
            spec.summary,
        ]
        for spec in operator(name).schedules
    )
    return table(["schedule", "targets", "language", "how"], rows)


def options(name: str) -> str:
    """The fields of the operator's problems that have a default, and the values that the class lists (`dtypes` for
    `dtype`, words for a number).  Raises UnknownNameError."""
    problem = operator(name).problem
    rows = (
        [f"`{field.name}`", _text(field.default), ", ".join(getattr(problem, f"{field.name}s", ()))]
        for field in dataclasses.fields(problem)
        if field.init and field.default is not dataclasses.MISSING
    )
    return table(["field", "default", "values"], rows)


def _text(value: object) -> str:
    """A default as a person types it."""
    if isinstance(value, tuple):
        return ",".join(dict.fromkeys(map(str, value)))
    return str(value).lower() if isinstance(value, bool) else str(value)
