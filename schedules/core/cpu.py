"""The CPU that this process runs on, as the system tells: its features and its caches."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path

KIB = 1024
CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MOST_CACHE = 128 * KIB**2  # the largest last-level cache that is told apart from larger ones
SECOND = 1024 * KIB  # bytes of a second-level cache where the system does not tell


def cpu_model() -> str | None:
    """The name of this CPU's model; None where it is not told."""
    return _told("model name")


def cpu_features() -> frozenset[str] | None:
    """The features of this CPU by Linux's names; None where they are not told."""
    flags = _told("flags")
    return None if flags is None else frozenset(flags.split())


@lru_cache
def last_level_cache() -> int:
    """Bytes of this machine's largest CPU cache; where the system does not tell, and at most, MOST_CACHE."""
    return min(max((nbytes for _, nbytes in _caches()), default=MOST_CACHE), MOST_CACHE)


@lru_cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; where the system does not tell, SECOND."""
    return next((nbytes for level, nbytes in _caches() if level == 2), SECOND)


def beyond_caches(nbytes: int, share: float = 3 / 4) -> bool:
    """Whether tensors of so many bytes have their stores go past the caches of this CPU: from a `share` of the last
    one, by default that of glibc's memcpy."""
    return nbytes > share * last_level_cache()


def _told(field: str) -> str | None:
    """What Linux says of the first processor."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith(field):
                return line.split(":", 1)[1].strip()
    return None


def _caches() -> list[tuple[int, int]]:
    """The level and the bytes of each cache of a core."""
    found = []
    for index in sorted(CACHES.glob("index*")):
        with contextlib.suppress(OSError, ValueError):
            level, size = (int((index / "level").read_text()), (index / "size").read_text().strip())
            found.append((level, int(size.rstrip("KM")) * {"K": KIB, "M": KIB**2}.get(size[-1], 1)))
    return found
