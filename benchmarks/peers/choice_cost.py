"""What the choice of a layer costs (benchmarks/choice_cost.py): its files, and those of several devices in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.costs import sources
from benchmarks.peers.kept import read_costs
from benchmarks.peers.markdown import table

KIND = "choice_cost"


def read_choices(file: str | Path) -> dict[str, Any]:
    """The content of a file of python -m benchmarks.choice_cost.  Raises UsageError if it is none."""
    return read_costs(file, KIND, "layers")


def choice_table(files: Sequence[Mapping[str, Any]]) -> str:
    """A row for each operator and dtype of each device, and one for all: layers, and their mean and largest ms."""
    headers, rows = ["choice on", "of", "layers", "mean ms", "most ms"], []
    for file in files:
        kinds: dict[str, list[float]] = {}
        for each in file["layers"]:
            kinds.setdefault(f"`{each['operator']}` {each['dtype']}", []).append(each["ms"])
        for of, times in [*kinds.items(), ("all", [each["ms"] for each in file["layers"]])]:
            rows.append([file["device"], of, str(len(times)), f"{np.mean(times):.0f}", f"{max(times):.0f}"])
    return "\n\n".join([table(headers, rows), *sources(files)])
