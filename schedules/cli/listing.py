"""``schedules list``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, table
from schedules.core.arch import ARCHES
from schedules.core.presets import planned, presets
from schedules.core.registry import operators


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def collect() -> dict[str, Any]:
    """Operators with their schedules, presets and targets, as plain data."""
    found: list[dict[str, Any]] = [
        {
            "name": op.name,
            "summary": op.summary,
            "available": True,
            "dtypes": list(op.problem.dtypes),
            "schedules": [
                {
                    "name": s.name,
                    "summary": s.summary,
                    "kinds": list(s.kinds),
                    "opt_in": s.opt_in,
                    "language": s.language,
                    "tirx": asdict(s.tirx) if s.tirx else None,
                }
                for s in op.schedules
            ],
        }
        for op in operators()
    ]
    found += [{"name": name, "summary": "planned", "available": False, "schedules": []} for name in planned()]
    named = [
        {"name": p.name, "operator": p.operator, "fields": dict(p.fields), "available": p.available}
        for p in presets().values()
    ]
    return {"operators": found, "presets": named, "targets": list(ARCHES)}


def run(args: argparse.Namespace) -> int:
    found = collect()
    if args.json:
        emit_json(found)
        return 0
    table(("operator", "what it computes"), [(op["name"], op["summary"]) for op in found["operators"]])
    print()
    schedules = [
        (op["name"], s["name"], s["language"], " ".join(s["kinds"]), s["summary"])
        for op in found["operators"]
        for s in op["schedules"]
    ]
    table(("operator", "schedule", "written in", "targets", "how"), schedules)
    print()
    table(("preset", "operator", "problem"), [_preset_row(p) for p in found["presets"]])
    print(f"\ntargets: {' '.join(found['targets'])} llvm:<cpu>")
    return 0


def _preset_row(preset: dict[str, Any]) -> tuple[str, str, str]:
    owner = preset["operator"] + ("" if preset["available"] else " (planned)")
    return preset["name"], owner, " ".join(f"{name}={value}" for name, value in preset["fields"].items())
