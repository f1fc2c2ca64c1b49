"""TVM's runtime libraries, loaded without TVM's Python and its compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path

from schedules.core.errors import ToolchainError


@lru_cache
def load_runtime(name: str = "libtvm_runtime.so") -> None:
    """Load a library of the installed TVM.  Raises ToolchainError if TVM is not installed or the library not loaded."""
    spec = importlib.util.find_spec("tvm")
    folders = spec.submodule_search_locations if spec else None
    try:
        ctypes.CDLL(str(Path(folders[0]) / "lib" / name) if folders else name, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(f"{name} does not load ({' '.join(str(error).split())}); pip install apache-tvm") from None
