"""Write the tables of kept comparisons into README.md, RESULTS.md and docs/, between markers, and say which are out of
date.

    python -m benchmarks.readme_tables              # write them
    python -m benchmarks.readme_tables --check  # only name those that are out of date, and exit with 1 if there are any

A table stands between two lines, which stay:

    <!-- table nvidia-h200/conv_compare operator=conv2d_nhwc dtype=float16 launch=graph -->
    <!-- end -->

The first word is a results file of one of compare_*.py, below --log and without its
".json"; or "*/torch_overhead", "*/packing_cost" or "*/export_all", for one table of what the script of that name kept
on whichever devices.  The words after it choose cases: those whose field (operator, launch, or one of the problem's)
has this value; without any, all.  What results_table.py prints of them is put between the lines; with tables=N
the first N.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.library import library_table, read_library
from benchmarks.peers.overhead import overhead_table, read_overhead
from benchmarks.peers.packing_cost import packing_table, read_packing
from benchmarks.peers.tables import selected, tables
from schedules.cli.script import run_script
from schedules.core.errors import UsageError
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.measure.results import read_results

COSTS = {
    "torch_overhead": (read_overhead, overhead_table),
    "packing_cost": (read_packing, packing_table),
    "export_all": (read_library, library_table),
}
ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md")))
BEGIN, END = re.compile(r"<!-- table(?P<words>(?: [^ ]+)+) -->"), "<!-- end -->"


@dataclass(frozen=True)
class Marked:
    """A table of a text: the words of its marker, the line it stands on, and the lines between the markers."""

    words: tuple[str, ...]
    line: int
    first: int
    end: int

    def __str__(self) -> str:
        return f"line {self.line}, {' '.join(self.words)}"


def marked(lines: Sequence[str]) -> Iterator[Marked]:
    """The marked tables of a text.  Raises UsageError for a marker without its other."""
    begun: tuple[tuple[str, ...], int] | None = None
    for index, line in enumerate(lines):
        if found := BEGIN.fullmatch(line):
            if begun:
                raise UsageError(f"line {begun[1] + 1}: the table has no {END} before line {index + 1}; add it")
            begun = tuple(found["words"].split()), index
        elif line == END:
            if not begun:
                raise UsageError(f"line {index + 1}: {END} ends no table; remove it")
            words, start = begun
            yield Marked(words, start + 1, start + 1, index)
            begun = None
    if begun:
        raise UsageError(f"line {begun[1] + 1}: the table has no {END}; add it")


def content(table: Marked, folder: Path) -> list[str]:
    """The lines that belong between the markers of `table`.  Raises UsageError that names the marker."""
    name, *rest = table.words
    try:
        if wrong := [word for word in rest if "=" not in word]:
            raise UsageError(f"{wrong[0]} is not FIELD=VALUE")
        where = dict(word.split("=", 1) for word in rest)
        if "*" in name:
            return _of_devices(name, where, folder).split("\n")
        most = where.pop("tables", None)
        if most is not None and not most.isdecimal():
            raise UsageError(f"tables={most} is not a number")
        results = selected(read_results(folder / f"{name}.json"), where)
        text = tables(results, int(most) if most else None)
    except UsageError as error:
        raise UsageError(f"{table}: {error}") from None
    return text.split("\n")


def _of_devices(pattern: str, where: Mapping[str, str], folder: Path) -> str:
    if where:
        raise UsageError(f"{next(iter(where))} chooses nothing in a table of every device")
    files = sorted(folder.glob(f"{pattern}.json"))
    kind = pattern.rsplit("/", 1)[-1]
    if kind not in COSTS:
        raise UsageError(f"there is no table of every device's {kind}, only of {', '.join(COSTS)}")
    if not files:
        raise UsageError(f"{folder} has no {pattern}.json; run scripts/{kind}.py")
    read, made = COSTS[kind]
    return made([read(file) for file in files])


def updated(text: str, folder: Path) -> tuple[str, list[Marked]]:
    """`text` with every marked table as the results in `folder` have it, and the tables that were out of date."""
    lines, stale, made = text.split("\n"), [], []
    done = 0
    for table in marked(lines):
        wanted = content(table, folder)
        if lines[table.first : table.end] != wanted:
            stale.append(table)
        made += [*lines[done : table.first], *wanted]
        done = table.end
    return "\n".join([*made, *lines[done:]]), stale


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--log", type=Path, default=ROOT / DEFAULT_FOLDER, help="folder of the results")
    parser.add_argument(
        "--file", type=Path, nargs="+", default=FILES, help="default README.md, RESULTS.md and docs/*.md"
    )
    args = parser.parse_args(words)
    out_of_date = False
    for file in args.file:
        try:
            text = file.read_text()
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error
        new, stale = updated(text, args.log)
        for table in stale:
            print(f"{file.name} {table}: {'is out of date' if args.check else 'written'}")
        if stale and not args.check:
            file.write_text(new)
        out_of_date |= bool(stale)
    return 1 if out_of_date and args.check else 0


if __name__ == "__main__":
    run_script(main)
