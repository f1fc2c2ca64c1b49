"""What a search meets: candidates, workers, journals and disks that fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedules.measure.journal import read_journal
from tests.tune.faulty import OUTCOMES
from tests.tune.searches import LONG, Searches, wait_for


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def workers(searches: Searches, search: int) -> list[int]:
    """The processes that are forks of the search."""
    return [pid for pid in searches.processes() if pid != search and command_of(pid) == command_of(search)]


def test_candidates_that_go_wrong_cost_only_themselves(searches: Searches) -> None:
    faults = [fault for fault in OUTCOMES if fault != "none"]
    out = searches.run(trials=1000, faults="+".join(faults))
    assert "end 18 finished" in out, out[-500:]
    searches.assert_whole(18)
    for record in searches.trials():
        assert record.outcome == OUTCOMES[record.config.to_json()["fault"]], record
        assert record.correct or record.reason
    (winner,) = [record for record in read_journal(searches.journal)[0] if record.more.get("winner")]
    assert winner.correct


def test_workers_killed_from_outside(searches: Searches) -> None:
    """Nobody's fault: their trials are done again, and none counts as failed."""
    dice = random.Random(3)
    process = searches.start(trials=24)
    wait_for(process, "trial", 2)
    for _ in range(2):
        time.sleep(0.7)
        os.kill(dice.choice(workers(searches, process.pid)), signal.SIGKILL)
    out, _ = process.communicate(timeout=LONG)
    assert "end 24 finished" in out, out[-500:]
    searches.assert_whole(24)
    assert [record.reason for record in searches.trials() if not record.correct] == []


@pytest.mark.parametrize("deaths", [2, 1000])
def test_a_linker_killed_from_outside(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """Nobody's fault either, unless it happens each time: then the candidate is given up, and says so."""
    linker = next(found for name in ("cc", "gcc", "clang") if (found := shutil.which(name)))
    stand_in = tmp_path / "bin" / "cc"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/calls\n"
        f'[ $(wc -l < {tmp_path}/calls) -le {deaths} ] && kill -9 $$\nexec {linker} "$@"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    out = searches.run(trials=1)
    assert "end 1 finished" in out, out[-500:]
    (record,) = searches.trials()
    if deaths < 1000:
        assert record.correct and (tmp_path / "calls").read_text().count("\n") > deaths
    else:
        assert record.outcome == "compile" and "cc was ended by SIGKILL" in record.reason


def test_a_torn_journal(searches: Searches) -> None:
    searches.run(trials=5)
    whole = searches.journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    trials = [index for index, line in enumerate(lines) if json.loads(line)["stage"] == "trial"]
    searches.journal.write_bytes(b"".join(lines[: trials[-1]]) + lines[trials[-1]][:40])
    out = searches.run(trials=7)
    assert f"line {trials[-1] + 1}: cut off in writing; moved to journal.jsonl.bad" in out
    assert "start 4" in out and "end 7 finished" in out
    searches.assert_whole(7)


def test_workers_that_are_stopped(searches: Searches) -> None:
    """Before they take a candidate, or while they have one: as if somebody had killed them."""
    process = searches.start(trials=8)
    wait_for(process, "trial", 2)
    for pid in workers(searches, process.pid):
        os.kill(pid, signal.SIGSTOP)
    out, _ = process.communicate(timeout=LONG)
    assert "end 8 finished" in out, out[-500:]
    searches.assert_whole(8)
    assert [record.reason for record in searches.trials() if not record.correct] == []


def mount(folder: Path, *options: str) -> None:
    """A disk of 64 KiB at `folder`, or what else the options say; skips where that may not be done."""
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options or ("size=64k",)), "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no small tmpfs can be mounted here (not root); stand-ins for a full disk are tried elsewhere")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(searches: Searches, small_disk: Path) -> None:
    searches.journal = small_disk / "journal.jsonl"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(60 * 1024))
    process = searches.start(trials=12)
    wait_for(process, "note paused: cannot write")
    assert 0 < len(searches.trials()) < 12 and searches.journal.read_bytes().endswith(b"\n")
    filler.unlink()
    out, _ = process.communicate(timeout=LONG)
    assert "note the machine is well again" in out and "end 12 finished" in out, out[-500:]
    searches.assert_whole(12)


def test_a_full_temporary_folder(searches: Searches, small_disk: Path) -> None:
    searches.temporary = small_disk
    process = searches.start(trials=10)
    wait_for(process, "note paused: the temporary folder")
    assert not searches.trials()
    mount(small_disk, "remount", "size=64m")
    out, _ = process.communicate(timeout=LONG)
    assert "note the machine is well again" in out and "end 10 finished" in out, out[-500:]
    searches.assert_whole(10)
    assert [record.reason for record in searches.trials() if not record.correct] == []
