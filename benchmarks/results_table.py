"""Print measured results as Markdown tables: a journal, the latest of each problem and schedule, or a comparison.

python -m benchmarks.results_table tuning_logs/nvidia-h200/softmax.jsonl
python -m benchmarks.results_table tuning_logs/nvidia-h200/softmax_compare.json
python -m benchmarks.results_table tuning_logs/nvidia-h200/conv_compare.json
python -m benchmarks.results_table --goals tuning_logs/nvidia-h200/softmax_compare.json  # what softmax reaches
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from benchmarks.peers import softmax_tables
from benchmarks.peers.tables import tables
from schedules.cli.script import run_script
from schedules.core.fields import Fields
from schedules.measure.journal import read_journal
from schedules.measure.records import Record
from schedules.measure.results import read_results

SHOWN = ("schedule", "us", "TFLOP/s", "GB/s", "of a copy", "of the best peer")


def told(problem: Fields) -> str:
    """The fields that are not at their defaults."""
    given = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    defaults = {f.name: f.default for f in dataclasses.fields(problem)}
    words = {name: value for name, value in given.items() if value != defaults[name]}
    return " ".join(f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in words.items())


def row(entry: Record) -> str:
    copy, peers = entry.more.get("copy_gbytes_per_s"), entry.more.get("peers")
    share = f"{entry.gbytes_per_s / copy:.1%}" if copy else ""
    best = min(peers, key=peers.get) if peers else None
    peer = f"{peers[best] / entry.us:.2f} ({best} {peers[best]:.1f} us)" if peers and best else ""
    cells = [told(entry.problem), entry.schedule, f"{entry.us:.2f}", f"{entry.tflops:.2f}"]
    return "| " + " | ".join([*cells, f"{entry.gbytes_per_s:.0f}", share, peer]) + " |"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="a journal (.jsonl), or the file of a comparison (.json)")
    parser.add_argument("--goals", action="store_true", help="shares of a copy by groups of shapes, of softmax")
    args = parser.parse_args(words)
    if args.goals:
        print(softmax_tables.goals([read_results(file) for file in args.results]))
        return 0
    for file in args.results:
        show(file)
    return 0


def show(file: str) -> None:
    if file.endswith(".json"):
        print(tables(read_results(file)))
        return
    records, bad = read_journal(file)
    for line in bad:
        print(line, file=sys.stderr)
    latest = {(str(entry.problem), entry.schedule): entry for entry in records if entry.stage == "bench"}
    print("| problem | " + " | ".join(SHOWN) + " |\n|" + "---|" * (len(SHOWN) + 1))
    for entry in latest.values():
        print(row(entry))
    for device, tvm, compiler in sorted(
        {(e.device, e.versions["apache-tvm"], e.versions["compiler"]) for e in latest.values()}
    ):
        dates = sorted({e.date[:10] for e in latest.values() if e.device == device})
        print(f"\n{device}, {', '.join(dates)}, TVM {tvm}, {compiler}")


if __name__ == "__main__":
    run_script(main)
