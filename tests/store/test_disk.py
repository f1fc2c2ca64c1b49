"""The folder of built things: whole files or none, for any number of processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from schedules.core import text
from schedules.store import disk as module
from schedules.store.disk import Disk, disk, private_disk

ABOUT = {"operator": "softmax", "number": 1}


@pytest.fixture
def here(tmp_path: Path) -> Disk:
    text.warn_once.cache_clear()
    return Disk(tmp_path / "deep" / "kernels")


def python(program: str, *arguments: object) -> subprocess.Popen[str]:
    command: Sequence[str] = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_what_was_written_is_found(here: Disk) -> None:
    assert here.find("a") is None and not list(here.entries()) and not here.trouble() and not here.clear()
    here.add("a", ABOUT, b"\x7fELF code")
    found = here.find("a")
    assert found is not None and found.about == ABOUT and found.file.read_bytes().startswith(b"\x7fELF code")
    assert found.nbytes == found.file.stat().st_size
    here.add("b", {})
    entries = {entry.file.name: entry.about for entry in here.entries()}
    assert entries == {"a": ABOUT, "b": {}}
    for folder in (here.folder, here.folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert here.clear(unused=60) == 0
    os.utime(here.folder / "a", (1, 1))
    assert here.clear(unused=60) == found.nbytes
    assert [entry.file.name for entry in here.entries()] == ["b"]


@pytest.mark.parametrize("cut", [1, 60, 0])
def test_a_file_that_is_not_whole_is_none(here: Disk, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    here.add("a", ABOUT, bytes(100))
    file = here.folder / "a"
    data = file.read_bytes()
    file.write_bytes(data[:-cut] if cut else b"x" + data[1:])
    assert here.find("a") is None and not file.exists()
    assert caplog.text.count("cut off or was altered") == 1
    file.write_bytes(b"")
    assert not list(here.entries()) and here.find("a") is None
    assert caplog.text.count("cut off or was altered") == 1  # said once
    here.add("a", ABOUT, bytes(100))
    assert here.find("a") is not None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    small = Disk(tmp_path / "kernels", limit=5000)
    for number, name in enumerate("abcd"):
        small.add(name, {}, bytes(1000))
        os.utime(tmp_path / "kernels" / name, (number + 1, number + 1))
    assert small.find("a") is not None  # which is a use
    small.add("e", {}, bytes(1000))
    assert {entry.file.name for entry in small.entries()} == {"a", "c", "d", "e"}
    assert sum(entry.nbytes for entry in small.entries()) <= 5000


def test_files_that_were_never_finished_go(here: Disk) -> None:
    here.add("a", {})
    for name, age in ((".b.torn", 2 * module.ABANDONED), (".c.new", 0)):
        (here.folder / name).write_bytes(b"half")
        os.utime(here.folder / name, (time.time() - age,) * 2)
    here.add("d", {}, b"code")
    assert not (here.folder / ".b.torn").exists() and (here.folder / ".c.new").exists()
    assert len(list(here.entries())) == 2


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_takes_nothing_costs_only_that(
    here: Disk, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here.add("old", ABOUT)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "write_whole", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    here.add("a", ABOUT)
    here.add("b", ABOUT)
    assert here.find("a") is None and here.find("old") is not None
    assert caplog.text.count(os.strerror(number)) == 1 and "kernels are not kept in" in caplog.text


def test_a_file_where_the_folder_would_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text.warn_once.cache_clear()
    (tmp_path / "file").write_text("")
    nowhere = Disk(tmp_path / "file" / "kernels")
    nowhere.add("a", ABOUT)
    with nowhere.alone("a"):
        assert nowhere.find("a") is None and not nowhere.takes_files()
    assert "Not a directory; set SCHEDULES_CACHE" in caplog.text


def test_files_of_others_are_not_read(
    here: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert here.takes_files()
    here.add("a", ABOUT)
    for mode in (0o770, 0o707):
        here.folder.chmod(mode)
        assert here.find("a") is None and "chmod go-w" in here.trouble() and not here.takes_files()
    here.folder.chmod(0o755)
    assert here.find("a") is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert here.find("a") is None
    here.add("b", ABOUT)
    assert not (here.folder / "b").exists()
    assert "it belongs to somebody else; set SCHEDULES_CACHE" in caplog.text


HOLD = """
import sys, time
from pathlib import Path
from schedules.store.disk import Disk
with Disk(Path(sys.argv[1])).alone("a"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_at_a_time_makes_a_thing(here: Disk) -> None:
    """Another waits until it is done, or killed, or for too long; for other things it does not."""
    holder = python(HOLD, here.folder)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        start = time.monotonic()
        with here.alone("b"):
            pass
        with here.alone("a", patience=0.2):
            waited = time.monotonic() - start
        assert 0.2 <= waited < 30
        holder.send_signal(signal.SIGKILL)
        with here.alone("a"):
            assert holder.wait(10) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()


WRITE = """
import os, sys
from pathlib import Path
from schedules.store.disk import Disk
disk = Disk(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(10**6):
    disk.add("a", {"number": number}, bytes([number % 256]) * 200_000)
"""


def test_writers_that_are_killed_leave_whole_files(here: Disk, caplog: pytest.LogCaptureFixture) -> None:
    writers = [python(WRITE, here.folder) for _ in range(2)]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    found, until = 0, time.monotonic() + 30
    while found < 20 and time.monotonic() < until:
        entry = here.find("a")
        if entry is not None:
            found += 1
            data = entry.file.read_bytes()  # maybe a later one, which is whole too
            assert len(set(data[:200_000])) == 1
    for writer in writers:
        writer.kill()
        writer.wait()
    assert found == 20 and here.find("a") is not None and not caplog.records


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path / "named"))
    assert disk().folder == tmp_path / "named" / "kernels"
    monkeypatch.delenv("SCHEDULES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk().folder == tmp_path / "xdg" / "te-schedules" / "kernels"
    with private_disk() as other:
        other.add("a", {})
        assert other.find("a") is not None
    assert not other.folder.exists()
