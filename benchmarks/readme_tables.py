"""Write the tables of README.md, RESULTS.md and docs/ between their markers, and say which are out of date.

    python -m benchmarks.readme_tables          # write them
    python -m benchmarks.readme_tables --check  # only name those that are out of date, and exit with 1 if there are any

A table stands between two lines, which stay:

    <!-- table nvidia-h200/conv_compare operator=conv2d_nhwc dtype=float16 launch=graph -->
    <!-- end -->

The first word says what the table is made of:

    DEVICE/NAME          a results file of compare_conv.py, compare_softmax.py or compare_cpu.py, below --log.  Words
                         after it choose cases: those whose field (operator, launch, or one of the problem's) has this
                         value; without any, all.  With tables=N the first N tables
    summary FILE...      the ratios to the best peer of several such files, a row for each operator and dtype
    layers PART          the summary, the sets or the worst of what compare_layers.py kept on every device, or the
                         summary of what it kept with --benchmark
    */NAME               what torch_overhead, compare_networks, few_trials, choice_cost, packing_cost, export_all
                         or instruction_mix kept on every device
    schedules            the schedules of every operator by target and language; with operator=NAME one operator's
    options              the optional fields of the problems of operator=NAME, with defaults and values
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.operator_tables import details, matrix, options
from benchmarks.peers import layers
from benchmarks.peers.choice_cost import choice_table, read_choices
from benchmarks.peers.few_trials import read_searches, searches_table
from benchmarks.peers.instruction_mix import mix_table, read_mix
from benchmarks.peers.library import library_table, read_library
from benchmarks.peers.networks import networks_table, read_networks
from benchmarks.peers.overhead import overhead_table, read_overhead
from benchmarks.peers.packing_cost import packing_table, read_packing
from benchmarks.peers.summary import summary_table
from benchmarks.peers.tables import selected, tables
from schedules.cli.script import run_script
from schedules.core.errors import UsageError
from schedules.measure.journal import DEFAULT_FOLDER
from schedules.measure.results import read_results

COSTS = {
    "torch_overhead": (read_overhead, overhead_table, "python -m benchmarks.torch_overhead"),
    "compare_networks": (read_networks, networks_table, "python -m benchmarks.compare_networks"),
    "few_trials": (read_searches, searches_table, "python -m benchmarks.few_trials"),
    "choice_cost": (read_choices, choice_table, "python -m benchmarks.choice_cost"),
    "packing_cost": (read_packing, packing_table, "python -m benchmarks.packing_cost"),
    "export_all": (read_library, library_table, "scripts/export_all.py --keep"),
    "instruction_mix": (read_mix, mix_table, "python -m benchmarks.instruction_mix"),
}  # how a file is read, its table, and what writes it
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
        if name == "summary":
            text = _summary(rest, folder)
        elif name == layers.KIND:
            text = _layers(rest, folder)
        elif name == "schedules":
            text = _schedules(_fields(rest))
        elif name == "options":
            text = options(_fields(rest).get("operator", ""))
        elif "*" in name:
            text = _of_devices(name, _fields(rest), folder)
        else:
            text = _comparison(folder / f"{name}.json", _fields(rest))
    except UsageError as error:
        raise UsageError(f"{table}: {error}") from None
    return text.split("\n")


def _fields(words: Sequence[str]) -> dict[str, str]:
    if wrong := [word for word in words if "=" not in word]:
        raise UsageError(f"{wrong[0]} is not FIELD=VALUE")
    return dict(word.split("=", 1) for word in words)


def _summary(names: Sequence[str], folder: Path) -> str:
    if not names:
        raise UsageError("a summary of no files; name some, as DEVICE/NAME")
    return summary_table([read_results(folder / f"{name}.json") for name in names])


def _layers(names: Sequence[str], folder: Path) -> str:
    if names == ["benchmark"]:
        command = "python -m benchmarks.compare_layers --benchmark"
        return layers.summary(_files(f"*/{layers.BENCHMARK}", folder, command, layers.read_layers))
    if len(names) != 1 or names[0] not in layers.PARTS:
        raise UsageError(f"layers {' '.join(names)} is no part; name one of {', '.join(layers.PARTS)}, benchmark")
    return layers.PARTS[names[0]](
        _files(f"*/{layers.KIND}", folder, "python -m benchmarks.compare_layers", layers.read_layers)
    )


def _comparison(file: Path, where: dict[str, str]) -> str:
    most = where.pop("tables", None)
    if most is not None and not most.isdecimal():
        raise UsageError(f"tables={most} is not a number")
    return tables(selected(read_results(file), where), int(most) if most else None)


def _schedules(where: Mapping[str, str]) -> str:
    if others := where.keys() - {"operator"}:
        raise UsageError(f"{min(others)} chooses nothing in a table of schedules; only operator does")
    return details(where["operator"]) if where else matrix()


def _of_devices(pattern: str, where: Mapping[str, str], folder: Path) -> str:
    if where:
        raise UsageError(f"{next(iter(where))} chooses nothing in a table of every device")
    kind = pattern.rsplit("/", 1)[-1]
    if kind not in COSTS:
        raise UsageError(f"there is no table of every device's {kind}, only of {', '.join(COSTS)}")
    read, made, command = COSTS[kind]
    return made(_files(pattern, folder, command, read))


def _files(pattern: str, folder: Path, command: str, read: Callable[[Path], dict[str, Any]]) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"{pattern}.json"))
    if not files:
        raise UsageError(f"{folder} has no {pattern}.json; run {command}")
    return [read(file) for file in files]


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
