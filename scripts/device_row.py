#!/usr/bin/env python3
"""The row of `schedules/core/device.py` for the NVIDIA GPU that is here, as its driver has it.

    scripts/device_row.py

Prints the row with what the driver says: multiprocessors, L2, memory bandwidth, power, and how many blocks with all of
a multiprocessor's shared memory it holds at once in clusters of 1 to 16.  Peaks are the datasheet's and stay to be
filled in; timings are another device's until a search ran on this one (docs/devices.md).
"""

from __future__ import annotations

if __name__ == "__main__":
    from schedules.core.interrupts import heed

    heed()  # while the imports below take their seconds, too

import argparse
import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from schedules.build.toolchain import devices
from schedules.build.toolchain.devices import LocalDevice
from schedules.cli.script import run_script
from schedules.core.arch import ARCHES, Arch
from schedules.core.device import MIB
from schedules.core.errors import DeviceError, UsageError

CLUSTERS = (1, 2, 4, 8, 16)
THREADS = 384  # of a block: three warpgroups
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_*
SHARED, NON_PORTABLE_CLUSTER = 8, 14  # CU_FUNC_ATTRIBUTE_*
KERNEL = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing()\n{\n ret;\n}\n\0"


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


def resident_blocks(arch: Arch) -> dict[int, int]:
    """Blocks with all of a multiprocessor's shared memory that the first GPU holds at once, by the size of their
    cluster; none where the arch has no clusters.  Raises DeviceError."""
    if "cluster" not in arch.features:
        return {}
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            raise DeviceError(f"{name} failed with error {code}; another process may hold the GPU, try again")

    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), KERNEL)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"nothing")
    call("cuFuncSetAttribute", kernel, NON_PORTABLE_CLUSTER, 1)
    call("cuFuncSetAttribute", kernel, SHARED, arch.shared_block)
    found = {}
    for cluster in CLUSTERS:
        attribute, count = Attribute(CLUSTER_DIMENSION, b"", (cluster, 1, 1)), ctypes.c_int()
        sizes = (cluster, 1, 1), (THREADS, 1, 1)
        launch = Launch(*sizes, arch.shared_block, None, ctypes.pointer(attribute), 1)
        call("cuOccupancyMaxActiveClusters", ctypes.byref(count), kernel, ctypes.byref(launch))
        found[cluster] = count.value * cluster
    return found


def watts() -> int | None:
    """What the first GPU may take; None where nvidia-smi does not say."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--id=0", "--query-gpu=power.max_limit", "--format=csv,noheader,nounits"]
    text = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return round(float(text)) if text.replace(".", "", 1).isdigit() else None


def row(here: LocalDevice, arch: Arch) -> str:
    """The row as Python."""
    l2 = f"{here.l2_bytes // MIB} * MIB" if here.l2_bytes else "None"
    return f"""Device(
    name={here.name!r},
    arch={arch.name!r},
    multiprocessors={here.multiprocessors},
    resident_blocks={resident_blocks(arch)},
    l2_bytes={l2},
    bandwidth={round(here.bandwidth) or None},
    watts={watts()},
    peaks={{}},  # dense, from the datasheet
)"""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(words)
    here = next(iter(devices.cuda()), None)
    if here is None:
        raise UsageError("no NVIDIA GPU here; run this where there is one")
    arch = next((arch for arch in ARCHES.values() if here.is_of(arch)), None)
    if arch is None:
        raise UsageError(f"no arch of compute capability {here.capability}; add one first (docs/devices.md)")
    print(row(here, arch))
    return 0


if __name__ == "__main__":
    run_script(main)
