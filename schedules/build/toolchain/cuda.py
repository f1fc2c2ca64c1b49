"""CUDA C++ to cubin, with or without a GPU, a driver or a CUDA toolkit on the machine.

NVRTC from NVIDIA's wheels is preferred: it needs no C++ compiler and gives PTX, cubin and ptxas's report at once.
An nvcc on PATH serves otherwise.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from schedules.build.toolchain.command import run_tool
from schedules.build.toolchain.nvrtc_headers import stand_ins
from schedules.build.toolchain.runtime import load_runtime
from schedules.build.toolchain.stub_elf import shared_library
from schedules.core.errors import BuildError, ToolchainError
from schedules.core.process import kept_signals
from schedules.core.versions import version_of

INSTALL = "pip install 'te-schedules[cuda]'"
# what libtvm_runtime_cuda.so needs of the driver
_DRIVER_FUNCTIONS = [
    "cuDeviceGetName",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeTiled",
]
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# generated code uses <math.h>'s INFINITY, which NVRTC does not know
_NVRTC_PREAMBLE = """#ifndef INFINITY
#define INFINITY (__int_as_float(0x7f800000))
#endif
#line 1
"""
# cuda.h's, which generated code names only; a kernel that takes one by value needs its size
_TENSOR_MAP = (
    "struct CUtensorMap_st { alignas(128) unsigned long long opaque[16]; }; typedef CUtensorMap_st CUtensorMap;\n"
)
_COMMON = ("--use_fast_math", "--std=c++17")


@dataclass(frozen=True)
class Cubin:
    """What the CUDA compiler made of one source text."""

    cubin: bytes
    ptx: str
    log: str  # ptxas -v
    compiler: str


@dataclass(frozen=True)
class KernelResources:
    """The compiler's account of one kernel: registers of a thread, bytes of shared memory of a block; of the stack of a
    thread, and of it what registers are spilled to, as stored and as loaded (LLVM says once how much it is)."""

    name: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def spilled(self) -> int:
        """Bytes that spills move."""
        return self.spill_stores + self.spill_loads


def compile_cuda(source: str, arch: str) -> Cubin:
    """Compile CUDA C++ `source` for `arch` (sm_90a).

    Raises ToolchainError if there is no compiler, BuildError with the compiler's first error if it refuses.
    """
    if nvrtc_available():
        return _nvrtc(source, arch)
    if shutil.which("nvcc"):
        return _nvcc(source, arch)
    raise ToolchainError(f"no CUDA compiler found; {INSTALL}, or put nvcc on PATH")


@lru_cache
def nvrtc_available() -> bool:
    """Whether NVRTC, its Python binding and the CUDA headers are all there."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return False
    if include_dir() is None:
        return False
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        return False
    return True


@lru_cache
def include_dir() -> Path | None:
    """The folder with cuda_fp16.h and cccl: NVIDIA's wheels, or the toolkit of the nvcc on PATH."""
    candidates: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        candidates += sorted(Path(root).glob("cu*/include"), reverse=True)
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(Path(nvcc).resolve().parent.parent / "include")
    candidates.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include")
    return next((path for path in candidates if (path / "cuda_fp16.h").is_file() and (path / "cccl").is_dir()), None)


def require_headers(source: str) -> None:
    """Raise ToolchainError if NVRTC would compile `source`, which includes mma.h, and what that includes is missing."""
    include = include_dir()
    if "<mma.h>" in source and nvrtc_available() and include and not (include / "crt" / "mma.h").is_file():
        raise ToolchainError(f"crt/mma.h, which wmma kernels need, is not in {include}; {INSTALL}")


def _nvrtc(source: str, arch: str) -> Cubin:
    from cuda.bindings import nvrtc

    require_headers(source)
    include = include_dir()
    # cuda.h is host code; NVRTC has its own definitions of what kernels need of it
    tensor_map = _TENSOR_MAP if "CUtensorMap" in source else ""
    text = tensor_map + _NVRTC_PREAMBLE + source.replace("#include <cuda.h>\n", "\n")
    options = [
        f"--gpu-architecture={arch}",
        "-default-device",
        "--device-int128",
        "--minimal",  # without textures and types of the runtime, which take 4 ms to read and no kernel has
        f"-I{include}",
        f"-I{include}/cccl",
        "--ptxas-options=-v",
        *_COMMON,
    ]

    def ok(result: tuple[nvrtc.nvrtcResult, ...]) -> int:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"NVRTC failed: {result[0].name}")
        return int(result[1]) if len(result) > 1 else 0

    headers = {name.encode(): header.encode() for name, header in stand_ins(source).items()}
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode(), b"kernel.cu", len(headers), list(headers.values()), list(headers)
    )
    ok((status,))
    # which has handlers of its own for a while, that end the process without a word
    with kept_signals(signal.SIGINT, signal.SIGTERM):
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytes(ok(nvrtc.nvrtcGetProgramLogSize(program)))
    ok(nvrtc.nvrtcGetProgramLog(program, log))
    text_log = log.decode(errors="replace").strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"NVRTC refused the generated source: {_first_error(text_log)}")
    ptx = bytes(ok(nvrtc.nvrtcGetPTXSize(program)))
    ok(nvrtc.nvrtcGetPTX(program, ptx))
    cubin = bytes(ok(nvrtc.nvrtcGetCUBINSize(program)))
    ok(nvrtc.nvrtcGetCUBIN(program, cubin))
    ok(nvrtc.nvrtcDestroyProgram(program))
    _, major, minor = nvrtc.nvrtcVersion()
    return Cubin(cubin, ptx.decode().rstrip("\0"), text_log, f"nvrtc {major}.{minor}")


