from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.peers.instruction_mix import read_mix
from schedules.core.arch import parse_arch
from schedules.core.errors import UsageError


@pytest.fixture(scope="module")
def instruction_mix() -> ModuleType:
    return import_module("benchmarks.instruction_mix")


def test_both_versions_are_counted(
    instruction_mix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier"  # whose builds are words
    earlier.mkdir()
    made = {"preset": "oneflow-32", "operator": "softmax", "dtype": "float16"}
    monkeypatch.setattr(
        instruction_mix,
        "made_by",
        lambda folder, arch, names, own=instruction_mix.made_by: (
            iter([{**made, "refused": "why"}]) if folder == earlier else own(folder, arch, names)
        ),
    )
    words = ["oneflow-32", "--target", "rocm:gfx942", "--before", str(earlier), "--logs", str(tmp_path)]
    assert instruction_mix.main(words) == 0
    kept = read_mix(tmp_path / "amd-gfx942" / "instruction_mix.json")
    assert kept["before"] == [{**made, "refused": "why"}] and kept["commit_before"] == ""
    (row,) = kept["now"]
    assert {**row, **made} == row and row["schedule"] == "warp" and row["waves"] and row["registers"]
    assert row["shuffle"] and row["other vector instruction"] and row["wait"] and "barrier" not in row
    assert "now oneflow-32: warp" in capsys.readouterr().out


def test_refusals(instruction_mix: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--target cuda:sm_90a is no AMD GPU; give one, as rocm:gfx942"):
        instruction_mix.main(["--target", "cuda:sm_90a"])
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "__init__.py").write_text("raise SystemExit(3)")
    with pytest.raises(UsageError, match="ended with 3; give a checkout of this project"):
        list(instruction_mix.made_by(tmp_path, parse_arch("rocm:gfx942"), ["oneflow-32"]))
    with pytest.raises(UsageError, match="holds no instruction_mix"):
        (tmp_path / "a.json").write_text(json.dumps({"kind": "other"}))
        read_mix(tmp_path / "a.json")
