"""What is installed, what is missing and how to get it, and what can be built, verified and run here."""

from __future__ import annotations

import platform
import re
import shutil
from dataclasses import dataclass
from importlib import metadata

from schedules.build.toolchain import cuda, devices, link
from schedules.build.toolchain.devices import LocalDevice
from schedules.bundle.package.driver import LoadError, driver_library
from schedules.core.arch import ARCHES, Arch
from schedules.core.errors import ToolchainError
from schedules.core.versions import version_of
from schedules.store.disk import disk


@dataclass(frozen=True)
class Part:
    """One thing that work here may need.  `found` is its version or place, None if missing; `ok` if it serves."""

    name: str
    found: str | None
    serves: str
    remedy: str
    ok: bool


@dataclass(frozen=True)
class TargetState:
    """What can be done for one target here; `verify` lists the routes, `device` is what defaults are meant for ("" for
    a CPU), `note` says what is in the way."""

    target: str
    build: bool
    verify: tuple[str, ...]
    run: bool
    device: str
    note: str


@dataclass(frozen=True)
class Report:
    """The state of this machine: what is installed, its devices, and what can be done for each target."""

    parts: tuple[Part, ...]
    devices: tuple[LocalDevice, ...]
    targets: tuple[TargetState, ...]

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


CUDA_COMPILER, CUDA_RUNTIME, AMD_LINKER, CPU_LINKER = "CUDA compiler", "CUDA runtime", "AMD linker", "linker"
CXX, DRIVER, HIP, DISASSEMBLER = "C++ compiler", "NVIDIA driver", "AMD runtime", "SASS disassembler"


def examine() -> Report:
    """Look at everything once."""
    parts = (*_packages(), *_tools())
    by_name = {part.name: part for part in parts}
    return Report(parts, devices.all_devices(), tuple(_target(arch, by_name) for arch in ARCHES.values()))


def _part(name: str, found: str | None, serves: str, remedy: str, ok: bool = True) -> Part:
    return Part(name, found, serves, remedy, found is not None and ok)


def _packages() -> list[Part]:
    python = platform.python_version()
    ok = (3, 10) <= tuple(int(number) for number in python.split(".")[:2]) < (3, 14)
    parts = [_part("python", python, "everything", "install Python 3.10 to 3.13", ok)]
    for name, wanted in _required().items():
        found = version_of(name)
        ok = found is not None and _satisfies(found, wanted)
        parts.append(_part(name, found, "everything", f"pip install '{name}{wanted}'", ok))
    for name, distributions, serves, extra in (
        ("xgboost", ("xgboost-cpu", "xgboost"), "cost model of the tuner", "tune"),
        ("torch", ("torch",), "the operators for PyTorch, comparison with it", "torch"),
        ("matplotlib", ("matplotlib",), "plots", "plot"),
    ):
        versions = [version for distribution in distributions if (version := version_of(distribution))]
        parts.append(_part(name, versions[0] if versions else None, serves, f"pip install 'te-schedules[{extra}]'"))
    return parts


def _required() -> dict[str, str]:
    """This package's requirements that hold everywhere: distribution to version range."""
    found = {}
    try:
        lines = metadata.requires("te-schedules") or []
    except metadata.PackageNotFoundError:
        lines = ["apache-tvm", "apache-tvm-ffi", "numpy"]  # run from a checkout that was not installed
    for line in lines:
        match = re.match(r"([\w.-]+)\s*([^;]*)$", line.strip())
        if match:
            found[match[1]] = match[2].strip("() ")
    return found


def _satisfies(version: str, wanted: str) -> bool:
    """Whether `version` lies in a range of ``>=a,<b`` parts; only their numbers count, post-releases after them."""

    def key(text: str) -> tuple[int, ...]:
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        return tuple(numbers + [0] * (6 - len(numbers)))

    for part in wanted.split(","):
        match = re.match(r"\s*(>=|<)\s*(\S+)", part)
        if match and (key(version) >= key(match[2])) != (match[1] == ">="):
            return False
    return True


