from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schedules.build.builder import build
from schedules.build.present import device_name
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import UsageError
from schedules.measure.timer import CpuTimer, CudaTimer, measure, random_tensors, timed_for
from tests.conftest import problem_of


def test_cpu_times_grow_with_the_work(host: Arch) -> None:
    def microseconds(n: int) -> float:
        built = build(problem_of("conv2d_hwcn", n=n, h=8, w=8, ci=32, co=32, kh=3, kw=3, pad=1), host)
        found = measure(built, seconds=0.2)
        assert found.runs >= 3
        assert found.p10_us <= found.median_us <= found.p90_us
        assert found.device == device_name(host)
        return found.median_us

    assert microseconds(256) > 2 * microseconds(16)


def test_data_is_random_and_outputs_are_poisoned(host: Arch) -> None:
    built = build(problem_of("softmax", rows=16, cols=64, dtype="float32"), host)
    x, y = random_tensors(built, 0)
    assert np.std(x.numpy()) > 0.1
    assert np.all(np.isnan(y.numpy()))


def test_no_such_device() -> None:
    built = build(problem_of("softmax", rows=16, cols=64), parse_arch("sm_75"), device_code=False)
    if device_name(built.arch):
        pytest.skip("there is an sm_75 GPU here")
    with pytest.raises(UsageError, match="no device for cuda:sm_75 here"):
        measure(built)


@pytest.mark.gpu
def test_a_gpu_copy_is_fast(gpu: Arch) -> None:
    from schedules.measure.timer import copy_bandwidth

    assert 100 < copy_bandwidth(2**28) < 20000


def test_calls_back_to_back_settle_first() -> None:
    counts = {}
    for evict in (True, False):
        calls: list[None] = []
        with CpuTimer(evict) as timer:
            assert len(timer.times(lambda calls=calls: calls.append(None), 5)) == 5
            assert (timer.flush_us > 100) == evict
        counts[evict] = len(calls)
    assert counts[True] == 5 < counts[False]


class FakeRuntime:
    """CUDA's runtime as a record of what was asked of it; a millisecond between any two events."""

    class cudaError_t:
        cudaSuccess = 0

    class cudaDeviceAttr:
        cudaDevAttrMaxPersistingL2CacheSize = 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def asked(*_: Any) -> tuple[int, float]:
            self.asked.append(name.removeprefix("cuda"))
            return 0, 1.0

        return asked


def test_what_a_cuda_call_is_timed_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that L2 was told to keep are reset, then two overwrites give the host a head start."""
    runtime = FakeRuntime()
    monkeypatch.setattr("schedules.measure.timer._cuda", lambda: runtime)
    with CudaTimer() as timer:
        runtime.asked.clear()
        assert timer.times(lambda: runtime.asked.append("call"), 1) == [1000.0]
        assert [name for name in runtime.asked if name != "EventCreate"] == [
            "DeviceSynchronize", "CtxResetPersistingL2Cache", "MemsetAsync", "MemsetAsync",
            "EventRecord", "call", "EventRecord", "DeviceSynchronize", "EventElapsedTime",
        ]  # fmt: skip


@pytest.mark.gpu
def test_nothing_that_l2_was_told_to_keep_is_found_there(gpu: Arch) -> None:
    """Such lines outlive an overwrite several times the cache's size; a call that found them would be too fast."""
    if "cp_async" not in gpu.features:
        pytest.skip(f"{gpu} has no L2 policies")
    problem = problem_of("softmax", rows=16384, cols=64)

    def median(streaming: str, timer: CudaTimer) -> float:
        built = build(problem, gpu, "frames", dict(threads=8, groups=8, streaming=streaming))
        function = built.module["main"]
        keeping = build(problem, gpu, "frames", dict(threads=8, groups=8, streaming="evict_last")).module["main"]
        tensors = random_tensors(built, 0)

        def times() -> float:
            keeping(*tensors)
            return timer.times(lambda: function(*tensors), 1)[0]

        return float(np.median([times() for _ in range(50)]))

    with CudaTimer() as timer:
        proper = median("no", timer)
        assert timer._keeps
        timer._keeps = False
        assert median("no", timer) < 0.97 * proper


def test_an_overwrite_is_timed_in_memory_that_was_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves only as memory is written, the first time slowly: what the trial's budget is divided by."""
    clock = 0.0

    class Memory:
        size, touched = 1, False

        def __iadd__(self, one: int) -> Memory:
            nonlocal clock
            clock += 1e-3 if self.touched else 1.0
            self.touched = True
            return self

    def call() -> None:
        nonlocal clock
        clock += 1e-3

    monkeypatch.setattr("schedules.measure.timer.np.zeros", lambda size: Memory())
    monkeypatch.setattr("schedules.measure.timer.time.perf_counter", lambda: clock)
    with CpuTimer() as timer:
        assert timer.flush_us == pytest.approx(1000)
        assert len(timed_for(timer, call, 0.1)) == 50
