"""The command line as a process of its own, interrupted at random moments: it ends soon, with 130, one line, and
nothing left.

INTERRUPTS=100 pytest tests/test_main.py  # that many, in place of one for each command
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from schedules.core.interrupts import ASKING, INTERRUPTED
from tests.tune.plans import TWO, plan_file
from tests.tune.searches import ROOT, Searches

LATE = 0.3  # seconds before the end of a process in which a signal may find it past its last line
SECONDS = 10.0  # that an interrupted process may take to end
CONVOLUTION = "conv2d_hwcn n=16 h=7 w=7 ci=16 co=16 kh=3 kw=3"
SOFTMAX = "softmax rows=64 cols=1000"
# with how many seconds each takes at least
COMMANDS = {
    f"-m schedules tune {CONVOLUTION} --trials 500 --builders 1": 8.0,
    "-m schedules tune --plan plan.toml": 8.0,
    f"-m schedules build {SOFTMAX} --target cuda:sm_90a --out built": 1.5,
    f"-m schedules verify {CONVOLUTION}": 2.0,
    f"-m schedules bench {CONVOLUTION}": 2.0,
    f"-m schedules explain {SOFTMAX} --target cuda:sm_90a": 1.5,
    f"-m schedules inspect {SOFTMAX} --target cuda:sm_90a": 1.5,
    "-m schedules report": 0.5,
    "-m schedules export --all --out built": 0.5,
    f"{ROOT}/scripts/sweep.py softmax:cpu --count 5000 --workers 1": 6.0,
    f"{ROOT}/scripts/first_run.py": 15.0,
}
SHORT = [0, 2, 3, 7, 9]  # of COMMANDS


def interrupted(words: list[str], dice: random.Random, longest: float, folder: Path) -> None:
    """Start a command in the new `folder`, interrupt it within `longest` seconds, and look how it ends."""
    temporary, work = folder / "temporary", folder / "work"
    for made in (temporary, work):
        made.mkdir(parents=True)
    plan_file(work, TWO.replace("trials = 4\n", "trials = 500\n"))
    traces = Searches(work / "unused", temporary)
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "SEARCH_MARK": traces.mark}
    # as ``env --block-signal=INT`` starts it: before its first line the interpreter would end in ways of its own
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        running = subprocess.Popen(
            [sys.executable, *words],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    delay = dice.choice([dice.uniform(0.001, 0.2), dice.uniform(0.001, longest), dice.uniform(0.001, longest)])
    number, twice = dice.choice([signal.SIGINT, *ASKING]), dice.random() < 0.3
    send = dice.choice([os.kill, os.killpg])  # the process alone, or all of its terminal
    told = f"{signal.Signals(number).name}{' twice' if twice else ''} by {send.__name__} after {delay:.3f} s"
    time.sleep(delay)
    ended = running.poll()
    if ended is None:
        sent = time.monotonic()
        send(running.pid, number)
        if twice:
            time.sleep(dice.choice([0.01, 0.3, 1.0]))
            if running.poll() is None:
                send(running.pid, number)
    try:
        out, err = running.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        pytest.fail(f"{told}: it did not end")
    if ended is None and not (running.returncode == 0 and time.monotonic() - sent < LATE):
        assert running.returncode == INTERRUPTED and err.count("\n") == 1, (told, running.returncode, out, err)
    assert not [name for name in work.rglob(".*")], told
    traces.assert_clean()


@pytest.mark.parametrize("number", range(int(os.environ.get("INTERRUPTS", len(SHORT)))))
def test_an_interrupt_at_a_random_moment(number: int, tmp_path: Path) -> None:
    chosen = list(COMMANDS.items())
    command, longest = chosen[number % len(chosen) if "INTERRUPTS" in os.environ else SHORT[number]]
    interrupted(command.split(), random.Random(number), longest, tmp_path)
