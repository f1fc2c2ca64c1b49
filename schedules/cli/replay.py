"""``schedules replay``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from schedules.build.present import device_name
from schedules.cli.arguments import add_json, positive
from schedules.cli.output import emit_json, fields
from schedules.cli.records import WHICH, add_selection, one_problem, pick
from schedules.core.arch import parse_arch
from schedules.core.errors import UsageError
from schedules.measure.journal import append
from schedules.measure.records import Record, record

if TYPE_CHECKING:
    from schedules.measure.timer import Measurement

CLOSE = 0.03  # times that differ by less are the same, whatever their spread
SEEDS = (0, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, "a problem; FILE:LINE alone is enough")
    parser.add_argument("--record", metavar="WHICH", help=f"{WHICH} (default: what a build uses)")
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long to measure (default: 0.5)")
    parser.add_argument("--log", metavar="DIR", help="append the new time to DIR/<device>/<operator>.jsonl")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    positive("--seconds", args.seconds)
    old, place = _record(args)
    from schedules.build.builder import build
    from schedules.check.verify import verify_function
    from schedules.measure.timer import measure

    arch = parse_arch(old.target)
    here = device_name(arch)
    if here != old.device:
        raise UsageError(f"the record is of {old.device}, here is {here or f'no device for {arch}'}; replay it there")
    built = build(old.problem, arch, old.schedule, old.config)
    checks = verify_function(old.problem, arch, built, SEEDS, old.schedule, old.config)
    error, passed = max(check.error for check in checks), all(check.passed for check in checks)
    new = measure(built, seconds=args.seconds) if passed else None
    verdict = judged(old, new) if new else "WRONG: " + next(check.detail for check in checks if not check.passed)
    same = None if old.program is None else old.program == built.program
    true = passed and verdict != "slower"
    log = append(args.log, record(built, new, error, more={"replay_of": place})) if args.log and new else None
    if args.json:
        emit_json(
            {
                "record": old.to_json(),
                "place": place,
                "still_true": true,
                "verdict": verdict,
                "passed": passed,
                "error": error,
                "old_us": old.us,
                "new_us": new and new.median_us,
                "new_p10_us": new and new.p10_us,
                "new_p90_us": new and new.p90_us,
                "same_program": same,
                "log": log and str(log),
            }
        )
        return 0 if true else 1
    fields(
        {
            "record": f"{place}, {old.date[:10]}",
            "problem": f"{old.operator} {old.problem}, {arch} on {old.device}",
            "schedule": f"{old.schedule}: {old.config}",
            "verified": f"{'yes' if passed else 'NO'}, worst error {error:.3g} of what is allowed",
            "then": _spread(old.us, old.p10_us, old.p90_us),
            "now": new and _spread(new.median_us, new.p10_us, new.p90_us),
            "verdict": verdict,
            "program": {True: "the same", False: "another than then", None: "not recorded then"}[same],
            "appended": log,
        }
    )
    return 0 if true else 1


def _record(args: argparse.Namespace) -> tuple[Record, str]:
    """The record that is meant, and its place."""
    words, which = args.words, args.record
    if not which and len(words) == 1 and ":" in words[0]:
        words, which = [], words[0]
    if which:
        picked = pick(which, args, words)
        if picked.record is None or not picked.record.correct:
            raise UsageError(f"{which} was never measured to be correct; `schedules top` shows what was")
        return picked.record, picked.place
    known = one_problem(args)
    if known.best is None:
        raise UsageError(f"nothing was correct for {known.problem}; search on: schedules tune")
    return known.best, next(item.place for item in known.everything if item.record is known.best)


def judged(old: Record, new: Measurement) -> str:
    """``within the noise``, ``slower`` or ``faster``: the spreads of the two times overlap, or they do not."""
    change = new.median_us / old.us - 1
    overlap = (old.p10_us or old.us) <= new.p90_us and new.p10_us <= (old.p90_us or old.us)
    if abs(change) <= CLOSE or overlap:
        return "within the noise"
    return "slower" if change > 0 else "faster"


def _spread(us: float, p10: float | None, p90: float | None) -> str:
    return f"{us:.2f} us" + (f" ({p10:.2f} to {p90:.2f})" if p10 is not None and p90 is not None else "")
