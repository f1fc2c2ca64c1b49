"""Folders that come into being whole or not at all, and names that stay inside of one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from schedules.core.errors import BundleError, UsageError

CACHE = "SCHEDULES_CACHE"
LONGEST = 255  # bytes of a file's name, on Linux's file systems


def cache_folder() -> Path:
    """Where this user's files that can be made again are kept: what SCHEDULES_CACHE names, else the system's place."""
    if named := os.environ.get(CACHE):
        return Path(named).absolute()
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:  # a checkout whose requirements were not installed
        return Path(tempfile.gettempdir()) / f"te-schedules-{os.getuid()}"
    return user_cache_path("te-schedules", appauthor=False)


def inside(folder: str | Path, name: object) -> Path:
    """The path that `name`, which someone else wrote, has in `folder`.

    Raises UsageError for what is no name of a file, or leads outside: an absolute path, `..`, a symbolic link.
    """
    if not isinstance(name, str) or not name.isprintable():  # NUL, surrogates and line breaks are not printable
        raise UsageError(f"{str(name)[:80]!r} is not a file's name; use letters, digits, - and _")
    parts = Path(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise UsageError(f"{name[:80]!r} leads outside {folder}; use a name without / and ..")
    if max(len(os.fsencode(part)) for part in parts) > LONGEST:
        raise UsageError(f"{name[:20]}... has {len(name)} letters; use a name of at most {LONGEST}")
    path = Path(folder) / name
    if not path.resolve().is_relative_to(Path(folder).resolve()):
        raise UsageError(f"{path} is a link that leads outside {folder}; remove it")
    return path


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out`, an absolute path, when the body ends, and is gone if it fails.

    What was at `out` is replaced.  Raises BundleError for what the file system refuses, in the body too.
    """
    with _reported(out), _parents(out), _beside(out) as temporary:
        yield temporary
        _place(temporary, out)


@contextlib.contextmanager
def _reported(out: Path) -> Iterator[None]:
    """Turn what the file system refuses into a BundleError."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


@contextlib.contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Make the folders above `out`, and remove those that were made if the body fails."""
    missing = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # someone else's files came in meanwhile: theirs to keep
                folder.rmdir()
        raise


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `out`, removed at the end if it is still there."""
    # removed by an exit function, too, should the process end where no `finally` runs
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", ignore_cleanup_errors=True) as made:
        temporary = Path(made)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # which is made for the owner's eyes only
        yield temporary


def _place(temporary: Path, out: Path) -> None:
    """Put `temporary` where `out` is; an old folder lies in `temporary` afterwards."""
    if not out.exists() or not any(out.iterdir()):
        os.rename(temporary, out)
        return
    exchange = _renameat2()
    if exchange is not None and exchange(os.fsencode(temporary), os.fsencode(out)):
        return
    # a system that cannot exchange two names in one step
    aside = temporary.with_name(temporary.name + ".old")
    os.rename(out, aside)
    try:
        os.rename(temporary, out)
    except OSError:
        os.rename(aside, out)
        raise
    os.rename(aside, temporary)


def _renameat2() -> Callable[[bytes, bytes], bool] | None:
    """Linux's exchange of two names, if the C library has it; the function says whether it worked."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return lambda a, b: libc.renameat2(here, a, here, b, exchange) == 0