def _nvcc(source: str, arch: str) -> Cubin:
    number = arch.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.cu").write_text(source)
        log = ""
        for kind, code in (("ptx", f"compute_{number}"), ("cubin", f"sm_{number}")):
            command = ["nvcc", f"-{kind}", "-O3", "-gencode", f"arch=compute_{number},code={code}", "-Xptxas", "-v"]
            command += [*_COMMON, "-o", f"{folder}/kernel.{kind}", f"{folder}/kernel.cu"]
            done = run_tool(command)
            log += done.stdout + done.stderr
            if done.returncode:
                raise BuildError(f"nvcc refused the generated source: {_first_error(log)}")
        version = run_tool(["nvcc", "--version"]).stdout
        found = re.search(r"release (\S+),", version)
        return Cubin(
            (Path(folder) / "kernel.cubin").read_bytes(),
            (Path(folder) / "kernel.ptx").read_text(),
            log,
            f"nvcc {found[1] if found else 'of unknown version'}",
        )


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line]
    return lines[0] if lines else (log.strip().splitlines() or ["no message"])[-1]


def parse_resources(log: str) -> tuple[KernelResources, ...]:
    """ptxas -v's report, one entry for each kernel in it."""
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.split("'", 1)[0]

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        found.append(
            KernelResources(
                name=name,
                registers=number(r"Used (\d+) registers"),
                shared=number(r"(\d+) bytes smem"),
                stack=number(r"(\d+) bytes stack frame"),
                spill_stores=number(r"(\d+) bytes spill stores"),
                spill_loads=number(r"(\d+) bytes spill loads"),
            )
        )
    return tuple(found)


@lru_cache
def driver_present() -> bool:
    """Whether the NVIDIA driver's library loads here."""
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


@lru_cache
def ensure_runtime() -> None:
    """Load TVM's CUDA runtime, so that an exported .so holds a cubin.

    Without a driver the library only loads beside a stand-in for ``libcuda.so.1``, whose functions answer "no device".
    Raises ToolchainError if the CUDA runtime library is not installed.
    """
    import tvm_ffi

    load_runtime()
    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None:
        return
    if not driver_present():
        descriptor = os.memfd_create("libcuda.so.1")
        os.write(descriptor, shared_library("libcuda.so.1", _DRIVER_FUNCTIONS, _NO_DEVICE))
        ctypes.CDLL(f"/proc/self/fd/{descriptor}", ctypes.RTLD_GLOBAL)
        os.close(descriptor)
    load_cudart()
    load_runtime("libtvm_runtime_cuda.so")
    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise ToolchainError(
            "libtvm_runtime_cuda.so does not register a CUDA module; this TVM is not one that was tried"
        )


def load_cudart() -> None:
    """Load libcudart.so.13 from NVIDIA's wheel or the system.  Raises ToolchainError."""
    try:
        ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass  # not on the loader's path: try the wheels
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.pathfinder") is not None:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

        try:
            load_nvidia_dynamic_lib("cudart")
            return
        except DynamicLibNotFoundError:
            pass  # reported below, with the remedy
    raise ToolchainError(f"libcudart.so.13 not found; {INSTALL}")


@lru_cache
def compiler_installed() -> str:
    """What `compile_cuda` would use, as far as that can be told without loading it."""
    nvcc = shutil.which("nvcc")
    return f"nvrtc {version_of('nvidia-cuda-nvrtc')}, nvcc {nvcc and os.stat(nvcc).st_mtime}"


def find_tool(name: str) -> str | None:
    """The path of ``nvdisasm`` or ``cuobjdump``: from NVIDIA's wheels or PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(root).glob(f"cu*/bin/{name}"), reverse=True):
            return str(path)
    return shutil.which(name)


def disassemble(cubin: bytes) -> str:
    """SASS of `cubin`.  Raises ToolchainError if no disassembler is installed, BuildError if it fails."""
    tool = find_tool("nvdisasm")
    if tool is None:
        raise ToolchainError("no SASS disassembler found; pip install nvidia-cuda-nvdisasm, or put nvdisasm on PATH")
    return _disassembled(tool, cubin)


@lru_cache(maxsize=4)  # one kernel is looked at in several ways, and nvdisasm takes a quarter of a second to start
def _disassembled(tool: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = run_tool([tool, "-c", "-ndf", file.name])
    if done.returncode:
        raise BuildError(f"nvdisasm failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
