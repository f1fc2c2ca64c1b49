#!/usr/bin/env python3
"""Print the logged results of one device and operator as a Markdown table, the latest of each problem and schedule.

scripts/results_table.py tuning_logs/nvidia-h200/softmax.jsonl
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from schedules.registry import operator

SHOWN = ("schedule", "us", "TFLOP/s", "GB/s", "of a copy", "of cuDNN's best")


def row(entry: dict[str, Any]) -> str:
    copy = entry.get("copy_gbytes_per_s")
    share = f"{entry['gbytes_per_s'] / copy:.1%}" if copy else ""
    peers = entry.get("cudnn_us")
    best = min(peers, key=peers.get) if peers else None
    peer = f"{peers[best] / entry['median_us']:.2f} ({best} {peers[best]:.1f} us)" if best else ""
    defaults = {field.name: field.default for field in dataclasses.fields(operator(entry["operator"]).problem)}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["problem"].items()}
    problem = {k: v for k, v in given.items() if v != defaults[k]}
    words = " ".join(f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in problem.items())
    cells = [words, entry["schedule"], f"{entry['median_us']:.2f}", f"{entry['tflops']:.2f}"]
    return "| " + " | ".join([*cells, f"{entry['gbytes_per_s']:.0f}", share, peer]) + " |"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    entries = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    latest = {(json.dumps(entry["problem"]), entry["schedule"]): entry for entry in entries}
    print("| problem | " + " | ".join(SHOWN) + " |\n|" + "---|" * (len(SHOWN) + 1))
    for entry in latest.values():
        print(row(entry))
    dates = sorted({entry["date"][:10] for entry in latest.values()})
    versions = entries[-1]["versions"]
    print(f"\n{entries[-1]['device']}, {', '.join(dates)}, TVM {versions['apache-tvm']}, {versions['compiler']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
