"""Measuring a built function on its device: many runs, with cold caches, and what stands for them.

What other work adds to a call's time on a CPU is only ever more, and easily more than the call itself: threads wait for
each other's turns.  So calls are timed ahead of other work where the system allows that, and kernels are judged by a
low percentile.  A GPU's times are judged by their median.

On CUDA GPUs each run is timed between two events, after a write that evicts the L2 cache; the write also keeps the GPU
busy while the launch is queued, so that launch latency stays out of the time.  The method is that of Triton's do_bench,
but for one thing: lines that a kernel had the cache keep (evict_last) outlive such a write, and would be hits of the
next run, so they are made ordinary lines first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from schedules.build.builder import Built
from schedules.build.present import device_name, to_device
from schedules.core.arch import Arch
from schedules.core.cpu import MOST_CACHE, last_level_cache
from schedules.core.errors import DeviceError, UsageError
from schedules.core.memory import require_memory
from schedules.measure.neighbours import ahead_of_others

FLUSH_BYTES = 2 * MOST_CACHE  # several times any L2 or last-level cache


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one call: median and the 10th and 90th percentile over `runs` calls."""

    median_us: float
    p10_us: float
    p90_us: float
    runs: int
    device: str


def poison_cuda(pointer: int, nbytes: int) -> None:
    """Fill device memory with bytes 0xFF: NaN in each float format."""
    _ok(_cuda().cudaMemset(pointer, 0xFF, nbytes))


def random_tensors(built: Built, seed: int) -> list[Any]:
    """The arguments of `built` on its device: random inputs, outputs filled with NaN."""
    from schedules.check.verify import poisoned

    require_memory(built.problem)
    inputs = built.operator.inputs(built.problem, np.random.default_rng(seed))
    return [to_device(array, built.arch) for array in (*inputs, *poisoned(built.problem))]


def measure(built: Built, *, seconds: float = 0.5, seed: int = 0) -> Measurement:
    """Time `built` on its device for about `seconds`, on random data.

    Raises UsageError if there is no such device here.
    """
    name = device_name(built.arch)
    if name is None:
        raise UsageError(f"no device for {built.arch} here; measure on a machine that has one, or use --target llvm")
    tensors = random_tensors(built, seed)
    function = built.module["main"]
    with timer_of(built.arch) as timer:
        return summary(timed_for(timer, lambda: function(*tensors), seconds), name)


def summary(times: Sequence[float], device: str) -> Measurement:
    """Median and spread of `times`, in microseconds."""
    p10, median, p90 = (float(value) for value in np.percentile(times, (10, 50, 90)))
    return Measurement(median, p10, p90, len(times), device)


class Timer(Protocol):
    """A stopwatch for one kind of device, with the caches overwritten before each call."""

    percentile: int  # of its times, by which a call is judged
    flush_us: float  # about what an overwrite takes
    fewest: int  # calls of one measurement at least
    most: int  # and at most

    def times(self, call: Callable[[], None], count: int) -> list[float]:
        """Microseconds of each of `count` calls."""

    def __enter__(self) -> Timer: ...

    def __exit__(self, *_: object) -> None: ...


def timer_of(arch: Arch) -> Timer:
    """What times calls on devices of `arch`."""
    return CudaTimer() if arch.kind == "cuda" else CpuTimer()


def timed_for(timer: Timer, call: Callable[[], None], seconds: float) -> list[float]:
    """Microseconds of each of the calls that about `seconds` allow, after a warm-up of a fifth of that."""
    first = float(np.median(timer.times(call, 2)))
    each = first + timer.flush_us
    timer.times(call, max(1, min(50, round(0.2 * seconds * 1e6 / each))))
    return timer.times(call, max(timer.fewest, min(timer.most, round(seconds * 1e6 / each))))


def timed_until(
    timer: Timer, call: Callable[[], None], seconds: float, precision: float, limit_us: float
) -> list[float]:
    """Microseconds of calls until the median is known to within `precision` (a fraction), or `seconds` have passed.

    A call that takes longer than `limit_us` in each of three cold runs is given up after them.
    """
    times = timer.times(call, 3)
    if min(times) > limit_us:
        return times
    deadline = time.perf_counter() + seconds
    times = timer.times(call, timer.fewest)
    while len(times) < timer.most and uncertainty(times) > precision and time.perf_counter() < deadline:
        times += timer.times(call, min(len(times), timer.most - len(times)))
    return times


