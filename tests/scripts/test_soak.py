"""The soak in short, and what its checks must find."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedules.core.registry import EXTRA
from scripts import soak
from scripts.soaking import checks
from scripts.soaking.episode import PROBLEMS, Episode
from scripts.soaking.faults import FAULTS, Clock, Full, Strike
from scripts.soaking.scene import Scene


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed, then the search, which is resumed."""
    monkeypatch.setenv(EXTRA, "faulty=tests.tune.faulty")
    dice, tally = random.Random(3), soak.Tally(3)
    strikes = [
        Strike(name, FAULTS[name](dice), records=records, delay=0.0)
        for records, name in enumerate(("worker-killed", "killed"), 1)
    ]
    episode = Episode(3, 0, "faulty", "random", 4, False, True, strikes, dice)
    soak.soak(episode, tmp_path / "0", tally)
    assert not tally.wrong, tally.wrong
    assert tally.faults == {"worker-killed": 1, "killed": 1} and tally.bundles == 1, str(episode)
    assert episode.codes == [-signal.SIGKILL, 0]


def test_what_is_wrong_names_no_folder_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        soak, "play", lambda episode, scene: scene.wrong.append(f"left behind: {scene.temporary / 'x'}")
    )
    tally = soak.Tally(0)
    soak.soak(Episode(0, 0, "faulty", "random", 6, False, False, [], random.Random(0)), tmp_path / "0", tally)
    assert tally.wrong[0]["wrong"] == ["left behind: tmp/x"]


def test_an_episode_is_drawn_again() -> None:
    names = list(FAULTS)
    drawn = [Episode.draw(5, number, names) for number in range(len(names))]
    assert {episode.strikes[0].name for episode in drawn} == set(names)  # each in its turn
    assert {episode.operator for episode in drawn} == set(PROBLEMS)

    def facts(episode: Any) -> list[Any]:
        strikes = [(each.name, each.records, each.delay, vars(each.fault)) for each in episode.strikes]
        return [episode.operator, episode.search, episode.trials, episode.plan, episode.resumes, strikes]

    assert [facts(episode) for episode in drawn] == [facts(Episode.draw(5, n, names)) for n in range(len(names))]
    assert facts(drawn[3]) != facts(Episode.draw(6, 3, names))


def record(number: int, **more: Any) -> dict[str, Any]:
    """A line as a search of the operator `faulty` writes it."""
    config = {"number": number, "fault": "none"}
    search = {"strategy": "random", "campaign": 1, "seed": 0}
    facts = {"schema": 1, "operator": "faulty", "problem": {"n": 1000}, "target": "llvm", "schedule": "cpu"}
    timed = {"stage": "trial", "outcome": "correct", "median_us": 10.0 + number, "search": search}
    return {**facts, "config": config, **timed, **more}


class After:
    """A scene after a run that wrote `lines` and said `said`."""

    def __init__(self, folder: Path) -> None:
        self.scene = Scene(folder, random.Random(0))
        self.episode = Episode(0, 0, "faulty", "random", 6, False, False, [], random.Random(0), codes=[0])
        self.journal = self.scene.logs / "device" / "faulty.jsonl"
        self.journal.parent.mkdir()
        self.records = [record(number) for number in range(4)]
        self.said = "12:00:00  trial 1: 10.00 us, 1.00 x the default  cpu: number=0 fault=none\n"
        self.write()
        self.scene.watch()

    def write(self) -> None:
        self.journal.write_text("".join(json.dumps(line) + "\n" for line in self.records))

    def wrong(self) -> str:
        (self.scene.folder / "stderr").write_text(self.said)
        (self.scene.folder / "stdout").write_text("{}")
        checks.after_run(self.scene, self.episode)
        return "; ".join(self.scene.wrong)


@pytest.fixture
def after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> After:
    monkeypatch.setattr(checks, "MOMENT", 0.1)
    monkeypatch.setattr(checks, "cli", lambda *words: (0, "", ""))
    return After(tmp_path)


def lose(after: After) -> None:
    del after.records[2]
    after.write()


def double(after: After) -> None:
    after.records.append(record(1, median_us=11.5))
    after.write()


def blame(after: After) -> None:
    after.records.append(record(5, outcome="runtime", reason="No space left on device"))
    after.write()


def announce(after: After) -> None:
    after.said += "12:00:01  trial 5: 3.14 us, 3.00 x the default  cpu: number=9 fault=none\n"


def trace(after: After) -> None:
    after.said += "Traceback (most recent call last):\n"


def pause_often(after: After) -> None:
    after.said += 3 * "12:00:01  paused: no space; it goes on by itself when that is mended\n"


