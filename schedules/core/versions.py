"""The versions that a result depends on."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib import import_module, metadata

PACKAGES = {"te-schedules": "schedules", "apache-tvm": "tvm", "apache-tvm-ffi": "tvm_ffi", "numpy": "numpy"}


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _module_version(module: str) -> str:
    """The version that a module states: for packages that were unpacked rather than installed."""
    return str(getattr(import_module(module), "__version__", "unknown"))


@lru_cache
def versions() -> dict[str, str]:
    """Versions of this package, TVM, its FFI, NumPy and Python, by distribution name."""
    found = {name: version_of(name) or _module_version(module) for name, module in PACKAGES.items()}
    return {**found, "python": platform.python_version()}
