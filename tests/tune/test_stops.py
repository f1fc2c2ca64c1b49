"""Searches that are ended: by signals, at any moment, and by another tuner's journal."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from schedules.core.arch import parse_arch
from schedules.core.errors import JournalError
from schedules.core.registry import operator
from schedules.tune.session import Work, tune
from schedules.tune.tuner import Limits
from tests.tune.fakes import FakeCrew
from tests.tune.searches import LONG, TOTAL, Searches, wait_for


def test_killed_at_random_moments(searches: Searches) -> None:
    dice = random.Random(7)
    reached = 0
    for _ in range(2):
        process = searches.start()
        wait_for(process, "start")
        time.sleep(dice.uniform(0.0, 1.5))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert len(searches.trials()) >= reached
        reached = len(searches.trials())
        searches.assert_clean()
    assert f"end {TOTAL} finished" in searches.run()
    searches.assert_whole()


def test_asked_to_stop(searches: Searches) -> None:
    done = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = searches.start(trials=TOTAL)
        wait_for(process, "trial", 2)
        os.killpg(process.pid, number)  # as a terminal does: every process gets it
        out, _ = process.communicate(timeout=LONG)
        assert process.returncode == 0 and "stopped" in out, out
        assert f"note {number.name}: finishing what is being measured" in out
        assert done + 2 <= len(searches.trials()) < TOTAL
        done = len(searches.trials())
        searches.assert_clean()
        assert not [record for record in searches.trials() if not record.correct]
    searches.assert_whole(done)


def test_asked_twice_to_stop(searches: Searches) -> None:
    process = searches.start(trials=100, faults="spin")
    wait_for(process, "trial", 3)
    process.send_signal(signal.SIGINT)
    wait_for(process, "note")
    process.send_signal(signal.SIGINT)
    process.wait(LONG)
    assert process.returncode in (0, 130)  # 0 if it was done by then
    searches.assert_clean()


def test_two_tuners_on_one_journal(searches: Searches) -> None:
    first = searches.start(trials=200)
    wait_for(first, "trial")
    problem = operator("faulty").problem.parse(dict(n=1000))
    second, crew = Work(problem, parse_arch("llvm"), Limits(trials=200), search="random"), FakeCrew(lambda _: 1.0)
    with pytest.raises(JournalError, match="is being written by another process"):
        tune(second, crew, journal=searches.journal)
    assert not crew.measured
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=LONG)
    searches.assert_whole(len(searches.trials()))
