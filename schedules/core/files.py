"""Files that are replaced in one step, and what to say where the file system refuses them."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from schedules.core.errors import MachineError, SchedulesError, UsageError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def write_whole(file: Path, content: str | bytes) -> None:
    """Make `content` that of `file`, all of it or nothing.  Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:40]}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
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
    if error.errno in _NO_ROOM:
        return MachineError(f"{what}; make room and run it again")
    return UsageError(f"{what}; {remedy}")
