"""The crew of a Ray cluster: the same work as this machine's, over many.

A device that is lost with its node only hands its task to another.  Devices of different names or versions never work
for the same crew: their times are not comparable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.core.problem import Problem
from schedules.tune.actor_groups import ActorGroup
from schedules.tune.evaluate import Artifact, Failure
from schedules.tune.roster import Roster
from schedules.tune.strategy import Candidate
from schedules.tune.workers import Job, Order


class RayCrew:
    """The devices of one name in the Ray cluster at `address`, and the CPUs there that build for them.

    `builders` limits the building processes, by default all CPUs but one for each device.  `device` chooses where there
    are several kinds.  `note` is told of nodes that are refused or lost; by default it is logged.  Raises UsageError if
    the cluster cannot be reached, has no device for `arch`, or several kinds of device with none chosen (`crews` has
    one crew for each); ToolchainError if Ray is not installed.
    """

    def __init__(
        self,
        arch: Arch,
        address: str,
        *,
        builders: int | None = None,
        device: str | None = None,
        build_timeout: float = 60.0,
        measure_timeout: float = 30.0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        roster = Roster(arch, address, builders=builders, note=note or logging.getLogger(__name__).warning)
        groups = list(roster.measuring.values())
        chosen = [group for group in groups if device in (None, group.device)]
        if len(chosen) != 1:
            roster.close()
            kinds = "; ".join(_kind(group) for group in groups)
            raise UsageError(f"the Ray cluster has these devices: {kinds}; choose one with --device")
        for group in groups:
            if group is not chosen[0]:
                roster.leave(group)
        self._join(arch, roster, chosen[0], build_timeout, measure_timeout)

    @classmethod
    def _at(
        cls, arch: Arch, roster: Roster, group: ActorGroup, build_timeout: float, measure_timeout: float
    ) -> RayCrew:
        crew = cls.__new__(cls)
        crew._join(arch, roster, group, build_timeout, measure_timeout)
        return crew

    def _join(
        self, arch: Arch, roster: Roster, group: ActorGroup, build_timeout: float, measure_timeout: float
    ) -> None:
        self.arch, self.device, self.versions = arch, group.device, group.versions
        self.exclusive = not arch.is_gpu
        self._roster, self._measuring = roster, group
        building = roster.builders_for(group)
        assert building  # or there would be no roster
        self._building = building
        self._build_timeout, self._measure_timeout = build_timeout, measure_timeout

    @property
    def slots(self) -> int:
        """Devices that are there now, and one while there is none."""
        return max(1, self._measuring.lanes)

    @property
    def builders(self) -> int:
        """Processes that build now, and one while there is none."""
        return max(1, self._building.lanes)

    def build(self, problem: Problem, candidate: Candidate) -> Future[Artifact | Failure]:
        return self._building.put(Order.build(self.arch, problem, candidate, self._build_timeout))

    def measure(self, job: Job) -> Future[Any]:
        return self._measuring.put(Order.measure(self.arch, job, self._measure_timeout))

    def expect(self, problem: Problem, seeds: Sequence[int]) -> None:
        """Nothing: the nodes share no folder; each process that measures computes the reference it needs."""

    def state(self) -> list[str]:
        return [seat.state for seat in self._measuring.seats]

    def close(self) -> None:
        """End the crew's actors; the last crew of the cluster ends the builders' too, and disconnects.

        Futures that are not done never will be.
        """
        self._roster.leave(self._measuring)


def crews(
    arch: Arch,
    address: str,
    *,
    builders: int | None = None,
    build_timeout: float = 60.0,
    measure_timeout: float = 30.0,
    note: Callable[[str], None] | None = None,
) -> list[RayCrew]:
    """A crew for each kind of device (name and versions) in the Ray cluster at `address`, in the order of their names.

    Arguments and errors are those of `RayCrew`.  Close each.
    """
    roster = Roster(arch, address, builders=builders, note=note or logging.getLogger(__name__).warning)
    groups = sorted(roster.measuring.values(), key=_kind)
    return [RayCrew._at(arch, roster, group, build_timeout, measure_timeout) for group in groups]


def _kind(group: ActorGroup) -> str:
    return f"{group.device} ({group.versions.get('driver') or group.versions.get('compiler')})"
