"""The rooms of the package: which there are, which imports which, and what importing them costs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.test_quality import tool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "schedules"
IMPORT = """
import os, sys, time
before, start = dict(os.environ), time.perf_counter()
import schedules
seconds = time.perf_counter() - start
heavy = {"tvm", "tvm_ffi", "torch", "numpy"} & sys.modules.keys()
assert not heavy, heavy
assert dict(os.environ) == before
print(seconds)
"""
CORE = """
import importlib, os, pkgutil, sys
before = dict(os.environ)
import schedules.core
for module in pkgutil.iter_modules(schedules.core.__path__, "schedules.core."):
    importlib.import_module(module.name)
heavy = {"tvm", "tvm_ffi", "torch"} & sys.modules.keys()
assert not heavy, heavy
assert dict(os.environ) == before
"""


def test_each_room_imports_those_below_it_and_has_no_circles() -> None:
    tool("lint-imports", "--no-cache")


def test_every_module_is_in_a_room_that_has_its_place() -> None:
    assert {file.stem for file in PACKAGE.glob("*.py")} == {"__init__", "__main__"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(contract for contract in settings["contracts"] if contract["type"] == "layers")
    assert layers["containers"] == ["schedules"] and layers["exhaustive"] is True
    listed = [room.strip() for layer in layers["layers"] for room in layer.split("|")]
    assert sorted(listed) == sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())


def ran(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("variable", [None, "7"])
def test_importing_the_package_is_light_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """With a number of threads that the user gave and without one."""
    if variable is None:
        monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("TVM_NUM_THREADS", variable)
    assert statistics.median(float(ran(IMPORT)) for _ in range(3)) < 0.3  # seconds


def test_importing_the_core_imports_neither_tvm_nor_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    ran(CORE)
