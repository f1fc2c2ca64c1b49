from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.peers.packing_cost import read_packing


@pytest.fixture(scope="module")
def packing_cost() -> ModuleType:
    return import_module("benchmarks.packing_cost")


def test_every_packed_filter_of_the_presets_once(
    packing_cost: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing_cost, "CALLS", 1)
    monkeypatch.setattr(sys, "argv", ["packing_cost.py", "--logs", str(tmp_path)])
    assert packing_cost.main() == 0
    (file,) = tmp_path.glob("*/packing_cost.json")
    found = [(f["operator"], tuple(f["shape"]), f["dtype"]) for f in read_packing(file)["filters"]]
    assert len(set(found)) == len(found) > 12
    assert ("conv2d_nchw", (640, 1920, 3, 3), "float16") in found  # k100-packed-4
    assert ("conv2d_nchw32", (128, 128, 7, 7), "int8") in found
    assert all(f["median_ms"] > 0 for f in read_packing(file)["filters"])
    assert "640x1920x3x3" in capsys.readouterr().out


def test_what_is_timed_packs(packing_cost: ModuleType) -> None:
    for operator, dtype, (co, ci, kh, kw), pack in packing_cost.filters():
        weight = np.ones((co, ci, kh, kw), dtype)
        shape = pack(weight).shape
        assert shape == (
            (kh, kw, co, ci) if operator == "conv2d_nchw" else (-(-ci // 32), kh, kw, -(-co // 32) * 32, 32)
        )
