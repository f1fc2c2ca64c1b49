"""Which crew a search works with, as it is asked for on the command line or in a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.tune.crew import Crew, LocalCrew


@dataclass(frozen=True)
class CrewOptions:
    """How many `builders`, on which `gpus` (as CUDA counts them), on the Ray cluster at the address `ray` and there on
    the devices named `device`; what is None is left to the crew.  `timeout` is how many seconds one candidate may take
    to build, and as many to measure."""

    builders: int | None = None
    gpus: tuple[int, ...] | None = None
    ray: str | None = None
    timeout: float | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.builders is not None and self.builders < 1:
            raise UsageError(f"--builders {self.builders} must be at least 1")
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"--timeout {self.timeout:g} must be over 0")
        if self.ray and self.gpus is not None:
            raise UsageError("--gpus chooses this machine's GPUs; with --ray the cluster's are all used")
        if self.device and not self.ray:
            raise UsageError("--device chooses among a cluster's devices; give --ray with it, or --gpus here")

    def open(self, arch: Arch, note: Callable[[str], None] | None = None) -> Crew:
        """The crew for `arch`, its processes started; `note` is told of a cluster's nodes that come to grief.

        Raises UsageError (also for a cluster with several kinds of device and none chosen), TuningError or
        ToolchainError.
        """
        if not self.ray:
            return LocalCrew(arch, builders=self.builders, devices=self.gpus, **self._timeouts())
        cluster = import_module("schedules.tune.cluster")
        options = {"builders": self.builders, "note": note, "device": self.device, **self._timeouts()}
        crew: Crew = cluster.RayCrew(arch, self.ray, **options)
        return crew

    def open_all(self, arch: Arch, note: Callable[[str], None] | None = None) -> list[Crew]:
        """A crew for each kind of device there is, or for `device` alone.  Raises what `open` raises."""
        if not self.ray or self.device:
            return [self.open(arch, note)]
        cluster = import_module("schedules.tune.cluster")
        found: list[Crew] = cluster.crews(arch, self.ray, builders=self.builders, note=note, **self._timeouts())
        return found

    def _timeouts(self) -> dict[str, Any]:
        return {} if self.timeout is None else {"build_timeout": self.timeout, "measure_timeout": self.timeout}
