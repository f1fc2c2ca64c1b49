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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedules.core.device import slug
from schedules.core.errors import JournalError, UsageError
from schedules.core.files import open_regular, read_regular
from schedules.core.text import printable
from schedules.measure.records import Record

DEFAULT_FOLDER = Path("tuning_logs")
PATIENCE = 1.0  # seconds to wait for the lock of a file that took the journal's place


LINE = 2**23  # bytes of a line that is read
REASON = 200  # letters of why a line is not used
SAID = 3  # lines that are named of those that are set aside


@dataclass(frozen=True)
class BadLine:
    """A line that is not used; `number` counts from 1, and is 0 where the whole file cannot be read."""

    file: Path
    number: int
    reason: str
    content: bytes
    torn: bool  # not JSON at all, rather than JSON that this version does not understand

    def __str__(self) -> str:
        return f"{self.file} line {self.number}: {self.reason}" if self.number else self.reason


def told(bad: Sequence[BadLine]) -> str:
    """What is not used, counted, the first few named, in a line; "" if there is nothing."""
    more = [f"and {len(bad) - SAID} more"] if len(bad) > SAID else []
    lines = "; ".join([*map(str, bad[:SAID]), *more])
    return lines and f"of the journals {len(bad)} {'line is' if len(bad) == 1 else 'lines are'} not used: {lines}"


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
    """As `read_journal`, each record with the number of its line, counted from 1.

    A line that is byte by byte an earlier one is that one's copy, and is not used.
    """
    file = Path(file)
    try:
        data = read_regular(file)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise JournalError(f"cannot read {file}: {error.strerror}") from error
    records: list[tuple[int, Record]] = []
    bad: list[BadLine] = []
    lines = data.split(b"\n")
    first: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if (earlier := first.setdefault(line, number)) != number:
            bad.append(BadLine(file, number, f"the same as line {earlier}", line, torn=False))
            continue
        try:
            records.append((number, _record(line)))
        except UsageError as error:
            bad.append(BadLine(file, number, printable(str(error)[:REASON]), line, torn=False))
        except ValueError as error:
            torn = "cut off in writing" if number == len(lines) else f"not JSON ({error})"
            bad.append(BadLine(file, number, torn, line, torn=True))
    return records, bad


