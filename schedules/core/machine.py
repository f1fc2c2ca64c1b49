"""Whether this machine is well, and what errors say when it is not."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
from pathlib import Path

from schedules.core.errors import MachineError
from schedules.core.memory import memory

FILE = 4 * 2**20  # bytes that must find room in the temporary folder
MEMORY = 32 * 2**20  # bytes that a process must be able to use
SHORT = 0.02  # of the memory: with less available, a system begins to end processes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_NUMBERS = (
    *(*NO_ROOM, errno.EROFS, errno.EAGAIN, errno.ENODEV, errno.ENXIO, errno.ESTALE),
    *(errno.ENOENT, errno.ENOTDIR, errno.EFBIG),  # in a worker's own folder
)
# the linker writes by a mapping, and is ended by SIGBUS where the file finds no room
_SIGBUS = ("Bus error", "SIGBUS")
# a compiler, or what it starts, that something else ended, as a system short of memory does
_KILLED = ("SIGKILL", "SIGTERM", "signal 9", "signal 15", "Killed signal")
_WORDS = (*(os.strerror(number) for number in _NUMBERS), *_SIGBUS, *_KILLED, "out of disk space", "MemoryError")
_COMPLAINT = re.compile("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True))), re.IGNORECASE)
OUT_OF_MEMORY = (os.strerror(errno.ENOMEM), "MemoryError")


def complaint(error: BaseException | str) -> str:
    """The words in `error`, or in what it came from, that name a fault of the machine; "" if there are none."""
    if isinstance(error, str):
        found = _COMPLAINT.search(error)
        return found.group() if found else ""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause and cause not in seen:
        seen.append(cause)
        if isinstance(cause, MemoryError):
            return "MemoryError"
        if isinstance(cause, OSError) and cause.errno in _NUMBERS:
            return os.strerror(cause.errno)
        if words := complaint(str(cause)):
            return words
        cause = cause.__cause__ or cause.__context__
    return ""


def prove_machine() -> None:
    """Write and read a file in the temporary folder, use some memory, start a process.  Raises MachineError."""
    folder = tempfile.gettempdir()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        content = os.urandom(2**16) * (FILE // 2**16)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != content:
                raise MachineError(f"{folder} does not give back what is written to it; set TMPDIR to another folder")
    except OSError as error:
        raise MachineError(
            f"the temporary folder {folder} cannot be used: {error.strerror or error}; free some space, or set TMPDIR"
        ) from error
    try:
        subprocess.run(["true"], check=False, timeout=60)
    except FileNotFoundError:
        pass  # a system without it is no worse for that
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"no process can be started: {error}; end some others") from error
    try:
        bytearray(MEMORY)
    except MemoryError as error:
        raise MachineError(f"{MEMORY >> 20} MiB of memory cannot be had; end some processes") from error
    prove_memory()


def prove_memory() -> None:
    """Raises MachineError if so little memory is left that the system is about to end processes."""
    for left, total in memory():
        if left < SHORT * total:
            raise MachineError(f"only {left >> 20} MiB of {total >> 20} MiB memory are left; end some processes")
