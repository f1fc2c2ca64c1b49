"""Linking: objects into a shared library for the CPU, AMDGPU objects into a code object."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from schedules.build.toolchain.command import run_tool
from schedules.build.toolchain.stub_elf import shared_library
from schedules.core.errors import BuildError, ToolchainError

INSTALL = "pip install 'te-schedules[rocm]'"


@lru_cache
def find_lld() -> tuple[str, ...] | None:
    """The command of an LLVM linker: ``ld.lld`` on PATH, or the one inside the ziglang package."""
    for name in ("ld.lld", *(f"ld.lld-{version}" for version in range(22, 14, -1))):
        if shutil.which(name):
            return (name,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "ld.lld")
    return None


def _run(command: Sequence[str]) -> None:
    done = run_tool(command)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0] if lines else 'no message'}")


def link_library(output: str, objects: Sequence[str], options: Any = None, **_: Any) -> None:
    """Link `objects` into the shared library `output`; fits ``export_library(fcompile=...)``.

    A C compiler is used where there is one, else LLVM's linker.  The result names libm, whose functions LLVM calls.
    Raises ToolchainError if there is neither.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler:
        # without what starts programs, and without the C library, which libm brings: there is less to read
        libraries = ("-nostdlib", "-Wl,--no-as-needed", "-lm", "-lgcc")
        _run([compiler, "-shared", "-fPIC", "-o", output, *objects, *libraries])
        return
    lld = find_lld()
    if lld is None:
        raise ToolchainError(f"no linker found; {INSTALL} (it brings one), or install a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        # a stand-in is enough to record the dependency: LLVM's linker is alone here, with no C library to link against
        libm = Path(folder) / "libm.so.6"
        libm.write_bytes(shared_library("libm.so.6", ["expf"], 0))
        _run([*lld, "-shared", "-o", output, *objects, "--no-as-needed", f"-L{folder}", "-l:libm.so.6"])


link_library.object_format = "o"  # type: ignore[attr-defined]  # read by export_library


def write_library(module: Any, library: Path) -> None:
    """Write a TVM module, and what it imports, as the shared library `library`.

    The object files stay in memory: LLVM ends the process in which it cannot write one.
    Raises ToolchainError, BuildError (a full disk is one too), OSError.
    """
    with contextlib.ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        for name in ("lib0.o", "devc.o"):  # as `export_library` calls the module's own, and that of the imports
            descriptor = os.memfd_create(name)
            held.callback(os.close, descriptor)
            os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", f"{folder}/{name}")
        module.export_library(str(library), fcompile=link_library, workspace_dir=folder)


STAMPED = 256  # threads of a block at most, which TVM's code generator writes into every kernel where no AMD GPU is


@dataclass(frozen=True)
class AmdCode:
    """LLVM IR, assembly and an object file of the same kernels."""

    ll: str
    assembly: str
    relocatable: bytes


def for_blocks_of(threads: int, ll: str, processor: str, waves: int = 0) -> AmdCode:
    """The kernels of LLVM IR `ll`, for blocks of up to `threads` and at least so many `waves` of a SIMD, by TVM's LLVM.

    With it LLVM gives a thread as many registers as blocks of that size, or so many waves, leave it.  Raises BuildError
    if the IR does not say for how many threads it is.
    """
    import tvm_ffi

    size = '"amdgpu-flat-work-group-size"="1,{}"'
    if size.format(STAMPED) not in ll:
        raise BuildError(f"TVM's LLVM IR does not bound blocks by {STAMPED} threads; install apache-tvm 0.27")
    triple = ll.split('target triple = "', 1)[1].split('"', 1)[0]
    target = json.dumps({"kind": "llvm", "mtriple": triple, "mcpu": processor}).replace('"', "\\22")
    least = f' "amdgpu-waves-per-eu"="{waves}"' if waves else ""
    ll = ll.replace(size.format(STAMPED), size.format(threads) + least)
    flag = f'\n!llvm.module.flags = !{{!1000000}}\n!1000000 = !{{i32 4, !"tvm_target", !"{target}"}}\n'
    with contextlib.ExitStack() as held:  # in memory: LLVM ends the process in which it cannot write a file
        source, made = (os.memfd_create(name) for name in ("kernel.ll", "kernel.o"))
        held.callback(os.close, source)
        held.callback(os.close, made)
        os.write(source, (ll + flag).encode())
        module = tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")(f"/proc/self/fd/{source}", "ll")
        module.write_to_file(f"/proc/self/fd/{made}", "o")
        with open(made, "rb", closefd=False) as file:
            file.seek(0)
            return AmdCode(ll, str(module.inspect_source("asm")), file.read())


def link_code_object(relocatable: bytes) -> bytes:
    """An HSA code object from an AMDGPU object file.  Raises ToolchainError or BuildError (undefined symbols)."""
    lld = find_lld()
    if lld is None:
        raise ToolchainError(f"no linker for AMD GPUs found; {INSTALL}, or put ld.lld on PATH")
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "kernel.o", Path(folder) / "kernel.hsaco"
        source.write_bytes(relocatable)
        _run([*lld, "--no-undefined", "-shared", str(source), "-o", str(result)])
        return result.read_bytes()
