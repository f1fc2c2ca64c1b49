"""Who does the work of a search: processes that build, and one process for each device that measures.

A crew takes jobs and returns futures of their results.  Whatever a candidate does to its process is a `Failure`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from schedules.arch import Arch
from schedules.errors import TuningError
from schedules.problem import Problem
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.process import ScratchFolder, memory_share
from schedules.tune.strategy import Candidate
from schedules.tune.workers import BuildPool, DeviceProcess, Job, need_pebble, settle

__all__ = ["Crew", "Job", "LocalCrew", "visible_devices"]


class Crew(Protocol):
    """Processes that build and measure for one arch on devices of one name."""

    device: str
    versions: dict[str, str]
    exclusive: bool  # building disturbs the timing, so they must take turns

    @property
    def slots(self) -> int:
        """Devices that measure at once."""

    @property
    def builders(self) -> int:
        """Processes that build at once."""

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]: ...

    def measure(self, job: Job) -> Future[Any]: ...

    def state(self) -> list[str]:
        """For each device what it is doing, in a word."""

    def close(self) -> None: ...


class LocalCrew:
    """The crew of this machine.

    `devices` are the GPUs' numbers as CUDA counts them, by default all; `builders` the processes that build, by default
    one for each core; `memory` the bytes that each process may use, by default its share; timeouts are in seconds.
    Raises UsageError if there is no device, ToolchainError if pebble is not installed.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        builders: int | None = None,
        devices: Sequence[int] | None = None,
        build_timeout: float = 60.0,
        measure_timeout: float = 30.0,
        memory: int | None = None,
    ) -> None:
        need_pebble()
        self.arch = arch
        self.builders = builders or len(os.sched_getaffinity(0))
        self.exclusive = not arch.is_gpu
        self._closed = False
        self._devices: list[DeviceProcess] = []
        self._threads: list[threading.Thread] = []
        self._folder = ScratchFolder()
        try:
            memory = memory or memory_share(self.builders + 1)
            self._building = BuildPool(arch, self.builders, self._folder.path, memory, build_timeout)
            for visible in visible_devices(devices) if arch.kind == "cuda" else [""]:
                limit = None if arch.is_gpu else memory
                self._devices.append(DeviceProcess(arch, self._folder.path, limit, visible, measure_timeout))
            self.slots = len(self._devices)
            found = [device.describe() for device in self._devices]
            self.device, self.versions = found[0].result()
            if others := sorted({name for future in found[1:] if (name := future.result()[0]) != self.device}):
                raise TuningError(f"the GPUs differ ({self.device}, {others[0]}); tune them apart, with --gpus")
        except BaseException:
            self.close()
            raise
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Any]]] = queue.SimpleQueue()
        for device in self._devices:
            self._threads.append(threading.Thread(target=self._serve, args=(device,), daemon=True))
            self._threads[-1].start()

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        return self._building.build(problem, candidate)

    def measure(self, job: Job) -> Future[Any]:
        done: Future[Any] = Future()
        self._jobs.put((job, done))
        return done

    def _serve(self, device: DeviceProcess) -> None:
        """Hand `device` one job at a time."""
        while not self._closed:
            device.state = "idle"
            try:
                job, done = self._jobs.get(timeout=0.5)
            except queue.Empty:
                continue
            if done.set_running_or_notify_cancel():
                try:
                    settle(done, device.run(job))
                except BaseException as error:
                    settle(done, error=error)

    def state(self) -> list[str]:
        return [device.state for device in self._devices]

    def close(self) -> None:
        """Stop every process.  Futures that are not done never will be."""
        self._closed = True
        building = getattr(self, "_building", None)
        working = [*([building] if building else []), *self._devices]
        for processes in working:
            processes.stop()
        for thread in self._threads:
            thread.join()
        for processes in working:
            processes.join()
        self._folder.close()


def visible_devices(numbers: Sequence[int] | None) -> list[str]:
    """The GPUs to use, as values of CUDA_VISIBLE_DEVICES; `numbers` count those that this process sees."""
    from schedules.toolchain import devices

    count = len(devices.cuda())
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in outer.split(",")][:count] if outer else [str(index) for index in range(count)]
    if numbers is None:
        return names or [""]
    if wrong := [number for number in numbers if not 0 <= number < count]:
        raise TuningError(f"there is no GPU {wrong[0]}; this machine shows {count}")
    return [names[number] for number in numbers]
