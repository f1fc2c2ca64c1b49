"""The versions that a result depends on."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib import metadata

PACKAGES = ("te-schedules", "apache-tvm", "apache-tvm-ffi", "numpy")


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@lru_cache
def versions() -> dict[str, str]:
    """Versions of this package, TVM, its FFI, NumPy and Python, by distribution name."""
    found = {name: version_of(name) or "unknown" for name in PACKAGES}
    return {**found, "python": platform.python_version()}
