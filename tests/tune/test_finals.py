"""Finals with a crew that answers at once, from times that are made up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.measure.contest import Contest, hold
from schedules.measure.records import Record, over_default, speedup
from schedules.tune import evaluate
from schedules.tune.crew import Job
from schedules.tune.evaluate import Failure
from schedules.tune.finals import FINALISTS, hold_finals, verdict
from schedules.tune.strategy import Candidate
from tests.conftest import problem_of
from tests.tune.fakes import FakeCrew, record_of

PROBLEM = problem_of("conv2d_hwcn", n=32, h=6, w=6, ci=16, co=32, kh=3, kw=3, pad=1)


def candidates(host: Arch, count: int) -> list[Candidate]:
    spec = operator("conv2d_hwcn").schedule("cpu")
    legal = [config for config in spec.space(PROBLEM, host) if config.check(PROBLEM, host) is None]
    return [Candidate("cpu", config) for config in legal[:count]]


def held(host: Arch, us: list[float], trial_us: list[float] | None = None, **options: Any) -> list[Record]:
    """The finals of candidates that take `us`, and that their trials saw take `trial_us`."""
    them = candidates(host, len(us))
    times = {candidate.key: time for candidate, time in zip(them, us, strict=True)}
    trials = [record_of(PROBLEM, "conv2d_hwcn", c, t) for c, t in zip(them, trial_us or us, strict=True)]
    index = {name: options.pop(name) for name in ("default", "incumbent") if name in options}
    them_too = {name: trials[place] for name, place in index.items()}
    crew = options.pop("crew", None) or FakeCrew(lambda candidate: times[candidate.key])
    words = {"incumbent": None, "spent": 1.0} | them_too | options
    return hold_finals(PROBLEM, host, crew, trials, words.pop("incumbent"), {}, 0, **words)


def winner_of(records: list[Record]) -> Record:
    (winner,) = [record for record in records if record.more["winner"]]
    return winner


def test_the_winner_says_how_far_ahead_it_is(host: Arch) -> None:
    records = held(host, [60.0, 80.0, 50.0], default=0)
    winner, default = winner_of(records), records[[r.us for r in records].index(60.0)]
    assert winner.us == 50.0 and winner.more["rounds"] == 12 and winner.runs == 36
    assert winner.more["over_default"] == [1.2, 1.2, 1.2] and "over_default" not in default.more
    assert winner.more["verdict"] == "ahead of the default in 12 rounds: 1.20 x [1.20, 1.20]"
    assert speedup(winner, default) == 1.2 and {record.date for record in records} == {winner.date}
    assert sum("verdict" in record.more for record in records) == 1


def test_a_lucky_trial_wins_nothing(host: Arch) -> None:
    winner = winner_of(held(host, [60.0, 60.0, 70.0], trial_us=[60.0, 31.0, 30.0], default=0))
    assert winner.key == candidates(host, 1)[0].key
    assert winner.more["verdict"].startswith(
        "no difference was found in 12 rounds: the default stays; the nearest is 1.00"
    )


def test_the_incumbent_stays(host: Arch) -> None:
    records = held(host, [60.0, 50.0, 55.0], default=0, incumbent=1)
    assert winner_of(records).us == 50.0 and winner_of(records).more["over_default"][0] == 1.2
    assert winner_of(records).more["verdict"] == "the earlier best stays: it is ahead of all others in 12 rounds"


def test_more_than_the_five_fastest_are_seen(host: Arch) -> None:
    """The best was measured in a slow moment."""
    us = [60.0] + [50.0 + i for i in range(FINALISTS - 1)]
    records = held(host, us, trial_us=[90.0, 80.0, *us[2:]], default=0)
    assert winner_of(records).us == 50.0 and len(records) == FINALISTS


def test_a_holder_that_does_not_build_any_more(host: Arch) -> None:
    class Crew(FakeCrew):
        def build(self, problem: Problem, candidate: Candidate) -> Future[Any]:
            if candidate == candidates(host, 1)[0]:
                done: Future[Any] = Future()
                done.set_result(Failure("compile", "no more"))
                return done
            return super().build(problem, candidate)

    times = dict(zip([c.key for c in candidates(host, 3)], [40.0, 60.0, 50.0], strict=True))
    records = held(host, [40.0, 60.0, 50.0], default=0, crew=Crew(lambda candidate: times[candidate.key]))
    assert winner_of(records).us == 50.0 and len(records) == 2
    assert winner_of(records).more["verdict"].startswith("the fastest trial stays")


def test_finals_can_be_stopped(host: Arch) -> None:
    class Crew(FakeCrew):
        def measure(self, job: Job) -> Future[Any]:
            return Future() if job.function is evaluate.measure_in_turn else super().measure(job)

    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    assert held(host, [60.0, 50.0], default=0, crew=Crew(lambda candidate: 50.0), stop=stop) == []


@pytest.mark.parametrize(("busy", "ahead", "us"), [(1.0, False, 60.0), (1.0, True, 50.0), (0.0, False, 50.0)])
def test_a_machine_too_busy_to_tell(host: Arch, busy: float, ahead: bool, us: float) -> None:
    crew = FakeCrew(lambda candidate: 60.0 if candidate == candidates(host, 1)[0] else 50.0)
    crew.busy, crew.ahead = busy, ahead
    winner = winner_of(held(host, [60.0, 50.0], default=0, crew=crew))
    assert winner.us == us
    assert winner.more["verdict"].startswith("this machine was too busy to tell in 12 rounds: the") == (us == 60.0)


def noisy(us: list[float], spread: float) -> Contest:
    draw, turns = random.Random(1), [0]

    def turn(index: int) -> list[float]:
        turns[0] += 1
        return [us[index] * draw.uniform(1, spread)]

    return hold(turn, len(us), holder=0, seconds=100, longest=100, clock=lambda: turns[0])


@pytest.mark.parametrize(
    ("contest", "busy", "text"),
    [
        (
            lambda: noisy([60.0, 59.0], 3.0),
            0.0,
            "no difference was found in 50 rounds: the default stays; the nearest is ",
        ),
        (lambda: noisy([60.0, 30.0], 1.5), 1.0, "; the machine was busy, which makes this uncertain"),
        (lambda: noisy([60.0], 1.5), 0.0, "the default stays: it is ahead of all others in 12 rounds"),
    ],
)
def test_verdicts(contest: Callable[[], Contest], busy: float, text: str) -> None:
    assert text in verdict(contest(), "default", busy)


def test_a_speedup_claims_no_more_than_the_finals_saw(host: Arch) -> None:
    default, best = held(host, [60.0, 50.0], default=0)[::-1]
    unsure = replace(best, more={**best.more, "over_default": [1.2, 0.9, 1.5]})
    assert speedup(unsure, default) == 1.0 and over_default(unsure, default) == (1.2, 0.9, 1.5)
    later = replace(default, date="2031-01-01T00:00:00+00:00")  # not of these finals
    assert over_default(best, later) is None and speedup(best, later) == 1.2
    assert speedup(None, default) is None and speedup(best, None) is None


@pytest.mark.parametrize("damaged", ["1.2", [1.2], [1.2, 1.3, 1.4], ["a", 1.0, 2.0], [1.2, 1.1, 1e999], [0, 0, 0]])
def test_a_lead_that_is_none_spoils_its_record_only(host: Arch, damaged: object) -> None:
    words = json.loads(json.dumps(held(host, [60.0, 50.0], default=0)[0].to_json()))
    assert over_default(Record.from_json(words), Record.from_json(words)) == (1.2, 1.2, 1.2)
    with pytest.raises(UsageError, match="over_default"):
        Record.from_json({**words, "over_default": damaged})
