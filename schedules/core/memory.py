"""The memory of this machine, and whether it holds a problem's tensors."""

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
    needed = COPIES * problem.min_bytes
    free = min((left for left, _ in memory()), default=None)
    if free is not None and needed > free:
        raise UsageError(
            f"{problem} needs about {needed / GIB:.0f} GiB of memory, this machine has {free / GIB:.0f} GiB free; "
            f"give a smaller problem"
        )


def memory() -> list[tuple[int, int]]:
    """Bytes available and in all: of the machine, and of this process's control group if that is limited."""
    found = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available, total = (int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
        found.append((available, total))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = Path("/sys/fs/cgroup" + line[3:])
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(words.split() for words in (group / "memory.stat").read_text().splitlines())
        used -= int(cached.get("file", 0)) - int(cached.get("shmem", 0))
        found.append((limit - used, limit))
    return found
