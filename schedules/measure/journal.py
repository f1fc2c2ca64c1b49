"""The journal: an append-only file of records, one JSON line each, that survives whatever ends the process.

Every line reaches the disk before the next trial starts.  One process at a time may write a file.  A line that is not
JSON (a torn tail, usually) is moved to ``<file>.bad``; a line that this version does not understand stays where it is
and is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedules.core.device import slug
from schedules.core.errors import JournalError, UsageError
from schedules.measure.records import Record

DEFAULT_FOLDER = Path("tuning_logs")


@dataclass(frozen=True)
class BadLine:
    """A line that was not read; `number` counts from 1."""

    file: Path
    number: int
    reason: str
    content: bytes
    torn: bool  # not JSON at all, rather than JSON that this version does not understand

    def __str__(self) -> str:
        return f"{self.file} line {self.number}: {self.reason}"


def journal_file(folder: str | Path, device: str, operator: str) -> Path:
    """``<folder>/<device>/<operator>.jsonl``."""
    return Path(folder) / slug(device) / f"{operator}.jsonl"


def read_journal(file: str | Path) -> tuple[list[Record], list[BadLine]]:
    """The records of `file` in their order, and the lines that are none.  A file that is not there is empty.

    Raises JournalError if it cannot be read.
    """
    numbered, bad = read_numbered(file)
    return [record for _, record in numbered], bad


def read_numbered(file: str | Path) -> tuple[list[tuple[int, Record]], list[BadLine]]:
    """As `read_journal`, each record with the number of its line, counted from 1."""
    file = Path(file)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise JournalError(f"cannot read {file}: {error.strerror}") from error
    records: list[tuple[int, Record]] = []
    bad: list[BadLine] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            words = json.loads(line)
            if not isinstance(words, dict):
                raise ValueError("not an object")
        except ValueError as error:
            torn = "cut off in writing" if number == len(lines) else f"not JSON ({error})"
            bad.append(BadLine(file, number, torn, line, torn=True))
            continue
        try:
            records.append((number, Record.from_json(words)))
        except UsageError as error:
            bad.append(BadLine(file, number, str(error), line, torn=False))
    return records, bad


class Journal:
    """A journal opened for writing, locked against other writers until `close` or the end of the process.

    `records` are all its records, old and appended; `bad` the lines that were set aside or passed over when it was
    opened.  Raises JournalError if another process holds it for longer than `wait` seconds, or it cannot be written.
    """

    def __init__(self, file: str | Path, wait: float = 0.0) -> None:
        self.file = Path(file)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open_locked(time.monotonic() + wait)
        except OSError as error:
            raise JournalError(f"cannot write {self.file}: {error.strerror}; choose another file") from error
        try:
            self.records, self.bad = read_journal(self.file)
            torn = [line for line in self.bad if line.torn]
            if torn:
                self._set_aside(torn)
            self._end_with_newline()
        except OSError as error:
            os.close(self._descriptor)
            raise JournalError(f"cannot mend {self.file}: {error.strerror}; free some space first") from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, record: Record) -> None:
        """Write `record` and wait until it is on the disk.

        Raises JournalError if that fails; what was written of it is taken back.
        """
        line = (json.dumps(record.to_json(), allow_nan=False, separators=(",", ":")) + "\n").encode()
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.write(self._descriptor, line[written:])  # raises what the short write was about
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # then the torn line is set aside when it is next opened
                os.ftruncate(self._descriptor, before)
            raise JournalError(
                f"cannot write {self.file}: {error.strerror}; earlier trials are safe; mend this, run again"
            ) from error
        self.records.append(record)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_locked(self, deadline: float) -> int:
        while True:
            descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if time.monotonic() >= deadline:
                    raise JournalError(
                        f"{self.file} is being written by another process; wait for it, or give another --journal"
                    ) from None
                time.sleep(0.05)
                continue
            # the file that was opened may have been replaced before the lock was had
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.file)):
                    return descriptor
            os.close(descriptor)

    def _set_aside(self, torn: Sequence[BadLine]) -> None:
        """Move the torn lines to ``<file>.bad``: first written there, then left out of a copy that takes the place of
        the file."""
        with open(self.file.with_name(self.file.name + ".bad"), "ab") as aside:
            for line in torn:
                aside.write(line.content + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
        numbers = {line.number for line in torn}
        kept = [line for number, line in enumerate(self.file.read_bytes().split(b"\n"), 1) if number not in numbers]
        copy = self.file.with_name(self.file.name + ".new")
        new = os.open(copy, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held before it has the name: there is no moment between
            with open(os.dup(new), "wb") as file:
                file.write(b"".join(line + b"\n" for line in kept if line.strip()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(copy, self.file)
        except BaseException:
            os.close(new)
            raise
        old, self._descriptor = self._descriptor, new
        os.close(old)

    def _end_with_newline(self) -> None:
        """A last line that is whole but for its newline gets one."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


def append(folder: str | Path, record: Record) -> Path:
    """Add `record` to the journal of its device and operator under `folder`, waiting a little for another writer.

    Raises JournalError.
    """
    with Journal(journal_file(folder, record.device, record.operator), wait=10.0) as journal:
        journal.append(record)
        return journal.file


def journals(folder: str | Path) -> Iterator[Path]:
    """Every journal under `folder`."""
    return iter(sorted(Path(folder).glob("*/*.jsonl")))


def is_being_written(file: str | Path) -> bool:
    """Whether a process has the journal open for writing."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