def uncertainty(times: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the median, as a fraction of it.

    The interval runs between two order statistics (Conover, "Practical Nonparametric Statistics", section 3.2).
    """
    ordered, count = sorted(times), len(times)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return (ordered[high] - ordered[low]) / 2 / ordered[count // 2]


class CpuTimer:
    """Wall-clock time of calls on this machine's CPU, ahead of other work: each with the caches evicted before it or,
    without `evict`, back to back, after some that are not timed.

    Threads that wait for work fall asleep while caches are evicted, and a call then begins with waking them; other
    libraries' threads, which wait awake for a while, disturb the first of calls back to back.
    """

    percentile = 10
    fewest, most = 3, 200
    settling = 0.02  # seconds of calls that are not timed

    def __init__(self, evict: bool = True) -> None:
        self.before: Callable[[], object] = lambda: None  # what runs before each call, untimed: a neighbour's work
        self._trash = np.zeros(2 * last_level_cache() // 8 if evict else 0)
        self._trash += 1  # the first touch, which the system answers with pages, takes several times as long
        start = time.perf_counter()
        self._trash += 1
        self.flush_us = (time.perf_counter() - start) * 1e6

    def times(self, call: Callable[[], None], count: int) -> list[float]:
        with ahead_of_others():
            end = time.perf_counter() + self.settling
            while not self._trash.size and time.perf_counter() < end:
                call()
            found = []
            for _ in range(count):
                self._trash += 1
                self.before()
                start = time.perf_counter()
                call()
                found.append((time.perf_counter() - start) * 1e6)
            return found

    def __enter__(self) -> CpuTimer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class CudaTimer:
    """Time between two events around each call on the default stream, with nothing of an earlier one in L2."""

    percentile = 50
    fewest, most = 10, 1000
    overwrites = 2  # one does for the cache; the host takes longer to queue torch.compile's calls (torch_overhead.json)
    flush_us = overwrites * FLUSH_BYTES / 3e6  # at about 3 TB/s

    def __init__(self) -> None:
        runtime = _cuda()
        self._trash = _ok(runtime.cudaMalloc(FLUSH_BYTES))
        kept = runtime.cudaDeviceAttr.cudaDevAttrMaxPersistingL2CacheSize
        self._keeps = bool(_ok(runtime.cudaDeviceGetAttribute(kept, _ok(runtime.cudaGetDevice()))))
        self._pairs: list[tuple[Any, Any]] = []

    def times(self, call: Callable[[], None], count: int) -> list[float]:
        runtime = _cuda()
        while len(self._pairs) < count:
            self._pairs.append((_ok(runtime.cudaEventCreate()), _ok(runtime.cudaEventCreate())))
        for start, stop in self._pairs[:count]:
            if self._keeps:
                _ok(runtime.cudaDeviceSynchronize())  # the reset is no part of the stream
                _ok(runtime.cudaCtxResetPersistingL2Cache())
            for _ in range(self.overwrites):
                _ok(runtime.cudaMemsetAsync(self._trash, 0, FLUSH_BYTES, 0))
            _ok(runtime.cudaEventRecord(start, 0))
            call()
            _ok(runtime.cudaEventRecord(stop, 0))
        _ok(runtime.cudaDeviceSynchronize())
        return [1e3 * float(_ok(runtime.cudaEventElapsedTime(*pair))) for pair in self._pairs[:count]]

    def __enter__(self) -> CudaTimer:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the memory back.  After a CUDA error nothing can be, and the error is what matters."""
        for pair in self._pairs:
            for event in pair:
                _cuda().cudaEventDestroy(event)
        _cuda().cudaFree(self._trash)
        self._pairs = []


def _cuda() -> Any:
    from cuda.bindings import runtime

    return runtime


def _ok(result: tuple[Any, ...]) -> Any:
    if result[0] != _cuda().cudaError_t.cudaSuccess:
        raise DeviceError(f"CUDA failed while measuring: {result[0].name}")
    return result[1] if len(result) > 1 else None


def time_cuda(call: Callable[[], None], seconds: float) -> list[float]:
    """Microseconds of each of several calls on the default stream, the L2 cache evicted before each."""
    with CudaTimer() as timer:
        return timed_for(timer, call, seconds)


def copy_bandwidth(nbytes: int) -> float:
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
        times = time_cuda(lambda: runtime.cudaMemcpyAsync(buffers[1], buffers[0], nbytes, kind, 0), 0.2)
    finally:
        for pointer in buffers:
            runtime.cudaFree(pointer)
    return 2 * nbytes / float(np.median(times)) / 1e3
