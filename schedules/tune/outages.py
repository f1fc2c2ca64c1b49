"""Faults of the machine that a search waits out: it pauses, says so, and goes on once they are mended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from schedules.core.errors import JournalError, MachineError, SchedulesError

OUTAGE = 300.0  # seconds that a fault of the machine may last
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds until what met a fault of the machine is tried again

T = TypeVar("T")


class StopAsked(Exception):
    """`stop` said so while the search was paused, or in its finals."""


@dataclass
class _Outage:
    error: SchedulesError
    since: float = field(default_factory=time.monotonic)
    pause: float = field(default_factory=lambda: FIRST_PAUSE)  # before the next try


class Outages:
    """What does not work just now, by what needs it: build, measure, write.

    Each may last `longest` seconds.  `note` tells the user; while a pause lasts, `tick` is called, `stop` and
    `time_over` are asked.
    """

    def __init__(
        self,
        longest: float,
        note: Callable[[str], None],
        tick: Callable[[], None],
        stop: Callable[[], bool],
        time_over: Callable[[], bool],
    ) -> None:
        self._longest, self._note, self._tick, self._stop, self._time_over = longest, note, tick, stop, time_over
        self._lasting: dict[str, _Outage] = {}

    def patiently(self, needs: str, work: Callable[[], T]) -> T:
        """What `work` returns once no fault of the machine is in its way; raises what `wait_out` does."""
        while True:
            try:
                found = work()
            except (MachineError, JournalError) as error:
                self.wait_out(needs, error)
            else:
                self.works(needs)
                return found

    def wait_out(self, needs: str, error: SchedulesError) -> None:
        """Pause before the next try of what `error` prevented, each time longer.

        Raises StopAsked, and what `check` does.
        """
        if not self._lasting:
            self._note(f"paused: {error}; it goes on by itself when that is mended")
        outage = self._lasting.setdefault(needs, _Outage(error))
        outage.error = error
        end = time.monotonic() + outage.pause
        outage.pause = min(2 * outage.pause, LONGEST_PAUSE)
        while time.monotonic() < end:
            if self._stop():
                raise StopAsked
            self.check()
            self._tick()
            time.sleep(0.05)

    def check(self) -> None:
        """Raises MachineError if the machine has been at fault for too long, or the time is over meanwhile."""
        for outage in self._lasting.values():
            lasted = time.monotonic() - outage.since
            if lasted >= self._longest or self._time_over():
                raise MachineError(
                    f"{outage.error}; given up after {lasted:.0f} s; what was measured is kept: run it again to go on"
                )

    def works(self, needs: str) -> None:
        """Say that all is well again if nothing but what `needs` names did not work."""
        if self._lasting.pop(needs, None) and not self._lasting:
            self._note("the machine is well again; going on")

    def clear(self) -> None:
        """Wait for nothing any more."""
        self._lasting.clear()
