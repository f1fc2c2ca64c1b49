"""``schedules show``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from schedules.build.inspect import definition_text
from schedules.cli.arguments import Job, add_json, add_problem, job, subject
from schedules.cli.output import code, emit_json, fields, table
from schedules.core.operator import Operator
from schedules.core.presets import operator_named, presets
from schedules.core.problem import Argument
from schedules.predict.rank import ranked

RUNNERS_UP = 6  # configs of the ranking that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser, "an operator, and its fields for one problem; or a preset")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    name = subject(args)
    general = len(args.words) == 1 and name not in presets()
    found = about_operator(operator_named(name)) if general else about_job(job(args))
    if args.json:
        emit_json(found)
        return 0
    arguments, schedules, definition = found.pop("arguments", None), found.pop("schedules"), found.pop("definition")
    predicted = found.pop("predicted", [])
    fields({name: _text(value) for name, value in found.items()})
    if arguments:
        print()
        table(("argument", "shape", "dtype", "", "run-time axis"), [_row(Argument(**a)) for a in arguments])
    if predicted:
        print()
        times = [(f"{p['us']:.1f}", p["limit"], p["schedule"], _text(p["config"])) for p in predicted]
        table(("predicted us", "limited by", "schedule", "config"), times)
    print()
    rows = [(s["name"], s["language"], " ".join(s["kinds"]), _text(s["config"]), s["summary"]) for s in schedules]
    table(("schedule", "written in", "targets", "config", "how"), rows)
    if programs := [(s["name"], " ".join(s["tirx"]["siblings"]), s["tirx"]["reason"]) for s in schedules if s["tirx"]]:
        print()
        table(("in TIRx", "TE siblings", "why"), programs)
    print()
    code(definition, "python")
    return 0


def about_operator(op: Operator) -> dict[str, Any]:
    """An operator without a problem; its definition is the source that writes the tensor expression."""
    known = [f for f in dataclasses.fields(op.problem) if f.init]
    return {
        "operator": op.name,
        "summary": op.summary,
        "fields": {f.name: "required" if f.default is dataclasses.MISSING else f.default for f in known},
        "dtypes": list(op.problem.dtypes),
        "schedules": _schedules(op),
        "definition": definition_source(op.definition),
    }


def definition_source(definition: Callable[..., Any]) -> str:
    """The source of the function that writes an operator's tensor expression, and of the graphs that it shares."""
    called = (definition.__globals__.get(name) for name in definition.__code__.co_names)
    shared = [f for f in called if inspect.isfunction(f) and f.__module__.startswith("schedules.definitions.")]
    return "\n\n".join([inspect.getsource(definition), *map(inspect.getsource, shared)])


def about_job(work: Job) -> dict[str, Any]:
    """One problem: what the chosen schedule would be built with."""
    space = list(work.spec.space(work.problem, work.arch))
    legal = sum(config.check(work.problem, work.arch) is None for config in space)
    return {
        "operator": work.operator.name,
        "summary": work.operator.summary,
        "problem": work.problem.to_json(),
        "key": work.problem.key,
        "target": str(work.arch),
        **({"device": str(work.arch.device)} if work.arch.is_gpu else {}),
        "schedule": work.spec.name,
        "config": work.config.to_json(),
        "config_space": len(space),
        "config_space_legal": legal,
        "flops": work.problem.flops,
        "min_bytes": work.problem.min_bytes,
        "predicted": [
            {**dataclasses.asdict(each), "config": each.config.to_json(), "parts": dict(each.parts)}
            for each in ranked(work.problem, work.arch)[:RUNNERS_UP]
        ],
        "arguments": [dataclasses.asdict(argument) for argument in work.problem.arguments()],
        "schedules": _schedules(work.operator),
        "definition": definition_text(work.operator, work.problem),
    }


def _schedules(op: Operator) -> list[dict[str, Any]]:
    return [
        {
            "name": s.name,
            "summary": s.summary,
            "kinds": list(s.kinds),
            "opt_in": s.opt_in,
            "language": s.language,
            "tirx": dataclasses.asdict(s.tirx) if s.tirx else None,
            "config": [f.name for f in dataclasses.fields(s.config) if f.init],
        }
        for s in op.schedules
    ]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_text(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _row(argument: Argument) -> tuple[str, ...]:
    axis = "" if argument.runtime_axis is None else str(argument.runtime_axis)
    if argument.ranged_axis is not None:
        axis += f" {argument.ranged_axis}: {argument.least} to {argument.shape[argument.ranged_axis]}"
    return argument.name, str(tuple(argument.shape)), argument.dtype, "output" if argument.output else "input", axis
