"""Files that others name: read only if they are files, replaced in one step, and what to say if they cannot be."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from schedules.core.errors import MachineError, SchedulesError, UsageError
from schedules.core.machine import NO_ROOM


def write_whole(file: Path, content: str | bytes, lasting: bool = True) -> None:
    """Make `content` that of `file`, all of it or nothing, and `lasting` whatever becomes of the machine now.  Raises
    OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:40]}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            if lasting:
                os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def unwritable(path: str | Path, error: OSError, remedy: str) -> SchedulesError:
    """The error for `path`, which could not be written: of the machine if it has no room, else of who named the path,
    with the `remedy` for that."""
    what = f"cannot write {path}: {error.strerror or error}"
    if error.errno in NO_ROOM:
        return MachineError(f"{what}; make room and run it again")
    return UsageError(f"{what}; {remedy}")


def open_regular(file: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file.  Raises OSError, also for a pipe, a device or anything else but a file, at once."""
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)  # a pipe's open would wait
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_regular(file: str | Path) -> bytes:
    """The content of a file.  Raises OSError, also for anything but a file."""
    with open(open_regular(file), "rb") as opened:
        return opened.read()
