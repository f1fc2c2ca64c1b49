"""Whether this machine holds a problem's tensors."""

from __future__ import annotations

import contextlib
from pathlib import Path

from schedules.core.errors import UsageError
from schedules.core.problem import Problem

GIB = 2**30
COPIES = 2  # of each tensor: the array that it is made from, and the one on the device


def require_memory(problem: Problem) -> None:
    """Raise UsageError if COPIES of the problem's tensors are more than the memory that is free.

    Linux promises more than it has, and ends the process that takes it at its word.
    """
    needed, free = COPIES * problem.min_bytes, available()
    if free is not None and needed > free:
        raise UsageError(
            f"{problem} needs about {needed / GIB:.0f} GiB of memory, this machine has {free / GIB:.0f} GiB free; "
            f"give a smaller problem"
        )


def available() -> int | None:
    """Bytes of memory that can be had; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return None
