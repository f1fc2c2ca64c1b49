"""`schedules cache`: what is kept, and to be rid of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedules.store.disk import Disk
from tests.command import Run, one_line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path))
    disk = Disk(tmp_path / "kernels")
    for name, operator, arch in (("a", "softmax", "llvm"), ("b", "softmax", "llvm"), ("c", "conv2d_nhwc", "llvm")):
        disk.add(f"{name}.so", {"operator": operator, "arch": arch}, bytes(2**20))
        disk.add(f"{name}.choice", {"chosen": {}})
    os.utime(disk.folder / "a.so", (1, 1))
    return disk


def test_what_is_kept(run: Run, here: Disk) -> None:
    folder, kernels, size, _, header, conv, softmax = run("cache").out.splitlines()
    assert folder.split() == ["folder", str(here.folder)] and kernels.split() == ["kernels", "3"]
    assert size.split() == ["size", "3.0", "MiB", "of", "1024.0", "MiB"]
    assert header.split()[:3] == ["operator", "target", "kernels"]
    assert conv.split()[:5] == ["conv2d_nhwc", "llvm", "1", "1.0", "MiB"]
    assert softmax.split()[:5] == ["softmax", "llvm", "2", "2.0", "MiB"]
    found = run("cache", "--json").json
    assert found["kernels"] == 3 and not found["trouble"] and found["bytes"] == sum(e.nbytes for e in here.entries())
    assert [row["operator"] for row in found["operators"]] == ["conv2d_nhwc", "softmax"]
    here.folder.chmod(0o777)
    assert "others may write to it" in run("cache").out


def test_clear(run: Run, here: Disk) -> None:
    assert "1.0 MiB removed; kernels: 1 removed, 2 left" in run("cache", "clear", "--older-than", "30").out
    assert run("cache", "clear", "--json").json | {"bytes": 0} == {
        "folder": str(here.folder),
        "removed": 2,
        "left": 0,
        "bytes": 0,
    }
    assert not list(here.entries()) and run("cache").out.splitlines()[1].split() == ["kernels", "0"]


def test_mistakes(run: Run, here: Disk) -> None:
    assert "write `schedules cache clear --older-than DAYS`" in one_line(run("cache", "--older-than", "3"))
    assert "--older-than -1 must be at least 0" in one_line(run("cache", "clear", "--older-than", "-1"))
    assert "invalid choice: 'empty'" in one_line(run("cache", "empty"))
    assert len(list(here.entries())) == 6
