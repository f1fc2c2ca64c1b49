"""``schedules report``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedules.cli.arguments import add_json
from schedules.cli.output import emit_json, note
from schedules.cli.records import add_selection, folders_of, meant, selector
from schedules.core.arch import parse_arch
from schedules.core.errors import UsageError

if TYPE_CHECKING:
    from schedules.show.report.data import Comparison

OUT = "out/report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, "only problems of this operator or preset")
    parser.add_argument("--out", metavar="DIR", default=OUT, help=f"the folder to write (default: {OUT})")
    parser.add_argument(
        "--bundle",
        action="append",
        default=[],
        metavar="DIR",
        help="a bundle, or a folder that holds bundles; may be repeated",
    )
    parser.add_argument(
        "--source", action="store_true", help="build the best kernels: their resources and sources, a page for each"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    folders, wanted = folders_of(args), selector(args)
    from schedules.measure.journal import journals, read_journals
    from schedules.measure.lookup import journal_files
    from schedules.show.report import make_report, write_report
    from schedules.show.report.kernels import open_bundles
    from schedules.show.report.plots import require_matplotlib
    from schedules.show.report.write import check_destination

    require_matplotlib()
    check_destination(args.out)
    bundles = open_bundles(args.bundle)
    if bundles and not args.journal and not any(any(journals(folder)) for folder in folders):
        files: list[Path] = []
    else:
        files = journal_files(folders, args.journal)
    records, bad = read_journals(files)
    found = [item for item in records if meant(item.record, wanted)]
    if not (found or bundles):
        which = f" of {' '.join(args.words)}" if args.words else ""
        raise UsageError(f"nothing was measured yet{which}; `schedules tune` and `schedules bench --log` do")

    def chosen(comparison: Comparison) -> Comparison:
        # a comparison does not name its target: the device's own are meant
        target = str(parse_arch(args.target)) if args.target else ""
        fits = (case for case in comparison.cases if wanted(case.operator, case.problem, target, case.device))
        return replace(comparison, cases=tuple(fits))

    report = make_report(
        found,
        bad=bad,
        folders=sorted({file.parent for file in files}),
        bundles=bundles,
        sources=args.source,
        meant=chosen,
        tell=_tell,
    )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    written = write_report(report, args.out)
    entries = sum(len(device.entries) for device in report.devices)
    if args.json:
        emit_json(
            {
                "page": str(Path(args.out) / "index.html"),
                "problems": entries,
                "devices": [device.name for device in report.devices],
                "bundles": len(bundles),
                "notes": report.notes,
                "files": list(map(str, written)),
            }
        )
        return 0
    for each in report.notes:
        note(each)
    print(f"{Path(args.out) / 'index.html'}: {entries} problems, {len(written)} files")
    return 0


def _tell(text: str) -> None:
    """Progress on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
