"""How many threads TVM's runtime gives the parallel loops of CPU kernels."""

from __future__ import annotations

import os
from pathlib import Path

THREADS = "TVM_NUM_THREADS"
_TOPOLOGY = Path("/sys/devices/system/cpu")


def use_every_core() -> None:
    """Have parallel loops take a thread for each core that this process may run on, unless TVM_NUM_THREADS is set.

    TVM itself takes half of an x86 machine's processors, which is a thread for each core where two share one, but half
    of the cores where none do, as in many virtual machines.  It reads the variable when a thread of the process runs
    its first loop, and has no other way to be told that holds for every thread; whatever builds or loads a CPU kernel
    calls this first.
    """
    count = cores()
    if count and THREADS not in os.environ:
        os.environ[THREADS] = str(count)


def cores() -> int | None:
    """The cores that this process may run on, those that processors share once; None where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        return len(
            {
                (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
                for cpu in os.sched_getaffinity(0)
            }
        )
    except OSError:
        return None
