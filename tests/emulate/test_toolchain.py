from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedules.emulate import toolchain
from schedules.errors import EmulationError, ToolchainError

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
    assert len(list(cache.iterdir())) == 2


def test_old_kernels_are_dropped(cxx: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_MAX_CACHED_KERNELS", 4)
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
