"""`schedules tune`, and what goes on with it: resume, export, replay; signals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schedules.bundle.bundle import Bundle
from schedules.cli import main
from schedules.cli.searching import FOLDER
from schedules.measure.journal import DEFAULT_FOLDER, is_being_written, journals, read_journal
from tests.command import Run, one_line

SMALL = ["conv2d_hwcn", "n=32", "h=6", "w=6", "ci=16", "co=32", "kh=3", "kw=3", "pad=1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name an operator or a preset"),
        (["tutorail"], "did you mean 'tutorial'?"),
        (["tutorial", "--search", "lucky"], "argument --search: invalid choice: 'lucky'"),
        (["tutorial", "--schedule", "smit"], "unknown schedule of conv2d_hwcn 'smit'; did you mean 'simt'?"),
        (["tutorial", "--schedule", "simt"], "schedule simt runs on cuda, not on llvm"),
        (["tutorial", "--trials", "0"], "--trials 0 must be over 0"),
        (["tutorial", "--minutes", "-1"], "--minutes -1.0 must be over 0"),
        (["tutorial", "--patience", "0"], "--patience 0 must be over 0"),
        (["tutorial", "--seed", "-1"], "--seed -1 must not be negative"),
        (["tutorial", "--trials", "99999999999999999999"], "--trials 99999999999999999999 must be at most 1000000000"),
        (["tutorial", "--minutes", "inf"], "--minutes inf must be at most 1000000"),
        (["tutorial", "--minutes", "1e308"], "--minutes 1e+308 must be at most 1000000"),
        (["tutorial", "--minutes", "nan"], "--minutes nan must be"),
        (["tutorial", "--patience", "1000000001"], "--patience 1000000001 must be at most"),
        (["tutorial", "--seed", "9223372036854775808"], "--seed 9223372036854775808 must be at most"),
        (["tutorial", "--builders", "100000"], "--builders 100000 must be at most 1024"),
        (["tutorial", "--timeout", "inf"], "--timeout inf must be at most 100000"),
        (["tutorial", "--timeout", "nan"], "--timeout nan must be"),
        (["tutorial", "--trials", 5000 * "9"], "invalid int value"),
        (["tutorial", "--space", "cuda"], "give --search auto with it"),
        (["tutorial", "--gpus", "a"], "--gpus 'a' is not a list of numbers"),
        (["tutorial", "--builders", "0"], "--builders 0 must be at least 1"),
        (["tutorial", "--timeout", "0"], "--timeout 0 must be over 0"),
        (["tutorial", "--ray", "auto", "--gpus", "0"], "with --ray the cluster's are all used"),
        (["tutorial", "--device", "NVIDIA H200"], "give --ray with it"),
        (["tutorial", "--out", "x"], "--out is for a --plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(run: Run, words: list[str], says: str, tmp_path: Path) -> None:
    assert says in one_line(run("tune", *words, "--log", tmp_path))


def test_log_that_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in one_line(run("tune", *SMALL, "--log", tmp_path / "file"))
    assert str(DEFAULT_FOLDER) == FOLDER


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of journals in which a search came to four trials, and what the command printed."""
    folder, out = tmp_path_factory.mktemp("logs"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["tune", *SMALL, "--trials", "4", "--builders", "1", "--log", str(folder)]) == 0
    return folder, out.getvalue()


def test_a_search_says_what_it_found(searched: tuple[Path, str]) -> None:
    folder, out = searched
    (file,) = journals(folder)
    records, bad = read_journal(file)
    trials = [record for record in records if record.stage == "trial"]
    assert len(trials) == 4 and not bad and not is_being_written(file)
    assert all(record.search and record.search.trials == 4 for record in records)
    assert [record.more["elapsed"] for record in trials] == sorted(record.more["elapsed"] for record in trials)
    assert "template search of" in out and "trial 1: " in out and "\x1b" not in out
    assert "best " in out and "x the default" in out and "schedules build conv2d_hwcn n=32" in out


def test_again_and_further(run: Run, searched: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = searched
    (file,) = journals(folder)
    before = file.read_text()
    again = run("tune", *SMALL, "--trials", "4", "--log", folder, "--json")
    assert again.code == 0 and file.read_text() == before  # the same total: nothing to do
    assert again.json["resumed"] == again.json["trials"] == 4 and again.json["finished"]
    assert "finished" in run("resume", "--log", folder).out and file.read_text() == before

    more = run("resume", "--log", folder, "--trials", "5", "--builders", "1", "--json")
    assert more.code == 0 and (more.json["resumed"], more.json["trials"]) == (4, 5), more.err
    records = read_journal(file)[0]
    trials = [record for record in records if record.stage == "trial"]
    assert len(trials) == len({record.key for record in trials}) == 5  # nothing twice
    assert more.json["speedup"] and more.json["best"]["search"]["trials"] == 5

    out = tmp_path / "best"
    assert run("export", *SMALL, "--out", out, "--logs", folder).code == 0
    assert Bundle.open(out).manifest["config"] == more.json["best"]["config"]
    assert run("verify", out).code == 0

    result = run("replay", *SMALL, "--logs", folder, "--log", tmp_path / "new", "--seconds", "0.05", "--json")
    assert result.json["passed"] and result.json["same_program"] is True
    assert result.code == (0 if result.json["still_true"] else 1)
    (replayed,) = read_journal(next(journals(tmp_path / "new")))[0]
    assert replayed.stage == "bench" and replayed.more["replay_of"] == result.json["place"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "schedules",
        "tune",
        *SMALL,
        "--log",
        str(folder),
        "--builders",
        "1",
        "--json",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_trials(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(len(file.read_text().splitlines()) >= count for file in journals(folder)):
            return
        time.sleep(0.1)
    pytest.fail("no trial was written down")


def test_a_signal_keeps_everything_and_says_how_to_go_on(run: Run, tmp_path: Path) -> None:
    running = start(tmp_path, "--trials", "500")
    wait_for_trials(tmp_path, 3)
    os.kill(running.pid, signal.SIGTERM)
    out, err = running.communicate(timeout=120)
    found: dict[str, Any] = json.loads(out)
    assert running.returncode == 130 and not found["finished"] and found["why"] == "stopped", err
    assert "SIGTERM: finishing what is being measured; once more to abort" in err
    assert found["again"].startswith("schedules tune conv2d_hwcn") and "--trials 500" in found["again"]
    (file,) = journals(tmp_path)
    trials = len(read_journal(file)[0])
    assert trials == found["trials"] >= 3
    listed = run("resume", "--list", "--log", tmp_path, "--json").json
    assert [(each["trials"], each["of"], each["ended"]) for each in listed] == [(trials, 500, False)]


def test_a_second_signal_aborts(tmp_path: Path) -> None:
    running = start(tmp_path, "--trials", "500")
    wait_for_trials(tmp_path, 1)
    os.kill(running.pid, signal.SIGINT)
    time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "aborted" in err or "finishing" in err  # it may have been done before the second one came
    (file,) = journals(tmp_path)
    assert read_journal(file)[0] and not is_being_written(file)
