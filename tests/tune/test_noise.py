from __future__ import annotations

from dataclasses import replace

from schedules.tune.evaluate import Timing
from schedules.tune.noise import TRIALS, NoiseWatch

QUIET = Timing(60.0, 58.0, 70.0, 20, 0.1, ("seed 0",))


def said(*timings: Timing) -> list[str]:
    watch = NoiseWatch()
    return [text for text in map(watch.look, timings) if text]


def test_a_quiet_machine_is_not_spoken_of() -> None:
    assert said(*[QUIET] * 50) == []
    assert said(*[QUIET] * 9, replace(QUIET, p90_us=9000.0), replace(QUIET, busy=0.5), *[QUIET] * 9) == []  # a moment


def test_other_work_is_told_once() -> None:
    (line,) = said(*[QUIET] * 3, *[replace(QUIET, busy=1.5)] * 40)
    assert line.startswith("this machine is busy: others run ") and line.endswith("stop the other work")
    assert "\n" not in line and "calls of one kernel" not in line


def test_times_that_are_noise_are_told() -> None:
    """Of a trial whose calls took from 80 to 9853 us nothing was said."""
    (line,) = said(*[replace(QUIET, p10_us=80.0, p90_us=9853.0)] * TRIALS)
    assert "calls of one kernel took 80 to 9853 us; times are uncertain" in line