def fail_twice(after: After) -> None:
    after.said += "schedules: error: one\nschedules: error: two\n"
    after.episode.codes[-1] = 1


def fail_in_silence(after: After) -> None:
    after.episode.codes[-1] = 1


def leave_a_file(after: After) -> None:
    (after.scene.temporary / "kernel.so").touch()


def leave_half_a_bundle(after: After) -> None:
    (after.scene.out / ".first.new").mkdir()


def leave_a_process(after: After) -> None:
    environment = {**os.environ, "SOAK_MARK": after.scene.mark}
    # until a process has begun, /proc has no environment of it to know it by
    code = "print('begun', flush=True)\nwhile True: pass"
    left = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    after.scene.command = left
    assert left.stdout and left.stdout.readline() == b"begun\n"
    left.stdout.close()


MUTANTS = {
    lose: "1 of 4 records are gone",
    double: "tried 2 times",
    blame: "runtime (No space left on device)",
    announce: "trial 5 of 3.14 us is in no journal",
    pause_often: "said 3 times that it paused",
    trace: "said 'Traceback'",
    fail_twice: "exit 1 with 2 errors",
    fail_in_silence: "exit 1 with 0 errors",
    leave_a_file: "kernel.so",
    leave_half_a_bundle: ".first.new",
    leave_a_process: "left behind: ",
}


def test_nothing_is_wrong_with_a_good_run(after: After) -> None:
    assert after.wrong() == ""


@pytest.mark.parametrize(("mutant", "found"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_is_found(after: After, mutant: Callable[[After], None], found: str) -> None:
    mutant(after)
    try:
        assert found in after.wrong()
    finally:
        after.scene.close()
    assert not after.scene.processes()


def test_what_a_fault_did_is_not_held_against_the_search(after: After, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = json.dumps({**after.records[0], "median_us": -1.0}).encode()
    after.scene.strange.add(strange)
    with after.journal.open("ab") as file:
        file.write(strange + b"\n" + json.dumps(after.records[0]).encode() + b"\n{torn")  # one is there twice
    assert after.wrong() == "status: exit 0, with 3 lines that are no records: no word"
    after.scene.wrong.clear()
    monkeypatch.setattr(checks, "cli", lambda *words: (0, "", "note: faulty.jsonl line 5: not a record\n"))
    assert after.wrong() == ""


def test_the_best_is_reckoned_from_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "judged", lambda record: record["median_us"])
    trials = [record(number) for number in range(3)]
    assert checks.best_of(trials) == trials[0]
    finals = [record(1, stage="final", median_us=9.0), record(0, stage="final", median_us=12.0, winner=True)]
    # the holder stays although another was faster in the same finals; what is tried later and is faster, is better
    assert checks.best_of([*trials, *finals]) == finals[1]
    later = record(7, median_us=11.0)
    assert checks.best_of([*trials, *finals, later]) == later
    assert checks.best_of([*trials, *finals, record(8, median_us=13.0)]) == finals[1]
    assert checks.best_of([record(1, outcome="runtime")]) is None


def test_the_clock_steps_in_every_process_of_python(tmp_path: Path) -> None:
    scene = Scene(tmp_path, random.Random(0))
    clock = Clock(random.Random(0))
    clock.step = 3600
    clock.prepare(scene)
    program = (
        "import datetime, time; print(time.time()); print(datetime.datetime.now(datetime.timezone.utc).timestamp())"
    )

    def told() -> list[float]:
        variables = {**os.environ, **scene.more, "PYTHONPATH": str(tmp_path / "clock")}
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
        )
        return [float(line) for line in done.stdout.split()]

    before = told()
    clock.strike(scene)
    assert all(3500 < now - then < 4000 for then, now in zip(before, told(), strict=True))
    clock.heal(scene)
    assert all(now - then < 400 for then, now in zip(before, told(), strict=True))


def test_a_full_folder_is_full(tmp_path: Path) -> None:
    usable, _ = soak.usable(["full-logs"])
    if not usable:
        pytest.skip("no small tmpfs can be mounted here")
    scene = Scene(tmp_path, random.Random(0))
    full = Full(random.Random(0), "logs", 64)
    try:
        full.prepare(scene)
        full.strike(scene)
        with pytest.raises(OSError, match="No space"):
            (scene.logs / "more").write_bytes(bytes(1))
        full.heal(scene)
        (scene.logs / "more").write_bytes(bytes(1000))
    finally:
        scene.close()
    assert not (scene.logs / "more").exists()


def test_exit_codes_of_signals() -> None:
    drawn = FAULTS["aborted"](random.Random(1))
    assert (
        drawn.codes == (130,)
        and drawn.gap is not None
        and drawn.number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
