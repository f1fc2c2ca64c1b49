"""The comparison of generated sources: the same code is the same, and one changed line is shown."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scripts import compare_sources


def test_what_changed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"a": "simt: tile=8\nx = 1;\ny = 2;", "b": "same", "c": "left"}
    assert compare_sources.compare(before, dict(before))
    assert capsys.readouterr().out == "3 same\n"
    after = {"a": "simt: tile=8\nx = 1;\ny = 3;", "b": "same", "d": "came"}
    assert not compare_sources.compare(before, after)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "changed: a",
        "    - y = 2;",
        "    + y = 3;",
        "gone: c",
        "new: d",
        "1 changed, 1 gone, 1 new, 1 same",
    ]


def test_a_tree_is_the_same_as_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--target", "llvm:x86-64-v3", "--target", "cuda:sm_80", "--presets", "oneflow-3*", "--every-schedule"]
    before = compare_sources.sources(compare_sources.ROOT, [*options, "--jobs", "1"], tmp_path)
    names = [name for name in before if "cuda:sm_80" in name]
    assert "oneflow-32 cuda:sm_80 default" in names and "oneflow-32 cuda:sm_80 warp" in names
    assert "__global__" in before["oneflow-32 cuda:sm_80 default"]
    assert "define" in before["oneflow-32 llvm:x86-64-v3 default"]
    assert compare_sources.read(tmp_path) == before


def test_kept_sources_are_those_that_are_asked_for() -> None:
    kept = dict.fromkeys(["a-1 llvm default", "a-1 llvm cpu", "b llvm default", "a-1 cuda:sm_80 default"], "")
    args = argparse.Namespace(target=["llvm"], presets="a*", every_schedule=False)
    assert list(compare_sources.of_tasks(kept, args)) == ["a-1 llvm default"]


def test_addresses_of_objects_are_no_difference() -> None:
    one, other = (
        '!1 = !{!"0x55e0", !2}\n!3 = !{!"0x55f0", !"0x55e0"}',
        '!1 = !{!"0x12", !2}\n!3 = !{!"0x34", !"0x12"}',
    )
    assert compare_sources.without_addresses(one) == compare_sources.without_addresses(other)
    assert compare_sources.without_addresses(one) != compare_sources.without_addresses(other.replace("0x34", "0x12"))
