"""``schedules cache``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import datetime

from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, fields, table
from schedules.core.errors import UsageError
from schedules.core.files import unwritable
from schedules.store.disk import Disk, Entry, disk

DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["clear"], help="remove them; without it they are counted")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="only what was not used for so long")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.older_than is not None and not args.older_than >= 0:
        raise UsageError(f"--older-than {args.older_than:g} must be at least 0")
    if args.older_than is not None and args.action is None:
        raise UsageError("--older-than says what to remove; write `schedules cache clear --older-than DAYS`")
    here = disk()
    if args.action == "clear":
        return _clear(here, (args.older_than or 0.0) * DAY, args.json)
    _show(here, list(here.entries()), args.json)
    return 0


def _clear(disk: Disk, unused: float, as_json: bool) -> int:
    before = _kernels(disk.entries())
    try:
        nbytes = disk.clear(unused)
    except OSError as error:
        raise unwritable(disk.folder, error, "make it writable, or remove it") from error
    left = _kernels(disk.entries())
    if as_json:
        emit_json({"folder": str(disk.folder), "removed": before - left, "left": left, "bytes": nbytes})
    else:
        print(f"{disk.folder}: {_size(nbytes)} removed; kernels: {before - left} removed, {left} left")
    return 0


def _show(disk: Disk, found: list[Entry], as_json: bool) -> None:
    kinds: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        if "operator" in entry.about:
            kinds.setdefault((entry.about["operator"], entry.about["arch"]), []).append(entry)
    total, trouble = sum(entry.nbytes for entry in found), disk.trouble()
    rows = [
        (operator, target, len(entries), sum(each.nbytes for each in entries), max(each.used for each in entries))
        for (operator, target), entries in sorted(kinds.items())
    ]
    if as_json:
        names = ("operator", "target", "kernels", "bytes", "used")
        emit_json(
            {
                "folder": str(disk.folder),
                "trouble": trouble,
                "kernels": _kernels(found),
                "bytes": total,
                "limit": disk.limit,
                "operators": [dict(zip(names, row, strict=True)) for row in rows],
            }
        )
        return
    fields(
        {
            "folder": disk.folder,
            "not used": trouble or None,
            "kernels": _kernels(found),
            "size": f"{_size(total)} of {_size(disk.limit)}",
        }
    )
    if rows:
        print()
        shown = [(*row[:3], _size(row[3]), _day(row[4])) for row in rows]
        table(("operator", "target", "kernels", "size", "last used"), shown)


def _kernels(entries: Iterable[Entry]) -> int:
    """How many there are, besides choices."""
    return sum("operator" in entry.about for entry in entries)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
