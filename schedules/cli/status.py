"""``schedules status``."""

from __future__ import annotations

import argparse
from typing import Any

from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, note, table
from schedules.cli.records import add_selection, gather
from schedules.core.presets import short
from schedules.measure.journal import told
from schedules.measure.lookup import Summary, summaries

TIMES = ("default us", "best us", "speedup")
HEADERS = ("operator", "problem", "target", "device", "trials", "failed", *TIMES, "last", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, "only problems of this operator or preset")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    found = gather(args)
    rows = summaries(found)
    note(told([line for row in rows for line in row.refused]))
    if args.json:
        emit_json([_as_json(row) for row in rows])
        return 0
    if not rows:
        print("nothing was measured yet" + (f" of {' '.join(args.words)}" if args.words else ""))
        return 0
    table(HEADERS, [_row(row) for row in rows])
    return 0


def _row(row: Summary) -> tuple[str, ...]:
    failed = {name: count for name, count in row.outcomes.items() if name != "correct"}
    return (
        row.operator,
        short(row.operator, row.problem),
        row.target,
        row.device,
        str(row.trials),
        ", ".join(f"{count} {name}" for name, count in failed.items()),
        f"{row.default.us:.2f}" if row.default else "",
        f"{row.best.us:.2f}" if row.best else "",
        f"{row.speedup:.2f}" if row.speedup else "",
        row.last[:16].replace("T", " "),
        "running" if row.running else "",
    )


def _as_json(row: Summary) -> dict[str, Any]:
    return {
        "operator": row.operator,
        "problem": row.problem.to_json(),
        "target": row.target,
        "device": row.device,
        "trials": row.trials,
        "outcomes": dict(row.outcomes),
        "default_us": row.default.us if row.default else None,
        "best_us": row.best.us if row.best else None,
        "speedup": row.speedup,
        "schedule": row.best.schedule if row.best else None,
        "config": row.best.config.to_json() if row.best else None,
        "last": row.last,
        "older": row.older,
        "running": row.running,
        "searches": [
            {**campaign.search.to_json(), "done": campaign.trials, "ended": campaign.ended} for campaign in row.searches
        ],
    }
