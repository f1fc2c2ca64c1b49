"""Built functions as shared libraries: what is known of one, and how it is loaded, without TVM's compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedules.build.toolchain import cuda
from schedules.build.toolchain.runtime import load_runtime
from schedules.core import threads
from schedules.core.arch import Arch

VECTOR_BYTES = 16  # of the widest load; a GPU faults on one that is not aligned to its size


@dataclass(frozen=True)
class Launch:
    """Block and grid of the kernel; a grid axis that depends on a run-time extent is its formula as text.

    `cluster` blocks share their shared memory.
    """

    grid: tuple[int | str, int | str, int | str]
    block: tuple[int, int, int]
    cluster: int = 1

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


def load_library(path: Path, arch: Arch) -> Any:
    """The function of a build for `arch` that was exported to the shared library `path`.

    Raises ToolchainError if TVM's runtime, or CUDA's, is missing.
    """
    import tvm_ffi

    load_runtime()
    if arch.kind == "cuda":
        cuda.ensure_runtime()
    module = tvm_ffi.load_module(str(path))
    return (threads.share(module) if arch.kind == "llvm" else module)["main"]
