from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from schedules.build.toolchain.stub_elf import shared_library


def test_functions_return_the_value(tmp_path: Path) -> None:
    path = tmp_path / "libstub.so.7"
    names = ["alpha", "beta", "gamma"]
    path.write_bytes(shared_library("libstub.so.7", names, 100))
    library = ctypes.CDLL(str(path))
    assert [getattr(library, name)() for name in names] == [100] * 3
    with pytest.raises(AttributeError):
        _ = library.delta


def test_it_satisfies_a_dependency_by_its_name(tmp_path: Path) -> None:
    """A library that needs the soname loads once the stub is there."""
    from schedules.build.toolchain.link import find_lld

    lld = find_lld()
    if lld is None:
        pytest.skip("no LLVM linker; pip install ziglang")
    stub, user = tmp_path / "libneeded.so.1", tmp_path / "libuser.so"
    stub.write_bytes(shared_library("libneeded.so.1", ["needed"], 7))
    command = [*lld, "-shared", "-o", str(user), "--no-as-needed", f"-L{tmp_path}", f"-l:{stub.name}"]
    subprocess.run(command, check=True)
    load = "import ctypes, sys; {}ctypes.CDLL(sys.argv[2])"
    paths = [str(stub), str(user)]
    alone = subprocess.run([sys.executable, "-c", load.format(""), *paths], capture_output=True, text=True)
    assert "libneeded.so.1" in alone.stderr
    first = "ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); "
    subprocess.run([sys.executable, "-c", load.format(first), *paths], check=True)


def test_other_machines() -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    image = shared_library("libstub.so", ["f"], 100, machine=other)
    assert int.from_bytes(image[18:20], "little") == {"aarch64": 183, "x86_64": 62}[other]
    with pytest.raises(KeyError):
        shared_library("libstub.so", ["f"], 100, machine="vax")