def _tools() -> list[Part]:
    lld = link.find_lld()
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    lld_text = None if lld is None else lld[0] if len(lld) == 1 else " ".join(("python", *lld[1:]))
    return [
        _part(CUDA_COMPILER, _cuda_compiler(), "building for cuda", cuda.INSTALL),
        _part(CUDA_RUNTIME, _cuda_runtime(), "building for cuda", cuda.INSTALL),
        _part(DISASSEMBLER, cuda.find_tool("nvdisasm"), "inspect --view sass", "pip install nvidia-cuda-nvdisasm"),
        _part(AMD_LINKER, lld_text, "building for rocm", link.INSTALL),
        _part(CPU_LINKER, compiler or lld_text, "bundles", f"install a C compiler, or {link.INSTALL}"),
        _part(CXX, _cxx(), "verifying kernels for GPUs on the CPU", "install g++ (apt-get install g++) or set CXX"),
        _part(DRIVER, _driver(), "running on NVIDIA GPUs", "install NVIDIA's driver (nothing else here needs it)"),
        _part(HIP, _hip(), "running on AMD GPUs", "install ROCm, or PyTorch for ROCm (nothing else here needs it)"),
        _kept_kernels(),
    ]


def _kept_kernels() -> Part:
    folder = disk()
    size = sum(entry.nbytes for entry in folder.entries()) / 2**20
    remedy = folder.trouble() or "set SCHEDULES_CACHE to a folder that takes files"
    found = f"{folder.folder}, {size:.1f} MiB"
    return _part("kernels kept", found, "the first calls of a process", remedy, folder.takes_files())


def _cuda_compiler() -> str | None:
    if cuda.nvrtc_available():
        return f"nvrtc {version_of('nvidia-cuda-nvrtc') or ''}".strip()
    nvcc = shutil.which("nvcc")
    return nvcc and f"nvcc at {nvcc}"


def _cuda_runtime() -> str | None:
    try:
        cuda.load_cudart()
    except ToolchainError:
        return None
    return f"libcudart.so.13 {version_of('nvidia-cuda-runtime') or ''}".strip()


def _cxx() -> str | None:
    from schedules.check.emulate.toolchain import find_cxx

    try:
        return find_cxx()
    except ToolchainError:
        return None


def _driver() -> str | None:
    version = devices.driver_version()
    return version and f"for CUDA {version}"


def _hip() -> str | None:
    try:
        return str(driver_library("rocm")._name)
    except LoadError:
        return None


def _target(arch: Arch, parts: dict[str, Part]) -> TargetState:
    needs = {"llvm": (CPU_LINKER,), "cuda": (CUDA_COMPILER, CUDA_RUNTIME, CPU_LINKER), "rocm": (AMD_LINKER, CPU_LINKER)}
    missing = [name for name in needs[arch.kind] if not parts[name].ok]
    device = devices.of_arch(arch)
    run = not missing and device is not None and (arch.kind != "rocm" or parts[HIP].ok)
    # a GPU of a later minor version runs the code too, but what is measured there says little of its own arch
    exact = device is not None and (arch.kind == "llvm" or device.capability == arch.compute_capability)
    routes = (("device",) if run and exact else ()) + (("serial",) if arch.is_gpu else ())
    if arch.is_gpu and parts[CXX].ok:
        routes += ("emulated",)
    if missing:
        note = f"no {missing[0]}: {parts[missing[0]].remedy}"
    elif run and device:
        # TVM from PyPI generates code for AMD GPUs and has no runtime for them
        note = f"runs on {device.name}{', by load.py and schedules.torch' if arch.kind == 'rocm' else ''}"
    elif device:
        note = f"no {HIP}: {parts[HIP].remedy}"
    else:
        note = "no such device here"
    meant = str(devices.on_local(arch).device) if arch.is_gpu else ""
    return TargetState(str(arch), not missing, routes, run, meant, note)
