"""``schedules list``."""

from __future__ import annotations

import argparse
from typing import Any

from schedules.arch import ARCHES
from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, table
from schedules.presets import planned, presets
from schedules.registry import operators


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def collect() -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        {
            "name": op.name,
            "summary": op.summary,
            "available": True,
            "dtypes": list(op.problem.dtypes),
            "schedules": [{"name": s.name, "summary": s.summary, "kinds": list(s.kinds)} for s in op.schedules],
        }
        for op in operators()
    ]
    found += [{"name": name, "summary": "planned", "available": False, "schedules": []} for name in planned()]
    named = [{"name": p.name, "operator": p.operator, "fields": dict(p.fields), "available": p.available} for p in presets().values()]
    return {"operators": found, "presets": named, "targets": list(ARCHES)}


def run(args: argparse.Namespace) -> int:
    found = collect()
    if args.json:
        emit_json(found)
        return 0
    table(("operator", "what it computes"), [(op["name"], op["summary"]) for op in found["operators"]])
    print()
    rows = [(op["name"], s["name"], " ".join(s["kinds"]), s["summary"]) for op in found["operators"] for s in op["schedules"]]
    table(("operator", "schedule", "targets", "how"), rows)
    print()
    rows = [
        (p["name"], p["operator"] + ("" if p["available"] else " (planned)"), " ".join(f"{k}={v}" for k, v in p["fields"].items()))
        for p in found["presets"]
    ]
    table(("preset", "operator", "problem"), rows)
    print(f"\ntargets: {' '.join(found['targets'])} llvm:<cpu>")
    return 0
