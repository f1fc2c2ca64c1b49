"""``schedules top``."""

from __future__ import annotations

import argparse

from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, table
from schedules.cli.records import add_selection, one_problem
from schedules.core.errors import UsageError
from schedules.measure.lookup import default_record
from schedules.measure.records import speedup
from schedules.tune.progress import rate_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("-n", "--count", type=int, default=10, metavar="N", help="how many (default: 10)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.count < 1:
        raise UsageError(f"--count {args.count} must be at least 1")
    known = one_problem(args)
    default = default_record([item.record for item in known.everything], known.problem, known.arch)
    shown = known.ranked[: args.count]
    if args.json:
        emit_json(
            [
                {"rank": rank, "place": item.place, "speedup": speedup(item.record, default)} | item.record.to_json()
                for rank, item in enumerate(shown, 1)
            ]
        )
        return 0
    if not shown:
        print(f"{len(known.everything)} candidates were tried, none was correct")
        return 0
    rows = []
    for rank, item in enumerate(shown, 1):
        record = item.record
        over = f"{ratio:.2f}" if (ratio := speedup(record, default)) else ""
        times = (f"{record.us:.2f}", rate_text(record), over)
        rows.append((f"#{rank}", *times, record.schedule, str(record.config), record.date[:10], item.place))
    table(("rank", "us", "rate", "x default", "schedule", "config", "date", "record"), rows)
    return 0
