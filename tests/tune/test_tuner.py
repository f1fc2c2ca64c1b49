"""The loop, with a crew that answers at once."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import JournalError, MachineError, TuningError
from schedules.core.problem import Problem
from schedules.core.registry import operator
from schedules.measure.journal import Journal, read_journal
from schedules.measure.records import Record
from schedules.tune import outages
from schedules.tune.crew import Job
from schedules.tune.evaluate import Failure
from schedules.tune.session import Work, tune
from schedules.tune.strategy import Candidate
from schedules.tune.template import TemplateSearch
from schedules.tune.tuner import Limits
from tests.conftest import problem_of
from tests.tune.fakes import FakeCrew, Memory


def us_of(candidate: Candidate) -> float:
    """A time that the config decides, so that every run of a test sees the same."""
    return 100 + 900 * random.Random(str(candidate.key)).random()


@pytest.fixture
def problem() -> Problem:
    return problem_of("conv2d_hwcn", n=32, h=6, w=6, ci=8, co=32, kh=3, kw=3, pad=1)


def run(problem: Problem, arch: Arch, folder: Path, crew: FakeCrew, limits: Limits, **options: object) -> Memory:
    memory = Memory()
    search = str(options.pop("search", "template"))
    seed = int(str(options.pop("seed", 0)))
    work = Work(problem, arch, limits, search=search, seed=seed)
    tune(work, crew, journal=folder / "a.jsonl", watcher=memory, **options)  # type: ignore[arg-type]
    assert memory.result
    return memory


def trials_in(folder: Path) -> list[Record]:
    return [record for record in read_journal(folder / "a.jsonl")[0] if record.stage == "trial"]


def test_the_default_is_first_and_the_best_is_found(problem: Problem, host: Arch, tmp_path: Path) -> None:
    crew = FakeCrew(us_of)
    found = run(problem, host, tmp_path, crew, Limits(trials=40))
    assert found.result and found.result.finished and found.result.why == "40 trials"
    assert len(found.records) == 40 and len({record.key for record in found.records}) == 40
    default = found.result.status.default
    assert default in found.records
    assert default and default.config == operator("conv2d_hwcn").schedule("cpu").default(problem, host)
    assert crew.built[0].config == default.config
    best = min(found.records, key=lambda record: record.us)
    assert found.result.best and found.result.best.key == best.key
    assert found.result.best.stage == "final" and found.result.best.more["winner"]
    assert found.result.speedup and found.result.speedup > 1
    assert trials_in(tmp_path) == found.records


def test_the_same_seed_takes_the_same_way(problem: Problem, host: Arch, tmp_path: Path) -> None:
    keys = []
    for number, seed in enumerate((5, 5, 6)):
        found = run(problem, host, tmp_path / str(number), FakeCrew(us_of), Limits(trials=48), seed=seed)
        keys.append([record.key for record in found.records])
    assert keys[0] == keys[1] != keys[2]


def test_resuming_reaches_the_same_total_and_repeats_nothing(problem: Problem, host: Arch, tmp_path: Path) -> None:
    first = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=10))
    crew = FakeCrew(us_of)
    second = run(problem, host, tmp_path, crew, Limits(trials=25))
    assert second.result and second.result.status.resumed == 10 and second.result.status.done == 25
    assert len({record.key for record in first.records + second.records}) == 25
    again = FakeCrew(us_of)
    third = run(problem, host, tmp_path, again, Limits(trials=25))
    assert not third.records and not again.built and not again.measured
    assert third.result and third.result.best == second.result.best


def test_fresh_starts_over_and_keeps_the_old(problem: Problem, host: Arch, tmp_path: Path) -> None:
    run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=10))
    found = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=10), fresh=True)
    assert len(found.records) == 10 and len(trials_in(tmp_path)) == 20
    assert {record.search.campaign for record in found.records if record.search} == {2}
    # and going on goes on with the new one
    more = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=12))
    assert len(more.records) == 2
    assert {record.search.campaign for record in more.records if record.search} == {2}


@pytest.mark.parametrize("change", ["device", "versions", "search"])
def test_what_is_not_comparable_is_kept_apart(problem: Problem, host: Arch, tmp_path: Path, change: str) -> None:
    run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=10))
    crew = FakeCrew(us_of, device="Another CPU" if change == "device" else "Some CPU")
    if change == "versions":
        crew.versions["compiler"] = "cc 4"
    search = "random" if change == "search" else "template"
    found = run(problem, host, tmp_path, crew, Limits(trials=10), search=search)
    assert found.result and found.result.status.resumed == 0 and len(found.records) == 10


def test_a_search_ends_when_nothing_better_comes(problem: Problem, host: Arch, tmp_path: Path) -> None:
    found = run(problem, host, tmp_path, FakeCrew(lambda candidate: 100.0), Limits(trials=500, patience=12))
    assert found.result and found.result.why.startswith("no new best in")
    assert 12 < len(found.records) < 60


def test_a_search_ends_by_the_clock(problem: Problem, host: Arch, tmp_path: Path) -> None:
    found = run(problem, host, tmp_path, FakeCrew(us_of), Limits(minutes=0.0))
    assert found.result and found.result.why == "0 minutes" and found.result.finished and not found.records


def test_a_space_that_is_exhausted(host: Arch, tmp_path: Path) -> None:
    small = problem_of("softmax", rows=64, cols=64)
    found = run(small, host, tmp_path, FakeCrew(us_of), Limits(trials=10000))
    assert found.result and found.result.why == "every candidate has been tried"
    assert len(found.records) == found.result.status.space
    again = run(small, host, tmp_path, FakeCrew(us_of), Limits(trials=10000))
    assert not again.records and again.result and again.result.why == "every candidate has been tried"


def test_stopping_keeps_what_is_done(problem: Problem, host: Arch, tmp_path: Path) -> None:
    memory = Memory()
    work = Work(problem, host, Limits(trials=100))
    stop = lambda: len(memory.records) >= 7  # noqa: E731
    tune(work, FakeCrew(us_of), journal=tmp_path / "a.jsonl", watcher=memory, stop=stop)
    assert memory.result and not memory.result.finished and memory.result.why == "stopped"
    assert 7 <= len(memory.records) < 100 and trials_in(tmp_path) == memory.records
    more = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=100))
    assert len(trials_in(tmp_path)) == 100 and len(more.records) == 100 - len(memory.records)


def test_failures_are_counted_by_reason_and_passed_over(problem: Problem, host: Arch, tmp_path: Path) -> None:
    def sometimes(candidate: Candidate) -> float | Failure:
        kind = random.Random(str(candidate.key)).choice(["correct", "runtime", "correctness", "timeout"])
        return us_of(candidate) if kind == "correct" else Failure(kind, "so it goes")

    found = run(problem, host, tmp_path, FakeCrew(sometimes), Limits(trials=40))
    assert found.result
    assert sum(found.result.status.outcomes.values()) == 40 and len(found.result.status.outcomes) == 4
    assert found.result.best and found.result.best.correct


def test_a_search_where_all_fails_alike_gives_up(problem: Problem, host: Arch, tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="the first 16 candidates all failed alike .compile: no luck.*--fresh"):
        run(problem, host, tmp_path, FakeCrew(lambda candidate: Failure("compile", "no luck")), Limits(trials=100))
    assert len(trials_in(tmp_path)) == 16


def test_one_cause_has_many_texts(problem: Problem, host: Arch, tmp_path: Path) -> None:
    def full(candidate: Candidate) -> Failure:
        number = random.Random(str(candidate.key)).randrange(10**6)
        return Failure("compile", f"cannot write /a/{number}/kernel.o at {number:#x}")

    with pytest.raises(TuningError, match="the first 16 candidates all failed alike"):
        run(problem, host, tmp_path, FakeCrew(full), Limits(trials=100))


class FaultyCrew(FakeCrew):
    """Its machine is at fault as often as `faults` says."""

    def __init__(self, faults: Callable[[], bool]) -> None:
        super().__init__(us_of)
        self.faults = faults

    def build(self, problem: Problem, candidate: Candidate) -> Future[Any]:
        return self._outage() or super().build(problem, candidate)

    def measure(self, job: Job) -> Future[Any]:
        return self._outage() or super().measure(job)

    def _outage(self) -> Future[Any] | None:
        if not self.faults():
            return None
        future: Future[Any] = Future()
        future.set_exception(MachineError("no space"))
        return future


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_PAUSE", 0.001)


@pytest.mark.usefixtures("short_pauses")
def test_faults_of_the_machine_are_no_trials(problem: Problem, host: Arch, tmp_path: Path) -> None:
    """Building, measuring, confirming and in the finals: what met one is tried again, and is as if nothing had been."""
    gaps = (place == gap for gap in itertools.count(1) for place in range(gap + 1))  # ever longer: the finals are one
    faulty = FaultyCrew(lambda: next(gaps))
    found = run(problem, host, tmp_path / "faulty", faulty, Limits(trials=30), search="random")
    quiet = run(problem, host, tmp_path / "quiet", FakeCrew(us_of), Limits(trials=30), search="random")
    assert {record.key for record in found.records} == {record.key for record in quiet.records}
    assert len(found.records) == 30 and all(record.correct for record in found.records)
    assert trials_in(tmp_path / "faulty") == found.records
    assert found.result and quiet.result and found.result.best and quiet.result.best
    assert found.result.best.key == quiet.result.best.key and found.result.best.more["winner"]
    *paused, verdict = found.notes
    assert verdict == found.result.verdict
    pauses, ends = paused[::2], paused[1::2]
    assert pauses and len(pauses) == len(ends)
    assert set(pauses) == {"paused: no space; it goes on by itself when that is mended"}
    assert set(ends) == {"the machine is well again; going on"}


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("limits", [Limits(trials=30, outage=0.2), Limits(trials=30, minutes=0.01)])
def test_a_fault_that_lasts_ends_the_search(problem: Problem, host: Arch, tmp_path: Path, limits: Limits) -> None:
    left = [40]
    crew = FaultyCrew(lambda: left.append(left.pop() - 1) or left[0] < 0)
    with pytest.raises(MachineError, match=r"no space; given up after \d+ s; what was measured is kept: run it again"):
        run(problem, host, tmp_path, crew, limits)
    kept = trials_in(tmp_path)
    assert 0 < len(kept) < 30 and all(record.correct for record in kept)
    again = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=30))
    assert again.result and again.result.status.resumed == len(kept) and len(trials_in(tmp_path)) == 30


def test_a_pause_ends_at_once_when_asked_to(problem: Problem, host: Arch, tmp_path: Path) -> None:
    start, memory = time.monotonic(), Memory()
    work = Work(problem, host, Limits(trials=30))
    tune(work, FaultyCrew(lambda: True), journal=tmp_path / "a.jsonl", watcher=memory, stop=lambda: bool(memory.notes))
    assert memory.result and not memory.result.finished and memory.result.why == "stopped"
    assert not memory.records and len(memory.notes) == 1 and time.monotonic() - start < 10


@pytest.mark.usefixtures("short_pauses")
def test_a_journal_that_cannot_be_written_loses_nothing(
    problem: Problem, host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, append = random.Random(1), Journal.append

    def sometimes(journal: Journal, record: Record) -> None:
        if dice.random() < 0.3:
            raise JournalError("the disk is full")
        append(journal, record)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", sometimes)
        found = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=30))
        assert trials_in(tmp_path) == found.records and len({record.key for record in found.records}) == 30
        assert found.notes[0].startswith("paused: the disk is full")
        assert found.result and found.result.best and found.result.best.more["winner"]
        dice.random = lambda: 0.0  # type: ignore[method-assign]
        with pytest.raises(MachineError, match="the disk is full; given up after"):
            run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=40, outage=0.1))
    again = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=40))
    assert len(again.records) == 10


def test_nothing_is_tried_twice(problem: Problem, host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a strategy proposes what is tried already, and the same several times at once."""
    spec = operator("conv2d_hwcn").schedule("cpu")
    some = [Candidate("cpu", spec.default(problem, host))]
    some += [Candidate("cpu", config) for config in itertools.islice(spec.space(problem, host), 12)]
    asked = itertools.count()

    def repeat(strategy: object, count: int) -> list[Candidate]:
        return [some[(next(asked) // 3) % len(some)] for _ in range(count)] if next(asked) < 400 else []

    monkeypatch.setattr(TemplateSearch, "ask", repeat)
    for trials in (5, 8, 100):  # the second and third go on
        found = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=trials))
    assert found.result and found.result.why == "every candidate has been tried"
    keys = [record.key for record in trials_in(tmp_path)]
    assert len(keys) == len(set(keys)) == len({candidate.key for candidate in some})


def test_a_new_best_that_is_wrong_elsewhere_is_no_best(problem: Problem, host: Arch, tmp_path: Path) -> None:
    """The fastest of all is right on the search's data only."""
    everything = FakeCrew(us_of)
    whole = run(problem, host, tmp_path / "1", everything, Limits(trials=60))
    fastest = min(whole.records, key=lambda record: record.us).key
    crew = FakeCrew(us_of)
    crew.confirm = lambda candidate: Failure("correctness", "on seed 1") if candidate.key == fastest else ("seed 1",)
    found = run(problem, host, tmp_path / "2", crew, Limits(trials=60))
    (wrong,) = [record for record in found.records if record.key == fastest]
    assert wrong.outcome == "correctness" and not wrong.correct
    assert found.result and found.result.best and found.result.best.key != fastest
    confirmed = [record for record in found.records if "seed 1" in record.verified]
    assert confirmed and all("seed 1" in r.verified for r in [found.result.best])


def test_trials_of_other_problems_warm_the_model(problem: Problem, host: Arch, tmp_path: Path) -> None:
    other = problem_of("conv2d_hwcn", n=64, h=6, w=6, ci=8, co=32, kh=3, kw=3, pad=1)
    run(other, host, tmp_path, FakeCrew(us_of), Limits(trials=60))
    crew = FakeCrew(us_of)
    found = run(problem, host, tmp_path, crew, Limits(trials=16))
    cold = run(problem, host, tmp_path / "cold", FakeCrew(us_of), Limits(trials=16))
    mean = [sum(record.us for record in memory.records) / 16 for memory in (found, cold)]
    assert mean[0] < mean[1]
    # the other problem's best is tried next after the default
    best = min((record for record in trials_in(tmp_path) if record.problem == other), key=lambda record: record.us)
    assert crew.built[1].key == best.key


def test_bad_lines_are_told(problem: Problem, host: Arch, tmp_path: Path) -> None:
    run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=10))
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"torn')
    found = run(problem, host, tmp_path, FakeCrew(us_of), Limits(trials=10))
    (note,) = found.notes
    assert "a.jsonl line" in note and "cut off in writing; moved to a.jsonl.bad" in note
    with Journal(tmp_path / "a.jsonl") as journal:
        assert not journal.bad
