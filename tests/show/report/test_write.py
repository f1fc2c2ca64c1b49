from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from schedules.core.errors import MachineError, UsageError
from schedules.show.report.make import Report
from schedules.show.report.write import MANIFEST, PAGE, write_report

EMPTY = Report("2026-11-22", {}, (), (), ("a note",))


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "deep" / "out"
    files = write_report(EMPTY, out)
    assert {file.name for file in files} >= {PAGE, MANIFEST} and all(file.is_file() for file in files)
    (out / "mine.txt").write_text("keep")
    before = {file: file.read_bytes() for file in files}
    write, room = Path.write_bytes, [1, 2, 3]

    def short(file: Path, content: bytes) -> int:
        if not room:
            write(file, content[:1])
            raise OSError(errno.ENOSPC, "No space left on device")
        room.pop()
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", short)
    with pytest.raises(MachineError, match="No space left on device; make room"):
        write_report(replace(EMPTY, date="2026-11-23"), out)
    assert {file: file.read_bytes() for file in files} == before and [*out.parent.iterdir()] == [out]
    with pytest.raises(MachineError):
        write_report(EMPTY, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    write_report(replace(EMPTY, date="2026-11-23"), out)
    assert "2026-11-23" in (out / MANIFEST).read_text() and (out / "mine.txt").read_text() == "keep"


def test_no_place_for_a_report() -> None:
    with pytest.raises(UsageError, match="choose another --out"):
        write_report(EMPTY, "/proc/nothing/out")
