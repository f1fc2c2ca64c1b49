from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from schedules.build.toolchain import link
from schedules.core.errors import BuildError, ToolchainError


@pytest.fixture(scope="module")
def module() -> tvm.runtime.Module:
    a = te.placeholder((8,), name="a")
    return tirx.build(te.create_prim_func([a, te.compute((8,), lambda i: tirx.exp(a[i]) + tirx.erf(a[i]))]), "llvm")


@pytest.mark.parametrize("compiler", [True, False], ids=["C compiler", "LLVM's linker"])
def test_a_library_links_and_runs(
    module: tvm.runtime.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: bool
) -> None:
    if compiler and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    if not compiler:
        if link.find_lld() is None:
            pytest.skip("no LLVM linker; pip install ziglang")
        monkeypatch.setattr(link.shutil, "which", lambda _: None)
    path = tmp_path / "f.so"
    link.write_library(module, path)
    assert b"libm.so.6" in path.read_bytes()
    a = np.linspace(-1, 1, 8, dtype=np.float32)
    out = np.empty_like(a)
    tvm_ffi.load_module(str(path))["main"](tvm_ffi.from_dlpack(a), tvm_ffi.from_dlpack(out))
    np.testing.assert_allclose(out, [math.exp(x) + math.erf(x) for x in a], rtol=1e-5)


def test_objects_are_on_no_disk(module: tvm.runtime.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process that writes one onto a full disk."""
    places: list[Path] = []

    def linked(output: str, objects: Sequence[str], **options: Any) -> None:
        places.extend(Path(name).resolve() for name in objects)
        assert all(Path(name).read_bytes().startswith(b"\x7fELF") for name in objects)

    linked.object_format = "o"  # type: ignore[attr-defined]
    monkeypatch.setattr(link, "link_library", linked)
    link.write_library(module, tmp_path / "f.so")
    assert places and all(str(place).startswith("/memfd:") for place in places)


def test_without_any_linker_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.shutil, "which", lambda _: None)
    monkeypatch.setattr(link, "find_lld", lambda: None)
    with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
        link.link_library("f.so", ["f.o"])
    with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
        link.link_code_object(b"")


def test_a_broken_object_is_refused(amd_linker: None) -> None:
    with pytest.raises(BuildError):
        link.link_code_object(b"not an object")
