"""A process that has tvm_ffi, NumPy and TVM's runtime library, and nothing else of this package or TVM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def bare_folder(path: Path) -> Path:
    """`path`, for sys.path, with tvm_ffi, NumPy and NVIDIA's libraries: no tvm to import, no site-packages."""
    for name in ("tvm_ffi", "numpy", "nvidia", "typing_extensions"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or [])
        source = Path(places[0] if places else str(spec.origin))
        (path / source.name).symlink_to(source)
        libraries = source.with_name(f"{name}.libs")
        if libraries.is_dir():
            (path / libraries.name).symlink_to(libraries)
    return path


def runtime_libraries() -> str:
    """The folder of TVM's runtime libraries."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "lib")


def clean_python(code: str, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with only `environment` set: PATH is empty, there is no site-packages."""
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, words)]
    return subprocess.run(command, env={"PATH": "", **environment}, capture_output=True, text=True, timeout=60)
