from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.library import KIND, library_table, read_library


def kept(folder: Path, device: str, **fields: Any) -> Path:
    words = {"kind": KIND, "device": device, "date": "2026-11-20T01", "versions": {"numpy": "2"}, "target": "llvm"}
    sizes = {"nbytes": 3 * 2**20, "wheel_nbytes": 2**19, "seconds": 20.4, "import_ms": 18.2}
    file = folder / f"{device}.json"
    file.write_text(json.dumps(words | sizes | fields))
    return file


def test_a_row_for_each_library(tmp_path: Path) -> None:
    several = {"a": 190.4, "b": 2.0, "c": 3.0}
    files = [kept(tmp_path, "A", kernels_ms=several), kept(tmp_path, "B", kernels_ms={"a": 7.0}, wheel_nbytes=None)]
    assert library_table([read_library(file) for file in files]).splitlines() == [
        "| library for | kernels | MiB | wheel, MiB | built in s | import, ms | first kernel, ms | others, ms |",
        "|---|---|---|---|---|---|---|---|",
        "| llvm, A | 3 | 3.0 | 0.5 | 20 | 18 | 190 | 2.5 |",
        "| llvm, B | 1 | 3.0 |  | 20 | 18 | 7 |  |",
        "",
        "A, 2026-11-20; numpy 2",
        "",
        "B, 2026-11-20; numpy 2",
    ]
