"""What the last measure tells becomes trials once."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.fit_choice import known
from scripts.trials import measured, read

FOLDER = Path(__file__).parents[2] / "tuning_logs/nvidia-h200"


def test_the_last_measure_is_among_the_trials() -> None:
    assert measured(FOLDER / "layers.json", known(FOLDER)[1]) == ""


def test_what_was_measured_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new.jsonl"
    file.write_text(measured(FOLDER / "layers.json", []))
    header, layers = read(file)
    rows = [row for row in json.loads((FOLDER / "layers.json").read_text())["layers"] if "us" in row]
    assert header["device"] == "NVIDIA H200" and len(layers) == len(rows)
    assert sorted(layer.best for layer in layers) == sorted(row["us"] for row in rows)
    assert not measured(FOLDER / "layers.json", layers)
