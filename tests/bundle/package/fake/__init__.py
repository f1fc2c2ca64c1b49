"""A GPU's driver that notes launches down, and what TVM's host code launches, to compare."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from schedules.build.builder import Built
from schedules.build.toolchain.link import write_library
from schedules.bundle.package import driver
from schedules.check.emulate.toolchain import build_runtime, find_cxx
from schedules.core.problem import Argument

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
PLACES = {"cuda": 2, "rocm": 10}


LIBRARIES = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}


def drivers(folder: Path) -> Path:
    """`folder` with both drivers, for LD_LIBRARY_PATH."""
    for kind, name in LIBRARIES.items():
        _compiled(kind, folder / name, f"-Wl,-soname,{name}")
    return folder


def _compiled(kind: str, library: Path, *flags: str) -> None:
    command = [find_cxx(), "-shared", "-fPIC", "-std=c++17", "-Wall", *(["-DHIP"] if kind == "rocm" else []), *flags]
    done = subprocess.run([*command, str(HERE / "driver.cc"), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@functools.cache
def _loaded(kind: str) -> ctypes.CDLL:
    """A driver in this process, by no name that others look for."""
    with tempfile.TemporaryDirectory() as folder:
        _compiled(kind, Path(folder) / "driver.so")
        return ctypes.CDLL(str(Path(folder) / "driver.so"))


@contextlib.contextmanager
def driving(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """This process with the driver of `kind`; what it gives returns the launches that were noted since."""
    patch.setattr(driver, "driver_library", _loaded)
    patch.setenv("FAKE_DRIVER_LOG", str(folder / "log"))
    driver.driver_of.cache_clear()
    yield lambda: [line for line in noted(folder / "log") if isinstance(line, dict) and "symbol" in line]
    driver.driver_of.cache_clear()


def tensors(arguments: Sequence[Argument], kind: str, extent: int | None = None) -> list[dict[str, Any]]:
    """Fields of fake tensors for `arguments`, at addresses of their own; `extent` is that at run time."""
    made = []
    for at, argument in enumerate(arguments):
        shape = list(argument.shape)
        axis = argument.runtime_axis if argument.ranged_axis is None else argument.ranged_axis
        if axis is not None and extent is not None:
            shape[axis] = extent
        made.append({"address": (at + 1) << 36, "shape": shape, "dtype": argument.dtype, "place": PLACES[kind]})
    return made


def recorded(cases: Sequence[tuple[Built, list[dict[str, Any]]]], folder: Path) -> list[dict[str, Any]]:
    """What the host code of each build launches with these tensors: `launches`, and the `sizes` of parameters."""
    told = []
    for at, (built, given) in enumerate(cases):
        library = folder / f"{at}.so"
        write_library(built.module, library)
        told.append({"library": str(library), "tensors": given})
    command = [sys.executable, str(HERE / "recorder.py"), str(build_runtime())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TVM_USE_RUNTIME_LIB": "1"}
    done = subprocess.run(command, input=json.dumps(told), env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def sizes_text(sizes: Mapping[str, Sequence[int]]) -> str:
    """As the drivers read it."""
    return ";".join(f"{name}={','.join(map(str, each))}" for name, each in sizes.items())


def noted(log: Path) -> list[Any]:
    """The lines that a driver wrote, and an empty file again."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    log.write_text("")
    return lines


def anonymous(launches: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> list[Any]:
    """`launches` on no named device and stream, with names in place of addresses: of the tensors `given`, and of
    workspaces in order of use."""
    names = {tensor["address"]: f"argument {at}" for at, tensor in enumerate(given)}

    def named(number: Any) -> Any:
        if isinstance(number, list):
            return [named(number[0]), *number[1:]]
        if number < 1 << 33:  # no address
            return number
        return names.setdefault(number, f"workspace {len(names) - len(given)}")

    every = [{name: told for name, told in each.items() if name not in ("device", "stream")} for each in launches]
    return [{**each, "arguments": [named(number) for number in each["arguments"]]} for each in every]


def standing_alone(text: str) -> str:
    """The code of a module, to be run by itself."""
    return re.sub(r"^from __future__ import annotations\n", "", text, flags=re.MULTILINE)
