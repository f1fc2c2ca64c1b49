"""What runs on the nodes of a Ray cluster: an actor for each device that measures, one for each node that builds.

An actor runs no candidate itself.  It has the worker processes that a local crew has, so that what a candidate does to
its process is told in the same words, and an actor that is lost was lost with its node or ended by somebody.  However
it ends, the kernel ends its worker processes, and its scratch folder goes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from schedules.arch import Arch
from schedules.problem import Problem
from schedules.tune import evaluate
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.process import ScratchFolder, memory_share
from schedules.tune.strategy import Candidate
from schedules.tune.workers import BuildPool, DeviceProcess, Job, need_pebble

Description = tuple[str, dict[str, str]]  # a device's name, and the versions that a result on it depends on


class MeasuringActor:
    """One device.  Ray has made it the only one that this process sees."""

    def __init__(self, arch: Arch, timeout: float) -> None:
        _prepare_process()
        self._folder = ScratchFolder()
        memory = None if arch.is_gpu else memory_share(2)
        self._device = DeviceProcess(arch, self._folder.path, memory, "", timeout)

    def describe(self) -> Description:
        """Raises UsageError if there is no device for the arch, ToolchainError if nothing can be built for it."""
        return self._device.describe().result()

    def ping(self) -> None:
        """Nothing; that it returns is the answer."""

    def run(self, job: Job) -> Any:
        return self._device.run(job)


class BuildingActor:
    """`workers` processes that build on one node."""

    def __init__(self, arch: Arch, workers: int, timeout: float) -> None:
        _prepare_process()
        self._arch = arch
        self._folder = ScratchFolder()
        self._pool = BuildPool(arch, workers, self._folder.path, memory_share(workers + 1), timeout)

    def describe(self) -> Description:
        """As a measuring actor's; the name is "" where what is built does not depend on it."""
        found: Description = self._pool.call(evaluate.describe_builder, self._arch).result()
        return found

    def ping(self) -> None:
        """Nothing; that it returns is the answer."""

    def build(self, problem: Problem, candidate: Candidate) -> Artifact | Failure:
        return self._pool.build(problem, candidate).result()


def _prepare_process() -> None:
    """Take back what Ray sets for programs that share a node: one thread for each reserved CPU.

    The device, and for a CPU that is all its cores, is this actor's; a number that a person has set stays.
    """
    need_pebble()
    if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in Path("/proc/self/environ").read_bytes().split(b"\0")):
        os.environ.pop("OMP_NUM_THREADS", None)
