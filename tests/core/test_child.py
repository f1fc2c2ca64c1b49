"""A process that makes calls, ended, stopped and starved."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partialmethod
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedules.core import child as module
from schedules.core.arch import parse_arch
from schedules.core.child import WORKER, Child, Ended, Overdue, Stopped
from schedules.core.errors import MachineError, UsageError
from tests.forked import SUBPROCESS

LIGHT = {WORKER: ""}  # without TVM, whose import is most of a start


@pytest.fixture(scope="module", autouse=True, params=[subprocess, SUBPROCESS], ids=["started", "forked"])
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """As users have them, and as most tests do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "subprocess", request.param)
        yield


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """One that no test ends."""
    child = Child(environment={"OTHER": "x"}, quiet=True)
    yield child
    child.kill()


@contextlib.contextmanager
def mortal() -> Iterator[Child]:
    child = Child(environment=LIGHT, quiet=True)
    try:
        yield child
    finally:
        child.kill()


def test_results_and_errors_come_back(child: Child) -> None:
    assert child.call(os.getenv, (WORKER,)) == "1" and child.call(os.getenv, ("OTHER",)) == "x"
    assert child.call(os.getpid) == child.pid != os.getpid()
    large = bytes(range(256)) * 2**14  # more than any pipe holds
    assert child.call(bytes, (large,)) == large
    with pytest.raises(ValueError, match="invalid literal") as raised:
        child.call(int, ("x",))
    assert "Traceback" in str(raised.value.__cause__)
    with pytest.raises(UsageError, match="unknown target .*sm_1"):  # by an error that cannot be sent as it is
        child.call(parse_arch, ("cuda:sm_1",))
    with pytest.raises(TypeError, match="pickle"):
        child.call(threading.Lock)


def test_the_end_of_a_process_is_told() -> None:
    with mortal() as child, pytest.raises(Ended, match="exit code 3") as ended:
        child.call(os._exit, (3,))
    assert ended.value.exitcode == 3
    with mortal() as child:
        child.call(os.getpid)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(Ended, match="SIGKILL"):
            child.call(os.getpid)
    start = Child(int, ("x",), environment=LIGHT, quiet=True)  # the last line of what it said as it started
    with pytest.raises(Ended, match="exit code 1 .ValueError: invalid literal"):
        start.call(os.getpid)


def test_a_call_that_takes_too_long_is_ended() -> None:
    with mortal() as child:
        child.call(os.getpid)
        start = time.monotonic()
        with pytest.raises(Overdue, match="longer than 0.3 s"):
            child.call(time.sleep, (60,), 0.3)
        assert time.monotonic() - start < 10 and not child.alive
    with mortal() as child, pytest.raises(CancelledError):
        child.call(time.sleep, (60,), cancelled=lambda: True)


