"""A report's folder.

index.html           the page, which needs no other file
kernels/*.html       a page for each kernel that was built, or read from a bundle
plots/*.png          the plots of devices
tables/*.csv, .json  its tables
manifest.json        when it was made, with which versions, what could not be read, and the files of the report
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schedules.core.errors import UsageError
from schedules.core.files import unwritable
from schedules.core.text import printable
from schedules.show.report.make import Report
from schedules.show.report.page import kernel_pages, page_of
from schedules.show.report.tables import Row, cell, tables

MANIFEST = "manifest.json"
PAGE = "index.html"


def check_destination(out: str | Path) -> None:
    """Raise UsageError unless a report may be written to `out`: a new or empty folder, or one with an older report."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out needs a folder")
    if out.is_dir() and any(out.iterdir()) and _files_of(out) is None:
        raise UsageError(f"{out} is not empty and holds no report; choose another --out")


def write_report(report: Report, out: str | Path) -> list[Path]:
    """Write `report` into the folder `out`, in place of an older one, whose files go.  Returns the files.

    All is written beside `out` before anything in it changes.  Raises UsageError if `out` holds something else or
    cannot be written, MachineError if there is no room.
    """
    out = Path(out)
    check_destination(out)
    made = dict(_contents(report))
    manifest = {"date": report.date, "versions": report.versions, "notes": report.notes, "files": sorted(made)}
    made[MANIFEST] = (json.dumps(manifest, indent=1) + "\n").encode()
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name[:40]}.") as beside:
            for name, content in made.items():
                (Path(beside) / name).parent.mkdir(exist_ok=True)
                (Path(beside) / name).write_bytes(content)
            for name in _files_of(out) or ():
                if name not in made:
                    (out / name).unlink(missing_ok=True)
            for name in sorted(made, key=lambda name: (name == PAGE, name)):  # the page last: what it is of is there
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(beside) / name, out / name)
    except OSError as error:
        raise unwritable(out, error, "choose another --out") from error
    return [out / name for name in sorted(made)]


def _contents(report: Report) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file."""
    for device in report.devices:
        yield from ((f"plots/{plot.name}.png", plot.png) for plot in device.plots)
    for name, rows in tables(report).items():
        yield f"tables/{name}.json", _json(rows).encode()
        yield f"tables/{name}.csv", printable(_csv(rows), keep="\n\t").encode()
    for name, text in (*kernel_pages(report), (PAGE, page_of(report))):
        yield name, printable(text, keep="\n\t").encode()


def _json(rows: list[Row]) -> str:
    """A list with a row to a line."""
    return "[" + ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows) + "]\n"


def _csv(rows: list[Row]) -> str:
    """RFC 4180 with a header; nothing at all where there are no rows."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _files_of(out: Path) -> list[str] | None:
    """The files of the report in `out`; None if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((out / MANIFEST).read_text())
        names = [str(name) for name in found["files"]]
        if all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in names):
            return names
    return None
