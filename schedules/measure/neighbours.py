"""Other work on this machine's cores: kept from the calls that are timed where the system allows that, and noticed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")


@contextlib.contextmanager
def ahead_of_others() -> Iterator[bool]:
    """Let the threads of this process run before all ordinary work, as soon as they want to; gives whether they do.

    A kernel that shares its cores with other work takes milliseconds where it needs microseconds: its threads wait for
    each other, and each for its turn.  Who may do this is the system's choice (root, CAP_SYS_NICE, a limit on real-time
    priority); elsewhere nothing changes.  Those that do it at once take turns (SCHED_RR), and the system keeps a share
    for others.
    """
    before: dict[int, tuple[int, os.sched_param]] = {}
    for thread in _threads():
        with contextlib.suppress(OSError):
            old = os.sched_getscheduler(thread), os.sched_getparam(thread)
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
            before[thread] = old
    try:
        yield bool(before)
    finally:
        usual = before.get(os.getpid(), (os.SCHED_OTHER, os.sched_param(0)))
        for thread in _threads() if before else ():  # those that were started meanwhile too
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, *before.get(thread, usual))


def others_running() -> float:
    """Threads of other processes that run or wait for a core at this moment, for each core of this machine; 0.0 where
    the system does not tell."""
    try:
        every = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
        ours = sum(_state(thread) == "R" for thread in _threads())
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0, every - ours) / (os.cpu_count() or 1)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir(_TASKS)]


def _state(thread: int) -> str:
    return (_TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[0]
