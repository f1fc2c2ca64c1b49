from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from schedules.operators.depthwise_conv2d.cost import COSTS
from scripts import fit_depthwise
from scripts.fit_depthwise import estimates, fitted, keep, known, loss, regret

HEAD = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "date": "2026-11-23", "target": "cuda:sm_90a"}
PROBLEM = "n=2 h=8 w=8 ci=16 kh=3 kw=3 pad=1 dtype=float16 layout=nhwc"
WINDOWS = dict(tile="4,4", vector=2, steps=1, threads=128, by_rows=False, min_blocks=0)
BANDS = dict(images=1, tile_h=8, rows=4, channels=16, together=4, warps_c=4, warps_m=1)


def test_what_was_measured_and_right_is_kept(tmp_path: Path) -> None:
    configs = [
        dict(schedule="windows", config=WINDOWS, us=3.0, error=1.0),
        dict(schedule="bands", config=BANDS, us=2.0, error=0.9),
        dict(schedule="windows", config={**WINDOWS, "tile": "2,2"}, us=1.0, error=7.0),  # wrong
        dict(schedule="bands", config={**BANDS, "warps_m": 2}, failed="did not build"),
    ]
    line = {"net": "MobileNet", "problem": PROBLEM, "cudnn": 9.0, "copy": 1.5, "configs": configs}
    result = tmp_path / "result.jsonl"
    result.write_text(f"{json.dumps(HEAD)}\n{json.dumps(line)}\n")
    file = keep([result], tmp_path / "kept")
    (layer,) = known(file.parents[1])
    assert [(name, us) for name, _, us in layer.trials] == [("windows", 3.0), ("bands", 2.0)]
    assert layer.network == "MobileNet" and layer.cudnn == 9.0
    assert (estimates(layer) > 0).all() and regret(layer) in (1.0, 1.5)


def test_the_search_for_constants_only_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_depthwise, "ROUNDS", 1)
    monkeypatch.setattr(fit_depthwise, "TRIES", 9)
    few = known()[::12]
    found = fitted(COSTS, lambda tried: loss(few, tried, estimates))
    assert loss(few, found, estimates) <= loss(few, COSTS, estimates) + 1e-3


def test_the_choice_loses_little_on_what_was_recorded() -> None:
    """Of a layer's trials, the one that the estimate takes for the fastest, beside the fastest."""
    found = np.array([regret(layer) for layer in known()])
    assert len(found) > 100
    assert np.exp(np.log(found).mean()) < 1.08
    assert found.max() < 1.75
