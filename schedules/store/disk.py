"""A folder of built things, each a file, that any number of processes use at once.

A file is machine code, which may be none, then what it is as JSON, then the length and a SHA-256 of the two: a library
loads with what follows it.  Files appear whole, by renaming, and none is written twice with other content, since its
name is made from all that went into it.  Whatever is wrong with the folder costs only what it would have saved.

Who writes here chooses what code the user runs: a folder is used only if it is the user's, and nobody else can write
to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedules.core.files import read_regular, write_whole
from schedules.core.folders import cache_folder
from schedules.core.text import warn_once

LIMIT = 2**30  # bytes of all files
KEPT = 0.9  # of the limit, once it is passed
PATIENCE = 60.0  # seconds to wait for a process that makes the same
LOOK = 0.02  # seconds between two looks whether it is done
ABANDONED = 3600.0  # seconds after which a file that was never finished is removed
LOCK = ".lock"
_TAIL = struct.Struct("<Q32s8s")  # bytes of JSON, SHA-256 of all before, the mark
_MARK = b"schedul1"


@dataclass(frozen=True)
class Entry:
    """A file of the folder: what it is, its bytes, and when it was used last, in seconds since 1970."""

    file: Path
    about: Mapping[str, Any]
    nbytes: int
    used: float


@dataclass(frozen=True)
class Disk:
    """The folder, which need not be there yet, and the bytes that its files may have."""

    folder: Path
    limit: int = LIMIT

    def trouble(self) -> str:
        """Why the folder is not used, and the remedy; "" where it is."""
        try:
            found = self.folder.stat()
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{error.strerror}; set SCHEDULES_CACHE to another folder"
        if found.st_uid != os.geteuid():
            return "it belongs to somebody else; set SCHEDULES_CACHE to a folder of your own"
        return "others may write to it; chmod go-w it" if found.st_mode & 0o022 else ""

    def find(self, name: str) -> Entry | None:
        """The file called `name`, which counts as used now; None if there is none, or none that is whole."""
        if not self._usable():
            return None
        file = self.folder / name
        try:
            data = read_regular(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_once(f"{file} cannot be read ({error.strerror}); it is built again")
            return None
        about = _opened(data)
        if about is None:
            self.drop(name, "it is cut off or was altered")
            return None
        with contextlib.suppress(OSError):  # of a folder that is read only, which then drops nothing either
            os.utime(file)
        return Entry(file, about, len(data), time.time())

    def add(self, name: str, about: Mapping[str, Any], code: bytes = b"") -> None:
        """Write a file, and drop those that were not used for longest if there are too many.  What keeps it from being
        written is logged, once."""
        if not self._usable():
            return
        text = json.dumps(about).encode()
        body = code + text
        try:
            _make_private(self.folder)
            tail = _TAIL.pack(len(text), hashlib.sha256(body).digest(), _MARK)
            write_whole(self.folder / name, body + tail, lasting=False)
        except OSError as error:
            return self.refuse(error.strerror or str(error))
        if code:  # what has none is small, and goes with the next that has some
            self._keep_to_limit()

    def is_empty(self) -> bool:
        """Whether nothing is kept, as where nothing was built yet."""
        try:
            return next(self._files(), None) is None
        except OSError:  # nothing can be
            return True

    def takes_files(self) -> bool:
        """Whether files can be written."""
        try:
            _make_private(self.folder)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError:
            return False
        return not self.trouble()

    def refuse(self, why: str) -> None:
        """Log, once, why kernels are not kept."""
        warn_once(f"kernels are not kept in {self.folder}: {why}")

    def drop(self, name: str, why: str) -> None:
        """Remove a file that is no use, and log it."""
        warn_once(f"{self.folder / name} is built again: {why}")
        with contextlib.suppress(OSError):  # gone already, or read only
            (self.folder / name).unlink()

    @contextlib.contextmanager
    def alone(self, name: str, patience: float = PATIENCE) -> Iterator[None]:
        """While the body runs no other process is in one for the same name, unless this one waited for too long, or the
        folder knows no locks.  The lock of a process that ends goes with it."""
        try:
            _make_private(self.folder)
            descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # which `add` says better
            yield
            return
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        until = time.monotonic() + patience
        try:
            while True:
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                except (BlockingIOError, PermissionError):
                    if time.monotonic() < until:
                        time.sleep(LOOK)
                        continue
                except OSError:  # no locks on this file system: the same may be made twice
                    pass
                break
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> Iterator[Entry]:
        """Every file, without a look at its code."""
        for file, found in self._files():
            with contextlib.suppress(OSError, ValueError, struct.error), open(file, "rb") as opened:
                opened.seek(-_TAIL.size, os.SEEK_END)
                length, _, mark = _TAIL.unpack(opened.read())
                if mark == _MARK:
                    opened.seek(-_TAIL.size - length, os.SEEK_END)
                    yield Entry(file, json.loads(opened.read(length)), found.st_size, found.st_mtime)

    def clear(self, unused: float = 0.0) -> int:
        """Remove the files that were not used for so many seconds; their bytes.  Raises OSError."""
        before, nbytes = time.time() - unused, 0
        for file, found in self._files():
            if found.st_mtime <= before:
                with contextlib.suppress(FileNotFoundError):  # another process does the same
                    file.unlink()
                    nbytes += found.st_size
        return nbytes

    def _usable(self) -> bool:
        if why := self.trouble():
            self.refuse(why)
        return not why

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(FileNotFoundError):
            for item in os.scandir(self.folder):
                with contextlib.suppress(FileNotFoundError):
                    found = item.stat()
                    if not item.name.startswith("."):
                        yield Path(item.path), found
                    elif item.name != LOCK and found.st_mtime < time.time() - ABANDONED:
                        os.unlink(item.path)

    def _keep_to_limit(self) -> None:
        files = sorted(self._files(), key=lambda item: item[1].st_mtime)
        total = sum(found.st_size for _, found in files)
        room = self.limit if total <= self.limit else KEPT * self.limit
        for file, found in files:
            if total <= room:
                return
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
            total -= found.st_size


def disk() -> Disk:
    """Where this user's kernels are kept: SCHEDULES_CACHE, or the system's place for such files."""
    return Disk(cache_folder() / "kernels")


@contextlib.contextmanager
def private_disk() -> Iterator[Disk]:
    """A folder that is gone after the body, for where the user's takes no files."""
    with tempfile.TemporaryDirectory(prefix="schedules-kernels-") as folder:
        yield Disk(Path(folder))


def _opened(data: bytes) -> Any:
    """What a file says it is; None if it is not as it was written."""
    if len(data) < _TAIL.size:
        return None
    body, tail = data[: -_TAIL.size], data[-_TAIL.size :]
    length, digest, mark = _TAIL.unpack(tail)
    if mark != _MARK or length > len(body) or hashlib.sha256(body).digest() != digest:
        return None
    return json.loads(body[len(body) - length :])


def _make_private(folder: Path) -> None:
    """Make the folder and those above it, for the user alone.  Raises OSError."""
    if not folder.is_dir():
        _make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
