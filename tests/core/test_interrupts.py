"""Signals that ask a process to end: none is lost, wherever Python or native code is when they come."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schedules.core import interrupts
from schedules.core.interrupts import GRACE, LINE, Deferred, Heeding
from schedules.core.process import shielded_children

ROOT = Path(__file__).parents[2]
LONG = 60.0  # seconds after which a test that waits has failed


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    numbers = (*interrupts.ASKING, signal.SIGALRM)
    outer = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and not interrupts.asked()
    signal.signal(signal.SIGHUP, outer)


def send(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def in_a_finaliser() -> None:
    class Finalised:
        def __del__(self) -> None:
            send()

    Finalised()


def in_a_weak_reference() -> None:
    class Referred: ...

    thing = Referred()
    reference = weakref.ref(thing, lambda _: send())
    del thing
    assert reference() is None


def in_a_callback_of_c() -> None:
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: send() or 0)
    ctypes.CDLL(None).qsort((ctypes.c_int * 2)(1, 2), 2, 4, compare)


def in_a_callback_of_the_collector() -> None:
    def collected(phase: str, about: object) -> None:
        if phase == "start":
            send()

    gc.callbacks.append(collected)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(collected)


def caught_by_another() -> None:
    with contextlib.suppress(BaseException):
        send()


def wait() -> None:
    """As the main thread does that lost an interrupt: in native code that a signal wakes, for as long as it may."""
    time.sleep(LONG)


@pytest.mark.parametrize(
    "lose",
    [
        in_a_finaliser,
        in_a_weak_reference,
        in_a_callback_of_c,
        in_a_callback_of_the_collector,
        caught_by_another,
    ],
)
def test_what_is_lost_is_raised_again(lose: Callable[[], None], capfd: pytest.CaptureFixture[str]) -> None:
    with Heeding() as heeding, contextlib.suppress(KeyboardInterrupt):
        lose()
        wait()
        pytest.fail("it was lost")
    assert heeding.asked == 1 and capfd.readouterr().err == ""


@pytest.mark.parametrize("number", interrupts.ASKING)
def test_each_signal_interrupts(number: int) -> None:
    with Heeding(), pytest.raises(KeyboardInterrupt):
        send(number)
        wait()


def test_cleaning_up_is_not_interrupted() -> None:
    cleaned = False
    with Heeding(), pytest.raises(KeyboardInterrupt):
        try:
            send()
        finally:
            time.sleep(2 * interrupts.AGAIN)
            send()
            cleaned = True
    assert cleaned


def test_the_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Heeding() as heeding:
            send(signal.SIGHUP)
        assert heeding.asked == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- put off


def test_the_first_signal_is_told_and_the_body_goes_on() -> None:
    told: list[int] = []
    with Deferred(told.append) as asked:
        assert not asked()
        send(signal.SIGTERM)
        assert asked() and told == [signal.SIGTERM]


def test_the_body_is_interrupted_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "GRACE", 0.1)
    assert GRACE < interrupts.PATIENCE
    with pytest.raises(KeyboardInterrupt), Deferred(lambda number: None):
        send()
        wait()


def test_a_signal_that_was_lost_before_is_not_forgotten() -> None:
    with Heeding(), pytest.raises(KeyboardInterrupt):
        in_a_finaliser()
        with Deferred(lambda number: None):
            pytest.fail("nothing may begin")


def test_one_after_the_body_is_not_lost() -> None:
    with Heeding(), pytest.raises(KeyboardInterrupt):
        with Deferred(lambda number: None) as asked:
            pass
        assert not asked()
        send()
        wait()


def test_a_terminal_that_is_gone_is_no_error() -> None:
    def gone(number: int) -> None:
        raise OSError("the terminal is gone")

    with Deferred(gone) as asked:
        send(signal.SIGHUP)
        assert asked()


# ---- whole processes

PROGRAM = """
from schedules.core import interrupts
interrupts.heed()
import atexit, ctypes, signal, sys, tempfile, threading, time
{early}
folder = tempfile.TemporaryDirectory()
def main():
{main}
    return 0
interrupts.run(main, "stopped; go on")
"""
READY = "    print('ready', flush=True)\n"
SLEEPS = READY + "    time.sleep(60)"
SPINS = (
    READY + "    ctypes.CDLL(None).sleep(60) or ctypes.CDLL(None).sleep(60)"
)  # native code that takes up where it was
DEAF = "    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n" + SPINS
EXITS = "    atexit.register(lambda: (print('leaving', flush=True), time.sleep(1)))"
HANGS = "    threading.Thread(target=time.sleep, args=[60]).start()\n" + SLEEPS
# which holds standard error open for as long as it is there
PARENT = """    import subprocess
    subprocess.Popen(["sleep", "60"], stderr=sys.stderr)
"""
TWICE = """    import multiprocessing, os
    kept = multiprocessing.get_context("spawn").Lock()
    with interrupts.Deferred(lambda number: os.write(2, b"finishing; once more to abort\\n")):
        print("ready", flush=True)
        time.sleep(60)"""


def program(main: str, early: str = "") -> str:
    return PROGRAM.format(main=main, early=early)


@pytest.mark.parametrize(
    ("code", "word", "signals", "line"),
    [
        (program(SLEEPS, "print('ready', flush=True); time.sleep(60)"), "ready", 1, LINE),
        (program(SLEEPS), "ready", 1, "stopped; go on"),
        (program(SLEEPS), "ready", 3, "stopped; go on"),
        (program(DEAF, "interrupts.PATIENCE = 0.5"), "ready", 1, "stopped; go on"),
        (program(HANGS, "interrupts.PATIENCE = 0.5"), "ready", 1, "stopped; go on"),
        (program(EXITS), "leaving", 1, "stopped; go on"),
        (program(PARENT + SLEEPS), "ready", 1, "stopped; go on"),
        (program(TWICE), "ready", 2, "finishing; once more to abort"),
    ],
    ids=["importing", "working", "impatient", "native", "threads", "leaving", "parent", "aborted"],
)
def test_processes_end_with_one_line(code: str, word: str, signals: int, line: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout
    while running.stdout.readline() != f"{word}\n":
        assert running.poll() is None, running.communicate()
    for _ in range(signals):
        running.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two that come at once are one
    _, err = running.communicate(timeout=LONG)
    assert (running.returncode, err) == (interrupts.INTERRUPTED, f"{line}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_what_comes_while_the_interpreter_starts_is_heeded(seconds: float) -> None:
    """As ``env --block-signal=INT`` starts it; without that, the interpreter has its own ways to end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with shielded_children():
        command = [sys.executable, "-m", "schedules", "list"]
        running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=LONG)
    assert (running.returncode, out, err) == (interrupts.INTERRUPTED, "", f"{LINE}\n")
