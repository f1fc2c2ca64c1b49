"""``schedules export``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from schedules.build.present import device_name
from schedules.bundle.bundle import Bundle, check_destination
from schedules.cli.arguments import add_code_object, add_json, add_sign, key_to_sign
from schedules.cli.output import emit_json, note, table
from schedules.cli.records import WHICH, add_selection, gather, one_problem, pick
from schedules.core.arch import parse_arch
from schedules.core.device import slug
from schedules.core.errors import BundleError, SchedulesError, UsageError
from schedules.core.presets import short
from schedules.measure.journal import told
from schedules.measure.lookup import summaries
from schedules.measure.records import Record

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("--out", metavar="DIR", help="the bundle's folder; with --all a folder for all of them")
    parser.add_argument("--record", metavar="WHICH", help=f"{WHICH} (default: what a build uses)")
    parser.add_argument("--all", action="store_true", help="every problem in the journals that this machine can build")
    parser.add_argument("--force", action="store_true", help="replace a bundle of something else")
    add_sign(parser)
    add_code_object(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if not args.out:
        raise UsageError("give --out DIR, the folder to write")
    if args.all and args.record:
        raise UsageError("--record chooses one record; leave out --all")
    key = key_to_sign(args)
    if args.all:
        return _all(args, key)
    if args.record:
        record = pick(args.record, args).record
        if record is None or not record.correct:
            raise UsageError(f"{args.record} was never measured to be correct; `schedules top` shows what was")
    else:
        known = one_problem(args)
        record = known.best
        if record is None:
            raise UsageError(f"nothing was correct for {known.problem}; search on: schedules tune")
    path = _export(record, Path(args.out), args.force, key, args.code_object)
    _report([(record, path)], args.json)
    return 0


def _all(args: argparse.Namespace, key: Ed25519PrivateKey | None) -> int:
    found = gather(args)
    rows = summaries(found)
    note(told([line for row in rows for line in row.refused]))
    made: list[tuple[Record, Path]] = []
    failed = 0
    for row in rows:
        arch = parse_arch(row.target)
        # code for "this CPU" is not for the one of the record
        if row.best and (arch.is_gpu or row.device == device_name(arch)):
            out = Path(args.out) / slug(row.device) / f"{row.operator}-{row.problem.key}"
            try:
                made.append((row.best, _export(row.best, out, True, key, args.code_object)))
            except Exception as error:  # whatever it is, it costs this one
                failed += 1
                kind = "" if isinstance(error, SchedulesError) else f"internal: {type(error).__name__}: "
                what = f"{row.operator} {row.problem} for {row.target} on {row.device}"
                note(f"not exported: {what}: {kind}{' '.join(str(error).split())}")
    if not (made or failed):
        raise UsageError("nothing in the journals is correct and for a target of this machine")
    _report(made, args.json)
    return 1 if failed else 0


def _export(record: Record, out: Path, force: bool, key: Ed25519PrivateKey | None, code_object: int) -> Path:
    from schedules.bundle.export import export_record, holds

    arch = parse_arch(record.target)
    try:
        same = holds(Bundle.open(out), record, arch, code_object)
    except BundleError:
        same = False
    if not same:
        check_destination(out, force=force)
    return export_record(record, arch, out, key, code_object)


def _report(made: list[tuple[Record, Path]], as_json: bool) -> None:
    if as_json:
        emit_json([{"bundle": str(path), "record": record.to_json()} for record, path in made])
        return
    rows = [
        (
            record.operator,
            short(record.operator, record.problem),
            record.target,
            f"{record.us:.2f}",
            record.schedule,
            record.config,
            path,
        )
        for record, path in made
    ]
    table(("operator", "problem", "target", "us", "schedule", "config", "bundle"), rows)