def test_one_that_is_stopped_is_told_apart() -> None:
    """Before it takes its call, which is more than a pipe holds."""
    with mortal() as child:
        child.call(os.getpid)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(Stopped):
            child.call(len, (bytes(2**20),), 0.5)
        assert not child.alive


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("method", "does"), [("_send", "write"), ("_recv", "read")])
def test_nobody_talks_by_a_descriptor_that_is_closed(method: str, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that talks to a process is slow to see that it was killed.  The number of a descriptor that is closed
    is the next one's that is opened, and what the thread reads or writes by it would be another's."""
    killed, kill, system_call = threading.Event(), os.killpg, getattr(os, does)

    def killpg(group: int, number: int) -> None:
        kill(group, number)
        killed.set()

    def late(descriptor: int, what: Any) -> Any:
        assert killed.wait(20)
        time.sleep(0.05)
        return system_call(descriptor, what)

    with mortal() as child, contextlib.ExitStack() as opened:
        child.call(os.getpid)
        monkeypatch.setattr(os, "killpg", killpg)
        monkeypatch.setattr(Connection, method, partialmethod(getattr(Connection, method), **{does: late}))
        with pytest.raises(Overdue):
            child.call(time.sleep, (60,), 0.1)
        pairs = [socket.socketpair() for _ in range(8)]
        for end in itertools.chain(*pairs):
            opened.enter_context(end)
            end.send(b"ours")
        assert child._talker and child._connection is None
        talking = child._talker.is_alive()
        child._talker.join(10)
        assert not talking
        assert [end.recv(100, socket.MSG_DONTWAIT) for end in itertools.chain(*pairs)] == [b"ours"] * 16


def test_one_that_goes_on_is_none_the_worse() -> None:
    with mortal() as child:
        child.call(os.getpid)
        os.kill(child.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (child.pid, signal.SIGCONT)).start()
        assert child.call(len, (b"abc",), 30) == 3


class Clock:
    """A clock whose looks are `gap` seconds apart."""

    def __init__(self, gap: float) -> None:
        self._times = itertools.count(0.0, gap)

    def monotonic(self) -> float:
        return next(self._times)


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_the_time_of_day_does_not_matter(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """A clock that is set in the midst of a call makes it neither late nor endless."""
    real = time.time
    with mortal() as child:
        child.call(os.getpid)
        for seconds, limit in ((0.5, 30.0), (20.0, 0.3)):
            looks = itertools.count()
            monkeypatch.setattr(time, "time", lambda looks=looks: real() + (step if next(looks) else 0.0))
            with contextlib.nullcontext() if seconds < limit else pytest.raises(Overdue):
                assert child.call(time.sleep, (seconds,), limit) is None


def test_time_in_which_nobody_ran_does_not_count(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still between two looks, as Ctrl-Z makes it seem too, is not the call's fault."""
    monkeypatch.setattr(module, "time", Clock(1000.0))
    assert child.call(time.sleep, (0.7,), 30.0) is None


def test_time_without_a_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = itertools.count(0, 10**9)
    monkeypatch.setattr(module, "_core_delays", lambda pid: {"1": next(waits)})
    with mortal() as child:
        child.call(os.getpid)
        start = time.monotonic()
        with pytest.raises(Overdue):  # but within bounds
            child.call(time.sleep, (60,), 0.1)
        assert time.monotonic() - start >= 0.1 * module.STARVED


def remember(value: int) -> None:
    """In a process that is copied."""
    os.environ["REMEMBERED"] = str(value)


def test_a_copy_has_what_its_origin_has(tmp_path: Path) -> None:
    """And ends as any other, which is told alike; or with its origin."""
    with contextlib.ExitStack() as ended:
        origin = Child(remember, (7,), environment=LIGHT)
        ended.callback(origin.kill)
        copies = [Child(os.chdir, (str(tmp_path),), origin=origin) for _ in range(4)]
        assert len({origin.pid, os.getpid(), *(copy.call(os.getpid) for copy in copies)}) == 6
        for copy in copies:
            assert copy.call(os.getenv, ("REMEMBERED",)) == "7" and copy.call(os.getcwd) == str(tmp_path)
        assert origin.call(os.getcwd) == os.getcwd()
        with pytest.raises(Ended, match="exit code 3"):
            copies[0].call(os._exit, (3,))
        with pytest.raises(Overdue):
            copies[1].call(time.sleep, (60,), 0.1)
        assert not copies[0].alive and not copies[1].alive and copies[2].alive
        copies[2].kill()
        assert not copies[2].alive
        origin.kill()
        with pytest.raises(Ended, match="SIGKILL"):
            copies[3].call(os.getpid)
        assert not copies[3].alive
        with pytest.raises(Ended):
            Child(origin=origin)


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with mortal() as child:
        child.call(os.getpid)
        with pytest.raises(Overdue):
            child.call(os.system, (f"sleep 60 & echo $! > {file}; wait",), 0.5)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{file.read_text().strip()}").exists() and module._state(int(file.read_text())) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=none, DEVNULL=-3))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MachineError, match="no process can be started: Resource temporarily unavailable"):
        Child(quiet=True)
    assert len(os.listdir("/proc/self/fd")) <= before
