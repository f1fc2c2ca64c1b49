"""Where Winograd's tiles are used unasked and nothing is predicted: where they are estimated to take less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedules.core.arch import Arch
from schedules.winograd import cpu, gpu


def winograd_schedule(problem: Any, arch: Arch, direct: Callable[[Any, Arch], tuple[float, Any]]) -> str | None:
    """The name of the schedule for `arch`, where it is estimated to be faster than direct products; else None.
    `direct` gives about the cycles of these on a CPU, and their config."""
    if arch.is_gpu:
        return "winograd" if gpu.pays(problem, arch) else None
    return cpu.SCHEDULE.name if cpu.pays(problem, arch, direct) else None
