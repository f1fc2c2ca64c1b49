from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.packing_cost import KIND, packing_table, read_packing


def test_a_row_for_each_filter_and_a_column_for_each_device(tmp_path: Path) -> None:
    def kept(device: str, *filters: tuple[str, int, float]) -> Path:
        found = [
            {"operator": operator, "dtype": "int8", "shape": [co, 8, 3, 3], "nbytes": 2**20, "median_ms": ms}
            for operator, co, ms in filters
        ]
        words = {"kind": KIND, "device": device, "date": "2026-11-20T01", "versions": {"numpy": "2"}, "filters": found}
        file = tmp_path / f"{device}.json"
        file.write_text(json.dumps(words))
        return file

    files = [kept("A", ("conv", 4, 1.23456), ("conv", 8, 20.0)), kept("B", ("conv", 8, 0.5))]
    assert packing_table([read_packing(file) for file in files]).splitlines() == [
        "| filter |  | MiB | A: ms | B: ms |",
        "|---|---|---|---|---|",
        "| conv | 4x8x3x3 int8 | 1.00 | 1.23 |  |",
        "| conv | 8x8x3x3 int8 | 1.00 | 20 | 0.5 |",
        "",
        "A, 2026-11-20; numpy 2",
        "",
        "B, 2026-11-20; numpy 2",
    ]
