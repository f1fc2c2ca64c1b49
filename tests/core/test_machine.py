from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path

import pytest

from schedules.core import machine
from schedules.core.errors import BuildError, MachineError
from schedules.core.machine import complaint, prove_machine, prove_memory


def test_the_machines_words() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.EAGAIN):
        assert complaint(OSError(number, "?")) == os.strerror(number)
        assert complaint(f"ld: final link failed: {os.strerror(number)}") == os.strerror(number)
    assert complaint("collect2: fatal error: ld terminated with signal 7 [Bus error], core dumped") == "Bus error"
    assert complaint("collect2: fatal error: ld terminated with signal 9 [Killed]") == "signal 9"
    assert complaint("gcc: fatal error: Killed signal terminated program cc1") == "Killed signal"
    assert complaint("nvcc error   : 'ptxas' died due to signal 15 (Terminated)") == "signal 15"
    assert not complaint("nvcc error   : 'cicc' died due to signal 11 (Invalid memory reference)")
    assert complaint(MemoryError()) == "MemoryError"
    try:
        try:
            raise OSError(errno.ENOSPC, "?")
        except OSError as error:
            raise BuildError("refused") from error
    except BuildError as error:
        assert complaint(error) == "No space left on device"
    for error in (ValueError("extent 0"), BuildError("NVRTC refused: too many arguments"), OSError(errno.EPERM, "?")):
        assert not complaint(error)


def test_a_machine_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tidied" / "away"))
    prove_machine()
    assert list(tmp_path.rglob("*")) == [tmp_path / "tidied", tmp_path / "tidied" / "away"]


def test_no_room_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(MachineError, match="temporary folder .* cannot be used: File too large; .*TMPDIR"):
            prove_machine()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="cannot be used: File exists"):
        prove_machine()


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MEMORY", 2**60)
    with pytest.raises(MachineError, match="MiB of memory cannot be had"):
        prove_machine()
    assert machine.memory()
    monkeypatch.setattr(machine, "memory", lambda: [(10**9, 10**10), (2**20, 2**30)])
    with pytest.raises(MachineError, match="only 1 MiB of 1024 MiB memory are left"):
        prove_memory()


def test_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(machine.subprocess, "run", none)
    with pytest.raises(MachineError, match="no process can be started: .*Resource temporarily unavailable"):
        prove_machine()
