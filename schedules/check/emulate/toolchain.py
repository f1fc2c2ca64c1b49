"""Compiles the emulator's runtime library, headers and translated kernels; keeps the results in a per-user cache.

The cache folder is `emulate` in that of `core.folders`.  A file's name holds a hash of
everything that went into it, and files appear by renaming, so any number of processes may share the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from schedules.build.toolchain.link import link_library
from schedules.check.emulate.amdgcn import translate_ir
from schedules.check.emulate.translate import translate
from schedules.core.arch import parse_arch
from schedules.core.errors import BuildError, EmulationError, ToolchainError
from schedules.core.folders import cache_folder
from schedules.core.tvm import tvm

CXX_FOLDER = Path(__file__).parent / "cxx"

_COMMON_FLAGS = ("-std=c++17", "-g1", "-fPIC", "-shared", "-w")
# No contraction: g++ would fuse a multiply and an add only where the CPU can.  Signed overflow wraps, as on the GPU.
_KERNEL_FLAGS = (
    *_COMMON_FLAGS,
    "-Og",  # kernels run for less time than they take to compile, which is a quarter less than with -O1
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-delete-null-pointer-checks",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
    "-nostdlib",  # what a kernel calls is in the process that loads it, with the runtime
)
_RUNTIME_FLAGS = (*_COMMON_FLAGS, "-O2", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-fno-math-errno")
_INCLUDE = (f"-I{CXX_FOLDER}", f"-I{CXX_FOLDER / 'include'}")
_KERNEL, _HEADER, _RUNTIME = "kernel-{}.so", "header-{}/emulator.h.gch", "runtime-{}.so"
MOST = {_KERNEL: 1000, _HEADER: 8, _RUNTIME: 8}  # files of a kind that the cache keeps


def find_cxx() -> str:
    """The C++ compiler to use: `$CXX` if set, else the first of g++, clang++ and c++ on the PATH.

    Raises:
        ToolchainError: if there is none.
    """
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path is not None:
            return path
    missing = f"the compiler {chosen!r} named by $CXX" if chosen else "a C++ compiler (g++, clang++ or c++)"
    raise ToolchainError(f"{missing} was not found; install g++ (for example `apt-get install g++`) or set $CXX")


def emulator_folder() -> Path:
    """The folder of compiled files, created if it does not exist."""
    folder = cache_folder() / "emulate"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.lru_cache
def _compiler_identity(cxx: str) -> str:
    result = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False)
    return f"{cxx} {result.stdout}"


@functools.lru_cache
def _header_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in CXX_FOLDER.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(CXX_FOLDER)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(name: str, flags: Sequence[str], inputs: Sequence[str], source: str, key: Iterable[str]) -> Path:
    """Compiles C++ to a file in the cache, as `_cached`.

    Raises:
        ToolchainError: if there is no compiler.
        subprocess.CalledProcessError: if the compiler refuses; its `stderr` is text.
    """
    cxx = find_cxx()

    def make(partial: str) -> None:
        command = [cxx, *flags, *inputs, "-o", partial]
        subprocess.run(command, input=source, capture_output=True, text=True, check=True)

    return _cached(name, [_compiler_identity(cxx), _header_hash(), *flags, source, *key], make, shared=not source)


def _cached(name: str, key: Iterable[str], make: Callable[[str], None], shared: bool = False) -> Path:
    """A file in the cache that `make` writes, unless it is there already; the hash of `key` takes the place of {} in
    its `name`.  One that is `shared` by all kernels takes seconds to make: processes that begin together wait for one.
    """
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    target = emulator_folder() / name.format(digest[:32])
    with contextlib.suppress(FileNotFoundError):
        os.utime(target)  # the cache drops what was not used for longest
        return target
    target.parent.mkdir(exist_ok=True)
    with open(cache_folder() / ".lock", "w") if shared else contextlib.nullcontext() as lock:
        if lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                return target
        descriptor, partial = tempfile.mkstemp(prefix=".", suffix=target.name, dir=target.parent)
        os.close(descriptor)
        try:
            make(partial)
            os.replace(partial, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
    _drop_old(emulator_folder().glob(name.format("*")), MOST[name])
    return target


def _tvm_include_folders() -> list[Path]:
    folders = []
    for package in ("tvm", "tvm_ffi"):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ToolchainError(f"the Python package {package} was not found; install apache-tvm")
        folders.append(Path(spec.submodule_search_locations[0]) / "include")
    return folders


def build_runtime() -> Path:
    """The runtime library: fibers, barriers, matrix instructions and the device that TVM's runtime is given.

    Compiling it takes some seconds, once per machine, compiler and TVM version.

    Raises:
        ToolchainError: if there is no compiler, or it cannot compile the library.
    """
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("apache-tvm", "apache-tvm-ffi")]
    includes = [f"-I{folder}" for folder in _tvm_include_folders()]
    sources = [str(path) for path in sorted(CXX_FOLDER.glob("*.cc"))]
    try:
        return _compile(_RUNTIME, _RUNTIME_FLAGS, [*includes, *sources], "", versions)
    except subprocess.CalledProcessError as error:
        raise ToolchainError(f"cannot compile the emulator's runtime: {_first_error(error.stderr)}") from error


def _precompiled() -> tuple[str, ...]:
    """Where GCC finds emulator.h compiled, before the header itself: reading that is half the work of compiling a
    kernel.  Nothing for other compilers.

    Raises:
        ToolchainError: if there is no compiler, or it cannot compile the header.
    """
    if "Free Software Foundation" not in _compiler_identity(find_cxx()):
        return ()
    inputs = [*_INCLUDE, "-x", "c++-header", str(CXX_FOLDER / "emulator.h")]
    try:
        header = _compile(_HEADER, _KERNEL_FLAGS, inputs, "", ())
    except subprocess.CalledProcessError as error:
        raise ToolchainError(f"cannot compile the emulator's headers: {_first_error(error.stderr)}") from error
    return (f"-I{header.parent}",)


_translated = functools.lru_cache(maxsize=8)(translate)  # one source is run in several modes


def build_kernels(source: str, kind: str = "cuda") -> Path:
    """Translates and compiles a source, CUDA C++ or (of `kind` rocm) LLVM IR for AMD GPUs; the library exports
    `emu_kernel_<name>` for each kernel.

    Raises:
        EmulationError: if the source is none that the emulator can compile.
        ToolchainError: if there is no compiler.
    """
    return _build_ir(source) if kind == "rocm" else _build_cuda(source)


def _build_ir(source: str) -> Path:
    target = json.loads(str(parse_arch("llvm").target()))
    if platform.machine() == "x86_64":
        # without loads of single halves, which some CPUs have: LLVM makes them of vectors, and forgets their line
        target["mattr"] = ["-avx512fp16"]
    try:
        text = translate_ir(source, json.dumps(target))
    except ValueError as error:
        raise EmulationError(f"cannot translate the LLVM IR: {error}") from error

    def make(partial: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            translated, compiled = Path(folder) / "kernel.ll", Path(folder) / "kernel.o"
            translated.write_text(text)
            tvm.runtime.load_module(str(translated)).write_to_file(str(compiled), "o")
            link_library(partial, [str(compiled)])

    try:
        return _cached(_KERNEL, [_header_hash(), text, importlib.metadata.version("apache-tvm")], make)
    except (BuildError, RuntimeError) as error:
        raise EmulationError(f"the LLVM IR does not compile for the emulator: {error}") from error


def _build_cuda(source: str) -> Path:
    try:
        translation = _translated(source)
    except (ValueError, StopIteration) as error:
        raise EmulationError(f"cannot translate the CUDA source: {error or 'unexpected end'}") from error
    if not translation.kernels:
        raise EmulationError("the CUDA source has no __global__ function")
    text = '#line 1 "kernel.cu"\n' + translation.source
    inputs = [*_precompiled(), *_INCLUDE, "-include", "emulator.h", "-x", "c++", "-"]
    try:
        return _compile(_KERNEL, _KERNEL_FLAGS, inputs, text, ())
    except subprocess.CalledProcessError as error:
        message = _first_error(error.stderr)
        raise EmulationError(f"the CUDA source does not compile for the emulator: {message}") from error


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")


def _drop_old(cached: Iterable[Path], most: int) -> None:
    """Unlinks those not used for longest, down to half of `most`, where there are more."""
    files = list(cached)
    if len(files) <= most:
        return

    def last_use(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process dropped it
            return 0.0

    for path in sorted(files, key=last_use)[: len(files) - most // 2]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def source_line(library: Path, offset: int) -> int | None:
    """The line of the source that the code at `offset` in a kernel library comes from, if it can be told."""
    tool = shutil.which("addr2line")
    if tool is None:
        return None
    command = [tool, "-i", "-e", str(library), hex(offset)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # -i also lists the emulator headers inlined there; g++ gives the name of its input, not that of the #line
    match = re.search(r"(?:kernel\.cu|kernel\.ll|<stdin>):(\d+)", result.stdout)
    return int(match[1]) if match else None
