from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import choice_cost
from benchmarks.peers.choice_cost import choice_table, read_choices


def test_layers_are_chosen_for_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice_cost, "PASSES", 1)
    monkeypatch.setattr(sys, "argv", ["choice_cost.py", "--logs", str(tmp_path), "--every", "150"])
    assert choice_cost.main() == 0
    (file,) = tmp_path.glob("*/choice_cost.json")
    found = read_choices(file)["layers"]
    assert len({(row["operator"], row["dtype"]) for row in found}) > 2
    assert all(0 < row["ms"] < 10_000 for row in found)  # none is what was chosen before
    assert str(file) in capsys.readouterr().out


def test_the_mean_and_the_most_of_a_kind() -> None:
    rows = [("conv2d_nchw", "float16", ms) for ms in (20.0, 40.0)] + [("conv2d_nhwc", "float32", 6.0)]
    layers = [dict(set="a", operator=operator, dtype=dtype, layer="", ms=ms) for operator, dtype, ms in rows]
    told = choice_table([dict(device="CPU x2", date="2026-11-29T00:00:00+00:00", versions={}, layers=layers)])
    lines = [line for line in told.splitlines() if line.startswith("| CPU x2")]
    assert (
        lines[0] == "| CPU x2 | `conv2d_nchw` float16 | 2 | 30 | 40 |" and lines[-1] == "| CPU x2 | all | 3 | 22 | 40 |"
    )
