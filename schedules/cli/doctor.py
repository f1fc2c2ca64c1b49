"""``schedules doctor``."""

from __future__ import annotations

import argparse
import dataclasses

from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, table
from schedules.show.doctor import examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.json:
        emit_json(dataclasses.asdict(report))
        return 0
    table(
        ("part", "found", "serves", "to get it"),
        [(p.name, p.found or "MISSING", p.serves, "" if p.ok else p.remedy) for p in report.parts],
    )
    print()
    table(("device", "kind", "capability"), [(d.name, d.kind, d.capability) for d in report.devices])
    print()
    table(
        ("target", "build", "verify", "run", "defaults are for", "note"),
        [(t.target, _yes(t.build), ", ".join(t.verify) or "no", _yes(t.run), t.device, t.note) for t in report.targets],
    )
    return 0


def _yes(value: bool) -> str:
    return "yes" if value else "no"
