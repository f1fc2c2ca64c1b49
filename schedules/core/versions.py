"""The versions that a result depends on."""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

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


@lru_cache
def sources(module: str) -> str:
    """A digest of the files of a module or package: another one after an edit, which changes no version."""
    spec = find_spec(module)
    files = {Path(spec.origin).name: Path(spec.origin)} if spec and spec.origin else {}
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in Path(folder).rglob("*"):
            if file.suffix in (".py", ".npz", ".toml"):
                files[str(file.relative_to(folder))] = file
    total = hashlib.sha256()
    for name, file in sorted(files.items()):
        total.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()
