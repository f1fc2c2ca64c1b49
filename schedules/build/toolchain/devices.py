"""The devices of this machine, asked without TVM: its own detection wants a runtime that may not load.  And the device
that defaults for a target are meant for.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from schedules.core.arch import ARCHES, Arch
from schedules.core.cpu import cpu_model
from schedules.core.device import DEVICES, Device, find_device, slug
from schedules.core.errors import UnknownNameError

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# LLVM's names of the x86 features that change which instructions it selects, and Linux's names of the same
_X86_FEATURES = {
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "sse4a": "sse4a",
    "popcnt": "popcnt",
    "movbe": "movbe",
    "lzcnt": "abm",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "gfni": "gfni",
    "avxvnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512dq": "avx512dq",
    "avx512cd": "avx512cd",
    "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
}
# of CUdevice_attribute: the count, kHz, bits and bytes; the two of the compute capability
_MULTIPROCESSORS, _MEMORY_CLOCK, _MEMORY_BUS, _L2, _MAJOR, _MINOR = 16, 36, 37, 38, 75, 76


@dataclass(frozen=True)
class LocalDevice:
    """One device: `kind` of arch it runs, its name, and its compute capability ("9.0") or AMD processor ("gfx942").

    The rest is what the driver says of a GPU, 0 where that is nothing; `bandwidth` is its memory's, in GB/s.
    """

    kind: str
    name: str
    capability: str
    multiprocessors: int = 0
    l2_bytes: int = 0
    bandwidth: float = 0.0

    def runs(self, arch: Arch) -> bool:
        """Whether code built for `arch` runs here."""
        return self.kind == arch.kind and (arch.kind == "llvm" or arch.runs_on(self.capability))

    def is_of(self, arch: Arch) -> bool:
        """Whether it is a GPU of just this arch, and not only one that runs its code."""
        return self.kind == arch.kind == "cuda" and self.capability == arch.compute_capability

    def newest_arch(self) -> Arch | None:
        """The newest arch whose code runs here; None if there is none."""
        return next((arch for arch in reversed(ARCHES.values()) if self.runs(arch)), None)

    def row(self, arch: Arch) -> Device:
        """The device as data: its row; for one without, or a part of a GPU, what the driver says, with the timings of
        the device that `arch` is for."""
        row = find_device(self.name)
        if row and row.arch == arch.name and self.multiprocessors in (0, row.multiprocessors):
            return row
        if not self.multiprocessors:
            return arch.device
        return Device(
            name=self.name,
            arch=arch.name,
            multiprocessors=self.multiprocessors,
            l2_bytes=self.l2_bytes or None,
            bandwidth=self.bandwidth or None,
            timings=arch.device.timings,
        )


@lru_cache
def cpu() -> LocalDevice:
    """This machine's processor."""
    return LocalDevice("llvm", cpu_model() or platform.processor() or platform.machine(), platform.machine())


@lru_cache
def cuda() -> tuple[LocalDevice, ...]:
    """The NVIDIA GPUs that the driver shows to this process; none if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    # the stand-in driver used for cross-building has no cuInit
    if not hasattr(driver, "cuInit") or driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)

        def attribute(number: int, device: ctypes.c_int = device) -> int:
            value = ctypes.c_int()
            return 0 if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

        found.append(
            LocalDevice(
                kind="cuda",
                name=name.value.decode(errors="replace"),
                capability=f"{attribute(_MAJOR)}.{attribute(_MINOR)}",
                multiprocessors=attribute(_MULTIPROCESSORS),
                l2_bytes=attribute(_L2),
                # two transfers in a clock
                bandwidth=round(2 * attribute(_MEMORY_CLOCK) * attribute(_MEMORY_BUS) / 8e6),
            )
        )
    return tuple(found)


@lru_cache
def driver_version() -> str | None:
    """The newest CUDA version that NVIDIA's driver supports ("13.0"); None if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if not hasattr(driver, "cuDriverGetVersion") or driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


@lru_cache
def rocm() -> tuple[LocalDevice, ...]:
    """The AMD GPUs that the kernel driver shows."""
    found = []
    for node in sorted(KFD_NODES.glob("*/properties")):
        try:
            words = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
        except OSError:
            continue  # a node that this user may not read is not usable either
        version = int(words.get("gfx_target_version", 0))
        if version:
            name = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            found.append(LocalDevice("rocm", f"AMD {name}", name))
    return tuple(found)


def all_devices() -> tuple[LocalDevice, ...]:
    """The CPU and every GPU of this machine."""
    return (cpu(), *cuda(), *rocm())


def of_arch(arch: Arch) -> LocalDevice | None:
    """The first device here that runs code built for `arch`; None if there is none."""
    return next((device for device in all_devices() if device.runs(arch)), None)


def on_local(arch: Arch) -> Arch:
    """`arch` for the GPU that is here; as it is where none of this arch is."""
    here = next((device for device in cuda() if device.is_of(arch)), None) if arch.kind == "cuda" else None
    return arch.on(here.row(arch)) if here else arch


def on_named(arch: Arch, name: str, recorded: Iterable[str] = ()) -> Arch:
    """`arch` for the GPU that is called `name`, of those that are here or have a row; as it is for one of which only
    the names in journals, `recorded`, are known.  Names of CPUs say nothing.

    Raises UnknownNameError with the nearest name, UsageError if the device is not of `arch`.
    """
    if not arch.is_gpu or slug(name) == slug(arch.device.name):
        return arch
    for device in cuda():
        if slug(device.name) == slug(name) and device.runs(arch):
            return arch.on(device.row(arch))
    row = find_device(name)
    if slug(name) in map(slug, recorded) and (row is None or row.arch != arch.name):
        return arch
    if row:
        return arch.on(row)
    here = (device.name for device in cuda())
    raise UnknownNameError("device", name, {*here, *recorded, *(device.name for device in DEVICES.values())})


def needed_features(mcpu: str | None) -> tuple[str, ...]:
    """The x86 features, by Linux's names, that LLVM may use in code for `mcpu`; none if there is no `mcpu`."""
    if mcpu is None or platform.machine() != "x86_64":
        return ()
    from tvm.target import Target, codegen

    has = {str(feature) for feature in codegen.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": mcpu}))}
    return tuple(sorted(linux for llvm, linux in _X86_FEATURES.items() if llvm in has))
