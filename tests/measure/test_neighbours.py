from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

import pytest

from schedules.measure import neighbours
from schedules.measure.neighbours import ahead_of_others, others_running
from schedules.measure.timer import CpuTimer


def policies() -> set[int]:
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            found.add(os.sched_getscheduler(int(thread)))
    return found


def may_go_ahead() -> bool:
    with ahead_of_others():
        return policies() == {os.SCHED_RR}


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt])
def test_threads_are_ahead_while_calls_are_timed_and_not_after(fault: type[BaseException] | None) -> None:
    if not may_go_ahead():
        pytest.skip("this system does not let a process go ahead of others (CAP_SYS_NICE)")
    seen: set[int] = set()
    before, done = policies(), threading.Event()

    def call() -> None:
        threading.Thread(target=done.wait, daemon=True).start()  # as TVM starts its pool in a first call
        seen.update(policies())
        if fault:
            raise fault

    try:
        CpuTimer().times(call, 1)
    except KeyboardInterrupt:
        assert fault
    assert seen == {os.SCHED_RR} and policies() == before
    done.set()


def test_a_system_that_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    before = policies()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert len(CpuTimer().times(lambda: None, 3)) == 3 and policies() == before


def test_others_are_counted() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert max(others_running() for _ in range(200)) >= 1
    finally:
        for process in burning:
            process.kill()
            process.wait()


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_TASKS", neighbours.Path("/nowhere"))
    monkeypatch.setattr(neighbours, "_threads", lambda: [1])
    assert others_running() == 0.0
