"""The devices that are here: their names as TVM tells them, and tensors on them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from schedules.build.toolchain.devices import on_local
from schedules.core.arch import ARCHES, Arch, physical_cores
from schedules.core.cpu import cpu_model
from schedules.core.errors import ToolchainError
from schedules.core.operator import Array
from schedules.core.tvm import tvm


def tvm_device(arch: Arch) -> Any:
    """TVM's first device for `arch`."""
    return {"llvm": tvm.cpu, "cuda": tvm.cuda, "rocm": tvm.rocm}[arch.kind](0)


@lru_cache
def device_name(arch: Arch) -> str | None:
    """The device of this arch that is present here, or None."""
    if arch.kind == "llvm":
        return cpu_name() if arch.name == "host" else None
    if arch.kind == "cuda":
        from schedules.build.toolchain import cuda

        if not cuda.driver_present():
            return None
        try:
            cuda.ensure_runtime()
        except ToolchainError:
            return None
    else:
        if not tvm.runtime.enabled("rocm"):
            return None
    device = tvm_device(arch)
    if not device.exist:
        return None
    if arch.kind == "cuda" and str(device.compute_version) != arch.compute_capability:
        return None
    return str(device.device_name)


@lru_cache
def local_gpu() -> Arch | None:
    """The arch of the CUDA GPU in this machine, for that GPU, or None."""
    here = next((arch for arch in ARCHES.values() if arch.kind == "cuda" and device_name(arch) is not None), None)
    return here and on_local(here)


def cpu_name() -> str:
    """The CPU's name and how many of its cores this process may use."""
    return f"{cpu_model() or 'CPU'} x{physical_cores()}"


def to_device(array: Array, arch: Arch) -> Any:
    """A tensor on the arch's device with `array`'s contents."""
    return tvm.runtime.tensor(array, tvm_device(arch))
