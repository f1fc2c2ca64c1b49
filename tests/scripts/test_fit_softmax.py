from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from scripts.fit_softmax import estimates, keep, known, regret

HEAD = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "date": "2026-11-23T09:52:44+00:00"}
PROBLEM = dict(rows=49152, cols=100, function="softmax", dtype="float32", scale=1.0, mask="none", keep=1.0)
FRAMES = "frames threads=8 groups=8 rows_per_group=1 min_blocks=0 kept=packed online=false access=16 streaming=no"
TILES = dict(
    threads=4, groups=32, rows_per_group=1, access=16, min_blocks=0, kept="packed", streaming="no"
)  # fmt: skip


def test_trials_of_results_and_of_lines_are_kept_together(tmp_path: Path) -> None:
    ours = {"schedule": "tiles", "config": TILES, "us": 14.9}
    case = {"problem": PROBLEM, "ours": ours, "bytes": 8, "copy_bytes": 4, "copies": {"torch": {"us": 8.0}}}
    alone = {**case, "problem": {**PROBLEM, "cols": 64}}
    result = tmp_path / "result.json"
    result.write_text(json.dumps({**HEAD, "cases": [case, alone]}))
    us = {f"{FRAMES} (rule)": 15.952, "copy": 15.8, "torch": 23.0, "gone threads=3": 1.0}
    lines = tmp_path / "cases.jsonl"
    lines.write_text(json.dumps({"problem": [49152, 100, "softmax", "float32"], "us": us, "copy_scaled": 15.8}) + "\n")
    file = keep([result, lines], tmp_path / "kept")
    assert file.name == "2026-11-23T0952.jsonl.xz"
    (layer,) = known(file.parent)  # the other problem has one trial
    assert [(name, us) for name, _, us in layer.trials] == [("tiles", 14.9), ("frames", 15.952)]
    assert (estimates(layer) > 0).all() and regret(layer) in (1.0, 15.952 / 14.9)


def test_the_choice_loses_little_on_what_was_recorded() -> None:
    """Of a problem's trials, the one that the estimate takes for the fastest, beside the fastest."""
    layers = known()
    found = np.array([regret(layer) for layer in layers])
    assert len(found) > 200
    assert np.exp(np.log(found).mean()) < 1.025
    assert found.max() < 1.35
