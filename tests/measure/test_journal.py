from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import JournalError
from schedules.core.registry import operator
from schedules.measure.journal import Journal, append, journal_file, journals, read_journal
from schedules.measure.records import Record, Search, now
from tests.conftest import problem_of


@pytest.fixture
def trial(host: Arch) -> Record:
    problem = problem_of("softmax", rows=4, cols=64)
    spec = operator("softmax").schedule("cpu")
    config = spec.default(problem, host)
    search = Search("template", campaign=1, seed=0)
    times = dict(median_us=10.0, p10_us=9.0, p90_us=12.0, runs=5, error=0.25, verified=("seed 0",))
    return Record(
        "softmax", problem, "cpu", config, "llvm", "Some CPU", now(), {"python": "3"}, "trial", "correct",
        search=search, **times,
    )  # fmt: skip


def test_what_is_appended_is_read(trial: Record, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.jsonl"
    failed = replace(trial, outcome="compile", reason="no", median_us=None, p10_us=None, p90_us=None, error=None)
    with Journal(file) as journal:
        journal.append(trial)
        journal.append(failed)
        assert journal.records == [trial, failed]
    assert read_journal(file) == ([trial, failed], [])
    assert len(file.read_text().splitlines()) == 2
    with Journal(file) as journal:
        assert journal.records == [trial, failed] and not journal.bad


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_tail_is_set_aside_and_named(trial: Record, tmp_path: Path, cut: int) -> None:
    file = tmp_path / "a.jsonl"
    trials = [replace(trial, more={"elapsed": float(number)}) for number in range(3)]
    with Journal(file) as journal:
        journal.append(trials[0])
        journal.append(trials[1])
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    with Journal(file) as journal:
        if cut == 1:  # only the newline is missing: nothing is lost
            assert not journal.bad and journal.records == trials[:2]
        else:
            assert journal.records == trials[:1]
            assert str(journal.bad[0]) == f"{file} line 2: cut off in writing"
            assert (tmp_path / "a.jsonl.bad").read_bytes() == whole.splitlines()[1][: 1 - cut] + b"\n"
        journal.append(trials[2])
    assert read_journal(file) == (trials if cut == 1 else [trials[0], trials[2]], [])


def test_bad_lines_in_the_middle(trial: Record, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    line = json.dumps(trial.to_json())
    later = replace(trial, runs=6)
    future = json.dumps({**trial.to_json(), "schema": 99})
    file.write_text(f"{line}\n{line[:20]}\n\n{future}\n\0\0\0\n[1]\n{json.dumps(later.to_json())}\n")
    with Journal(file) as journal:
        assert journal.records == [trial, later]
        assert [bad.number for bad in journal.bad] == [2, 4, 5, 6]
        journal.append(replace(trial, runs=7))
        with pytest.raises(JournalError):
            Journal(file)  # the lock moved to the file that took the place
    # what this version does not understand stays for the one that does
    assert future in file.read_text()
    assert (tmp_path / "a.jsonl.bad").read_bytes() == line[:20].encode() + b"\n\0\0\0\n[1]\n"
    records, bad = read_journal(file)
    assert len(records) == 3 and [b.torn for b in bad] == [False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.bad"]


def test_one_writer_at_a_time(trial: Record, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with Journal(file), pytest.raises(JournalError, match="being written by another process.*--journal"):
        Journal(file)
    Journal(file, wait=1.0).close()


def _hold(file: Path, ready: object) -> None:
    Journal(file)
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def test_a_killed_writer_holds_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "a.jsonl", ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(JournalError):
        Journal(tmp_path / "a.jsonl")
    process.kill()
    process.join()
    Journal(tmp_path / "a.jsonl").close()


def test_a_write_that_fails_is_taken_back(trial: Record, tmp_path: Path) -> None:
    """A limit on the file's size fails in the middle of a line, as a full disk does."""
    file = tmp_path / "a.jsonl"
    with Journal(file) as journal:
        journal.append(trial)
        size = file.stat().st_size
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, old[1]))
            with pytest.raises(JournalError, match="earlier trials are safe"):
                journal.append(trial)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
        assert file.stat().st_size == size
        later = replace(trial, runs=6)
        journal.append(later)
    assert read_journal(file) == ([trial, later], [])


def test_a_folder_that_cannot_be_written(trial: Record, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="choose another file"):
        append(tmp_path / "file", trial)
    os.mkdir(tmp_path / "dir.jsonl")
    with pytest.raises(JournalError, match="cannot read"):
        read_journal(tmp_path / "dir.jsonl")


def test_the_place_of_a_journal(trial: Record, tmp_path: Path) -> None:
    file = append(tmp_path, trial)
    assert file == journal_file(tmp_path, "Some CPU", "softmax") == tmp_path / "some-cpu" / "softmax.jsonl"
    assert list(journals(tmp_path)) == [file]


def test_the_committed_journals_are_readable() -> None:
    files = list(journals(Path(__file__).parents[2] / "tuning_logs"))
    assert files
    for file in files:
        records, bad = read_journal(file)
        assert records and not bad, bad
