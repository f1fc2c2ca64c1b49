from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedules.errors import UsageError
from schedules.peers.overhead import KIND, overhead_table, read_overhead


def kept(device: str, *calls: tuple[str, str, float, float | None]) -> dict[str, Any]:
    def words(us: float) -> dict[str, float]:
        return {"median_us": us, "p10_us": us, "p90_us": us}

    found = [
        {"operator": operator, "mode": mode, "ours": words(ours)} | ({"torch": words(theirs)} if theirs else {})
        for operator, mode, ours, theirs in calls
    ]
    return {"kind": KIND, "device": device, "date": "2026-11-20T01:02:03", "versions": {"torch": "2"}, "calls": found}


def test_a_row_for_each_mode_and_two_columns_for_each_device() -> None:
    cpu = kept("A CPU", ("softmax", "eager", 12.34, 4.0), ("softmax", "kernel", 9.0, None))
    gpu = kept("A GPU", ("conv", "graph", 3.0, 2.0), ("softmax", "kernel", 5.0, None))
    assert overhead_table([cpu, gpu]).splitlines() == [
        "| us of a call |  | A CPU: ours | A CPU: PyTorch | A GPU: ours | A GPU: PyTorch |",
        "|---|---|---|---|---|---|",
        "| softmax | kernel alone | 9.0 |  | 5.0 |  |",
        "| softmax | eager | 12.3 | 4.0 |  |  |",
        "| conv | in a CUDA graph |  |  | 3.0 | 2.0 |",
        "",
        "A CPU, 2026-11-20; torch 2",
        "",
        "A GPU, 2026-11-20; torch 2",
    ]


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "torch_overhead.json"
    with pytest.raises(UsageError, match="cannot read"):
        read_overhead(file)
    whole = kept("A CPU")
    for text in ("{", "[]", json.dumps({**whole, "kind": "softmax"}), json.dumps({"kind": KIND, "device": "A"})):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"torch_overhead.py wrote"):
            read_overhead(file)
    file.write_text(json.dumps(whole))
    assert read_overhead(file) == whole
