from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from schedules.core.errors import MachineError, UsageError
from schedules.core.files import unwritable, write_whole


def test_a_file_is_replaced_or_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    write_whole(file, "old ü")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]
    assert file.stat().st_mode & 0o777 == 0o644

    def full(descriptor: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "newer")
    assert file.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


def test_whose_fault_it_is() -> None:
    full, wrong = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.ENOTDIR))
    assert isinstance(unwritable("a", full, "name another"), MachineError)
    assert "make room" in str(unwritable("a", full, "name another"))
    assert isinstance(unwritable("a", wrong, "name another"), UsageError)
    assert "Not a directory; name another" in str(unwritable("a", wrong, "name another"))
