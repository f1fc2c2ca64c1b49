"""Who does the work of a search: processes that build, and one process for each device that measures.

A crew takes jobs and returns futures of their results.  Whatever a candidate does to its process is a `Failure`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from schedules.core.arch import Arch
from schedules.core.errors import TuningError
from schedules.core.problem import Problem
from schedules.core.process import ScratchFolder, memory_share
from schedules.tune import evaluate, workers
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.strategy import Candidate
from schedules.tune.workers import Job, Order, Orders, Setup, Worker

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

    def expect(self, problem: Problem, seeds: Sequence[int]) -> None:
        """What will be measured soon: a crew may compute its reference meanwhile."""

    def state(self) -> list[str]:
        """For each device what it is doing, in a word."""

    def close(self) -> None: ...


class LocalCrew:
    """The crew of this machine.

    `devices` are the GPUs' numbers as CUDA counts them, by default all; `builders` the processes that build, by default
    one for each core; `memory` the bytes that each process may use, by default its share; timeouts are in seconds.
    Raises UsageError if there is no device, MachineError if its processes cannot start.
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
        self.arch = arch
        self.builders = builders or len(os.sched_getaffinity(0))
        self.exclusive = not arch.is_gpu
        self._build_timeout, self._measure_timeout = build_timeout, measure_timeout
        visible = visible_devices(devices) if arch.kind == "cuda" else [""]
        self.slots = len(visible)
        memory = memory or memory_share(self.builders + 1)
        self._folder = ScratchFolder()
        self._builds, self._measurements, self._references = Orders(), Orders(), Orders()
        self._building: list[Worker] = []
        self._measuring: list[Worker] = []
        self._referring: list[Worker] = []
        try:
            # a GPU waits while the process that feeds it waits for a core
            setup = Setup(self._folder.path, memory, {}, background=arch.is_gpu)
            for _ in range(self.builders):
                self._building.append(Worker(arch, setup, self._builds))
            limit = None if arch.is_gpu else memory
            for name in visible:
                environment = {"CUDA_VISIBLE_DEVICES": name} if name else {}
                self._measuring.append(Worker(arch, Setup(self._folder.path, limit, environment), self._measurements))
            if not self.exclusive:
                setup = Setup(self._folder.path, None, {})
                self._referring.append(Worker(arch, setup, self._references))
            located = [worker.start(evaluate.locate_device, arch) for worker in self._measuring]
            for worker in (*self._referring, *self._building):
                worker.start(evaluate.warm_up, arch)
            found = [each.result() for each in located]
            self.device, self.versions, _ = found[0]
            if others := sorted({name for name, _, _ in found} - {self.device}):
                raise TuningError(f"the GPUs differ ({self.device}, {others[0]}); tune them apart, with --gpus")
            places = [place for _, _, place in found if place]
            if len(set(places)) < len(places):
                raise TuningError(f"two processes were given the GPU at {max(places, key=places.count)}; use --gpus")
        except BaseException:
            self.close()
            raise

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        return self._builds.put(Order.build(self.arch, problem, candidate, self._build_timeout))

    def measure(self, job: Job) -> Future[Any]:
        return self._measurements.put(Order.measure(self.arch, job, self._measure_timeout))

    def expect(self, problem: Problem, seeds: Sequence[int]) -> None:
        if self.exclusive:
            return  # it would disturb the timing
        for seed in seeds:
            order = Order(evaluate.precompute, (problem, self.arch, seed), workers.PREPARE_TIMEOUT, "runtime")
            self._references.put(order)

    def state(self) -> list[str]:
        return [worker.state for worker in self._measuring]

    def close(self) -> None:
        """Stop every process.  Futures that are not done never will be."""
        everyone = [*self._building, *self._measuring, *self._referring]
        for worker in everyone:
            worker.stop()
        for worker in everyone:
            worker.close()
        self._folder.close()


def visible_devices(numbers: Sequence[int] | None) -> list[str]:
    """The GPUs to use, as values of CUDA_VISIBLE_DEVICES; `numbers` count those that this process sees."""
    from schedules.build.toolchain import devices

    count = len(devices.cuda())
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in outer.split(",")][:count] if outer else [str(index) for index in range(count)]
    if numbers is None:
        return names or [""]
    if wrong := [number for number in numbers if not 0 <= number < count]:
        raise TuningError(f"there is no GPU {wrong[0]}; this machine shows {count}")
    return [names[number] for number in numbers]
