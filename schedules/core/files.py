"""Files that others name: read and written only if they are files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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
