"""Tasks that end in every way, in one pool."""

from __future__ import annotations

import os
import time

import pytest

from schedules.core.arch import parse_arch
from schedules.core.parallel import attempt, outcome, processes


def test_what_a_task_does_costs_no_other() -> None:
    with processes(1) as pool:
        work = [(int, "x"), (os._exit, 3), (parse_arch, "cuda:sm_1"), (int, "7")]
        tasks = [pool.schedule(attempt, args=[function, word], timeout=30) for function, word in work]
        tasks.append(pool.schedule(attempt, args=[time.sleep, 60], timeout=0.5))
        fault, died, usage, good, slow = (outcome(task) for task in tasks)
    assert good == (7, "") and slow == (None, "took longer than 0.5 s")
    assert fault[1].startswith("internal: ValueError: ") and died[1] == "the process died: exit code 3"
    assert usage[1].startswith("UnknownNameError: ") and "sm_1" in usage[1]  # which cannot be pickled


def test_a_body_that_fails_waits_for_no_task() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), processes(1) as pool:
        pool.schedule(time.sleep, args=[60])
        raise KeyboardInterrupt
    assert time.monotonic() - start < 30
