"""Measuring a built function on its device: medians over many runs, with cold caches.

On CUDA GPUs each run is timed between two events, after a write that evicts the L2 cache; the write also keeps the GPU
busy while the launch is queued, so that launch latency stays out of the time.  The method is that of Triton's do_bench.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tvm

from schedules.arch import ARCHES, Arch, physical_cores
from schedules.build import Built
from schedules.errors import ToolchainError, UsageError
from schedules.operator import Array

FLUSH_BYTES = 256 * 2**20  # several times any L2 or last-level cache


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one call: median and the 10th and 90th percentile over `runs` calls."""

    median_us: float
    p10_us: float
    p90_us: float
    runs: int
    device: str


def tvm_device(arch: Arch) -> Any:
    return {"llvm": tvm.cpu, "cuda": tvm.cuda, "rocm": tvm.rocm}[arch.kind](0)


@lru_cache
def device_name(arch: Arch) -> str | None:
    """The device of this arch that is present here, or None."""
    if arch.kind == "llvm":
        return cpu_name() if arch.name == "host" else None
    if arch.kind == "cuda":
        from schedules.toolchain import cuda

        if not cuda.driver_present():
            return None
        try:
            cuda.ensure_runtime()
        except ToolchainError:
            return None
    elif not tvm.runtime.enabled("rocm"):
        return None
    device = tvm_device(arch)
    if not device.exist:
        return None
    if arch.kind == "cuda" and str(device.compute_version) != arch.compute_capability:
        return None
    return str(device.device_name)


@lru_cache
def local_gpu() -> Arch | None:
    """The arch of the CUDA GPU in this machine, or None."""
    return next((arch for arch in ARCHES.values() if arch.kind == "cuda" and device_name(arch) is not None), None)


def cpu_name() -> str:
    """The CPU's name and how many of its cores this process may use."""
    name = "CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    name = line.split(":", 1)[1].strip()
                    break
    except OSError:
        pass  # no /proc: the generic name serves
    return f"{name} x{physical_cores()}"


def to_device(array: Array, arch: Arch) -> Any:
    """A tensor on the arch's device with `array`'s contents."""
    return tvm.runtime.tensor(array, tvm_device(arch))


def random_tensors(built: Built, seed: int) -> list[Any]:
    """The arguments of `built` on its device: random inputs, outputs filled with NaN."""
    from schedules.verify import poisoned

    inputs = built.operator.inputs(built.problem, np.random.default_rng(seed))
    return [to_device(array, built.arch) for array in (*inputs, *poisoned(built.problem))]


def measure(built: Built, *, seconds: float = 0.5, seed: int = 0, tensors: list[Any] | None = None) -> Measurement:
    """Time `built` on its device for about `seconds`, on random data or on `tensors`.

    Raises UsageError if there is no such device here.
    """
    name = device_name(built.arch)
    if name is None:
        raise UsageError(f"no device for {built.arch} here; measure on a machine that has one, or use --target llvm")
    tensors = tensors if tensors is not None else random_tensors(built, seed)
    function = built.module["main"]

    def call() -> None:
        function(*tensors)

    times = (time_cuda if built.arch.kind == "cuda" else time_cpu)(call, seconds)
    p10, median, p90 = (float(value) for value in np.percentile(times, (10, 50, 90)))
    return Measurement(median, p10, p90, len(times), name)


def time_cpu(call: Callable[[], None], seconds: float) -> list[float]:
    """Microseconds of each of several calls, the caches overwritten before each."""
    trash = np.zeros(FLUSH_BYTES // 8)

    def once(cold: bool) -> float:
        if cold:
            trash[...] += 1
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    first = min(once(cold=False), once(cold=False))
    flush = 0.1  # seconds of an overwrite, roughly; counted so that the whole stays near `seconds`
    runs = max(3, min(200, math.ceil(seconds / (first * 1e-6 + flush))))
    return [once(cold=True) for _ in range(runs)]


def time_cuda(call: Callable[[], None], seconds: float) -> list[float]:
    """Microseconds of each of several calls on the default stream, the L2 cache evicted before each."""
    from cuda.bindings import runtime

    def ok(result: tuple[Any, ...]) -> Any:
        if result[0] != runtime.cudaError_t.cudaSuccess:
            raise UsageError(f"CUDA failed while measuring: {result[0].name}")
        return result[1] if len(result) > 1 else None

    trash = ok(runtime.cudaMalloc(FLUSH_BYTES))
    pairs: list[tuple[Any, Any]] = []
    try:

        def timed(count: int) -> list[float]:
            while len(pairs) < count:
                pairs.append((ok(runtime.cudaEventCreate()), ok(runtime.cudaEventCreate())))
            for start, stop in pairs[:count]:
                ok(runtime.cudaMemsetAsync(trash, 0, FLUSH_BYTES, 0))
                ok(runtime.cudaEventRecord(start, 0))
                call()
                ok(runtime.cudaEventRecord(stop, 0))
            ok(runtime.cudaDeviceSynchronize())
            return [1e3 * float(ok(runtime.cudaEventElapsedTime(start, stop))) for start, stop in pairs[:count]]

        first = float(np.median(timed(5)))
        flush_us = FLUSH_BYTES / 3e6  # at about 3 TB/s
        timed(max(3, min(50, round(0.2 * seconds * 1e6 / (first + flush_us)))))  # warm-up
        return timed(max(10, min(1000, round(seconds * 1e6 / (first + flush_us)))))
    finally:
        for pair in pairs:
            for event in pair:
                ok(runtime.cudaEventDestroy(event))
        ok(runtime.cudaFree(trash))


def copy_bandwidth(nbytes: int, seconds: float = 0.2) -> float:
    """GB/s of a device-to-device copy of `nbytes` on the CUDA GPU, counting bytes read and bytes written: the ceiling
    of work that moves memory."""
    from cuda.bindings import runtime

    buffers = []
    for _ in range(2):
        status, pointer = runtime.cudaMalloc(nbytes)
        if status != runtime.cudaError_t.cudaSuccess:
            raise UsageError(f"no room for a copy of {nbytes} bytes: {status.name}")
        buffers.append(pointer)
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    try:
        times = time_cuda(lambda: runtime.cudaMemcpyAsync(buffers[1], buffers[0], nbytes, kind, 0), seconds)
    finally:
        for pointer in buffers:
            runtime.cudaFree(pointer)
    return 2 * nbytes / float(np.median(times)) / 1e3
