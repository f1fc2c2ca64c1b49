from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schedules.check.emulate import toolchain
from schedules.core.errors import EmulationError, ToolchainError

KERNEL = 'extern "C" __global__ void k(float* a) { a[0] = 1; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "te-schedules" / "emulate"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"g\+\+, clang\+\+ or c\+\+.*install g\+\+"):
        toolchain.find_cxx()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        toolchain.find_cxx()
    with pytest.raises(ToolchainError):
        toolchain.build_kernels(KERNEL)


def test_compiler_of_the_environment_comes_first(cxx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "my-compiler"
    link.symlink_to(cxx)
    monkeypatch.setenv("CXX", str(link))
    assert toolchain.find_cxx() == str(link)


def test_a_kernel_is_compiled_once_and_nothing_else_stays(cxx: str, cache: Path) -> None:
    first = toolchain.build_kernels(KERNEL)
    stamp = first.stat().st_ino
    assert toolchain.build_kernels(KERNEL) == first and first.stat().st_ino == stamp
    assert toolchain.build_kernels(KERNEL.replace("1;", "2;")) != first
    with pytest.raises(EmulationError, match="does not compile"):
        toolchain.build_kernels(KERNEL.replace("1;", "nonsense;"))
    kept = [path for path in cache.rglob("*") if path.is_file() and path.name not in ("emulator.h.gch", ".lock")]
    assert sorted(path.name.split("-")[0] for path in kept) == ["kernel", "kernel"]


def test_gcc_reads_the_headers_compiled(cxx: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(toolchain.MOST, toolchain._HEADER, 2)
    toolchain.build_kernels(KERNEL)
    found = list(cache.glob("header-*/emulator.h.gch"))
    if "Free Software Foundation" not in toolchain._compiler_identity(cxx):
        assert not found
        pytest.skip(f"{cxx} is not GCC")
    (header,) = found
    flags = [*toolchain._KERNEL_FLAGS, *toolchain._precompiled(), *toolchain._INCLUDE]
    listing = subprocess.run(
        [cxx, *flags, "-H", "-include", "emulator.h", "-x", "c++", "-", "-o", os.devnull],
        input="", capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    assert listing.splitlines()[0] == f"! {header}"  # valid; the lines of headers that are read begin with dots

    header.write_bytes(b"cut off")  # as by a full disk: the header itself serves
    toolchain.build_kernels(KERNEL.replace("1;", "2;"))
    for name in "ab":
        (cache / f"header-{name}").mkdir()
        (cache / f"header-{name}" / "emulator.h.gch").write_bytes(b"of another version")
        os.utime(cache / f"header-{name}" / "emulator.h.gch", (1, 1))
    os.utime(header, (1, 1))
    monkeypatch.setattr(toolchain, "_KERNEL_FLAGS", (*toolchain._KERNEL_FLAGS, "-DOF_A_NEW_VERSION"))
    toolchain.build_kernels(KERNEL)
    (new,) = cache.glob("header-*/emulator.h.gch")
    assert new != header


COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo Free Software Foundation; exit; fi
echo compiled >> {log}; sleep 0.2
for output; do :; done
echo > "$output"
"""


def test_what_all_kernels_need_is_compiled_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor() as threads:
        begun = [threads.submit(toolchain.build_runtime) for _ in range(3)]
        assert len({each.result() for each in begun}) == 1
    assert log.read_text() == "compiled\n"


def test_old_kernels_are_dropped(cxx: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(toolchain.MOST, toolchain._KERNEL, 4)
    oldest = toolchain.build_kernels(KERNEL)
    os.utime(oldest, (1, 1))
    for i in range(4):
        newest = toolchain.build_kernels(KERNEL.replace("1;", f"{i + 2};"))
    kernels = list(cache.glob("kernel-*"))
    assert newest in kernels and oldest not in kernels and len(kernels) <= 4


@pytest.mark.parametrize(
    "source, message",
    [("int x;", "no __global__"), ('__global__ void k() { asm("', "cannot translate|does not compile")],
)
def test_sources_that_are_not_cuda(source: str, message: str, cxx: str) -> None:
    with pytest.raises(EmulationError, match=message):
        toolchain.build_kernels(source)