def _record(line: bytes) -> Record:
    """Raises UsageError if this version does not understand the line, ValueError if it is not a JSON object."""
    if len(line) > LINE:
        raise UsageError(f"a line of {len(line)} bytes")
    try:
        words = json.loads(line)
    except RecursionError:
        raise UsageError("not a record: nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # Python reads no number of more than 4300 digits
        raise UsageError("not a record: a number of thousands of digits") from None
    if not isinstance(words, dict):
        raise ValueError("not an object")
    return Record.from_json(words)


@dataclass(frozen=True)
class Located:
    """A record and the line that it stands in, counted from 1."""

    record: Record
    file: Path
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def unused(self, reason: str) -> BadLine:
        """The line as one that is not used."""
        return BadLine(self.file, self.line, reason, b"", torn=False)


def read_journals(
    files: Sequence[Path], read: Callable[[Path], tuple[list[tuple[int, Record]], list[BadLine]]] = read_numbered
) -> tuple[list[Located], list[BadLine]]:
    """The records of `files` in their order, each file by `read`, and the lines that are none.

    A file that cannot be read is set aside whole.  Raises JournalError if none can be.
    """
    found: list[Located] = []
    bad: list[BadLine] = []
    failed: list[JournalError] = []
    for file in files:
        try:
            numbered, unread = read(file)
        except JournalError as error:
            failed.append(error)
            bad.append(BadLine(file, 0, str(error), b"", torn=False))
            continue
        found += [Located(record, file, line) for line, record in numbered]
        bad += unread
    if failed and len(failed) == len(files):
        raise failed[0]
    return found, bad


class Journal:
    """A journal opened for writing, locked against other writers until `close` or the end of the process.

    `records` are all its records, old and appended; `bad` the lines that were set aside or passed over when it was
    opened.  `note` hears, in a line, of what others did to the file meanwhile and how it was made good.  Raises
    JournalError if another process holds it for longer than `wait` seconds, or it cannot be written.
    """

    def __init__(self, file: str | Path, wait: float = 0.0, note: Callable[[str], None] = lambda text: None) -> None:
        self.file, self._note = Path(file), note
        try:
            self._descriptor = self._open_locked(time.monotonic() + wait)
        except OSError as error:
            raise JournalError(f"cannot write {self.file}: {error.strerror}; choose another file") from error
        try:
            self.records, self.bad = read_journal(self.file)
            torn = [line for line in self.bad if line.torn]
            if torn:
                self._set_aside(torn)
            self._end_with_newline(self._descriptor)
            self._lines = self._read_lines(self._descriptor)
            self._size = os.fstat(self._descriptor).st_size
        except OSError as error:
            os.close(self._descriptor)
            raise JournalError(f"cannot mend {self.file}: {error.strerror}; free some space first") from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, record: Record) -> None:
        """Write `record` and wait until it is on the disk, in the file that has the journal's name.

        Raises JournalError if that fails; what was written of it is taken back.
        """
        line = json.dumps(record.to_json(), allow_nan=False, separators=(",", ":")).encode()
        before = os.fstat(self._descriptor).st_size
        try:
            _write(self._descriptor, line + b"\n")
        except OSError as error:
            with contextlib.suppress(OSError):  # then the torn line is set aside when it is next opened
                os.ftruncate(self._descriptor, before)
            raise JournalError(
                f"cannot write {self.file}: {error.strerror}; earlier trials are safe; mend this, run again"
            ) from error
        self._size += len(line) + 1
        if not self._is_there():
            self._make_good([*self._lines, line])
        self._lines.append(line)
        self.records.append(record)

    def _is_there(self) -> bool:
        """Whether the file that is held has the journal's name still, and nobody else wrote to it or cut it."""
        try:
            named = os.stat(self.file)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._descriptor)) and named.st_size == self._size

    def _make_good(self, lines: Sequence[bytes]) -> None:
        """Bring those of `lines` that the file of the journal's name lacks into it, and hold that file.

        Raises JournalError.
        """
        descriptor = None
        try:
            same = self._has_name(self._descriptor)
            descriptor = os.dup(self._descriptor) if same else self._open_locked(time.monotonic() + PATIENCE)
            found = set(self._read_lines(descriptor))
            missing = [line for line in lines if line not in found]
            if missing:
                self._end_with_newline(descriptor)
                _write(descriptor, b"".join(line + b"\n" for line in missing))
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            raise JournalError(
                f"{self.file} was removed or changed, and cannot be written: {error.strerror}; mend this, run again"
            ) from error
        old, self._descriptor = self._descriptor, descriptor
        os.close(old)
        self._size = os.fstat(descriptor).st_size
        if missing:
            what = "changed" if same else "replaced by another file" if found else "removed"
            self._note(f"{self.file} was {what} meanwhile: {len(missing)} of its lines were written again")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, after a last look whether all that was appended is there.  Raises JournalError."""
        try:
            if kind is None and not self._is_there():
                self._make_good(self._lines)
        finally:
            self.close()

    def _open_locked(self, deadline: float) -> int:
        """Raises JournalError if another process holds the lock at `deadline`, OSError."""
        while True:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT)
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
            if self._has_name(descriptor):
                self._keep_name()
                return descriptor
            os.close(descriptor)

    def _has_name(self, descriptor: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.file))
        return False

    def _keep_name(self) -> None:
        """Have the file's name on the disk, as far as the file system does that for folders."""
        with contextlib.suppress(OSError):
            folder = os.open(self.file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _read_lines(self, descriptor: int) -> list[bytes]:
        """The lines of an open file that are not empty."""
        parts, offset = [], 0
        while part := os.pread(descriptor, 2**24, offset):
            parts.append(part)
            offset += len(part)
        return [line for line in b"".join(parts).split(b"\n") if line.strip()]

    def _set_aside(self, torn: Sequence[BadLine]) -> None:
        """Move the torn lines to ``<file>.bad``: first written there, then left out of a copy that takes the place of
        the file."""
        beside = self.file.with_name(self.file.name + ".bad")
        with open(open_regular(beside, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as aside:
            for line in torn:
                aside.write(line.content + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
        numbers = {line.number for line in torn}
        kept = [line for number, line in enumerate(self.file.read_bytes().split(b"\n"), 1) if number not in numbers]
        copy = self.file.with_name(self.file.name + ".new")
        new = open_regular(copy, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held before it has the name: there is no moment between
            with open(os.dup(new), "wb") as file:
                file.write(b"".join(line + b"\n" for line in kept if line.strip()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(copy, self.file)
            self._keep_name()
        except BaseException:
            os.close(new)
            raise
        old, self._descriptor = self._descriptor, new
        os.close(old)

    def _end_with_newline(self, descriptor: int) -> None:
        """A last line that is whole but for its newline gets one."""
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")


def _write(descriptor: int, data: bytes) -> None:
    """Write all of `data` and wait until it is on the disk.  Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]  # the write after a short one raises what that was about
    os.fsync(descriptor)


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
        descriptor = open_regular(file)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
