from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import JournalError
from schedules.core.registry import operator
from schedules.measure.journal import (
    LINE,
    Journal,
    append,
    is_being_written,
    journal_file,
    journals,
    read_journal,
    read_journals,
    told,
)
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


def gone(file: Path) -> None:
    file.unlink()


def folder_gone(file: Path) -> None:
    shutil.rmtree(file.parent)


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes().splitlines(keepends=True)[0] + b'{"schema": 98}\n')
    os.replace(other, file)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def torn(file: Path) -> None:
    """What is written next stands in one line with this."""
    with open(file, "ab") as opened:
        opened.write(b'{"schema": 1, "opera')


@pytest.mark.parametrize("harm", [gone, folder_gone, replaced, emptied, torn])
def test_what_others_do_to_the_file_costs_no_record(
    trial: Record, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Whatever `append` returned for is in the file of that name; lines of other versions stay."""
    file, said = tmp_path / "deep" / "a.jsonl", list[str]()
    trials = [replace(trial, runs=number) for number in range(4)]
    file.parent.mkdir()
    file.write_text(json.dumps({"schema": 99}) + "\n")
    with Journal(file, note=said.append) as journal:
        journal.append(trials[0])
        journal.append(trials[1])
        assert not said
        harm(file)
        for each in trials[2:]:
            journal.append(each)
            assert each in read_journal(file)[0]
        (text,) = said
        assert str(file) in text and "written again" in text
        with pytest.raises(JournalError, match="another process"):
            Journal(file)
    assert sorted(record.runs for record in read_journal(file)[0]) == [0, 1, 2, 3]
    assert b'{"schema": 99}' in file.read_bytes()


def test_a_file_that_cannot_come_back(trial: Record, tmp_path: Path) -> None:
    """The caller is told, and the same record can be appended once the place is there again."""
    file = tmp_path / "deep" / "a.jsonl"
    with Journal(file) as journal:
        journal.append(trial)
        shutil.rmtree(file.parent)
        file.parent.write_text("")
        later = replace(trial, runs=6)
        with pytest.raises(JournalError, match="was removed or changed, and cannot be written"):
            journal.append(later)
        assert journal.records == [trial]
        file.parent.unlink()
        with Journal(file), pytest.raises(JournalError, match="another process"):
            journal.append(later)
        journal.append(later)
    assert read_journal(file) == ([trial, later], [])


def test_a_pipe_is_no_journal(trial: Record, tmp_path: Path) -> None:
    """Opening one would wait for a writer.  Beside it, other files are read."""
    file = journal_file(tmp_path, "Some CPU", "softmax")
    file.parent.mkdir()
    os.mkfifo(file)
    for use in (read_journal, Journal, lambda file: read_journals([file])):
        with pytest.raises(JournalError, match="not a regular file"):
            use(file)  # type: ignore[operator]
    assert not is_being_written(file)
    os.mkfifo(tmp_path / "b.jsonl.bad")
    (tmp_path / "b.jsonl").write_text("torn")
    with pytest.raises(JournalError, match="cannot mend"):
        Journal(tmp_path / "b.jsonl")
    good = append(tmp_path / "good", trial)
    found, bad = read_journals([file, good])
    assert [item.place for item in found] == [f"{good}:1"]
    assert told(bad) == f"of the journals 1 line is not used: cannot read {file}: it is not a regular file"


def test_lines_that_no_parser_should_see(trial: Record, tmp_path: Path) -> None:
    file, line = tmp_path / "a.jsonl", json.dumps(trial.to_json())
    hostile = ["[" * 100_000, '{"a":' * 5000, '{"a": ' + "9" * 5000 + "}", '{"schema": "' + "x" * LINE + '"}', line]
    file.write_text("\n".join([line, *hostile]) + "\n")
    records, bad = read_journal(file)
    assert records == [trial] and [each.number for each in bad] == [2, 3, 4, 5, 6]
    assert not any(each.torn for each in bad)
    text = told(bad)
    assert "nested too deeply" in text and "thousands of digits" in text and text.endswith("and 2 more")
    assert str(bad[-2]).endswith("a line of 8388622 bytes") and str(bad[-1]) == f"{file} line 6: the same as line 1"
    assert told([]) == ""


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
