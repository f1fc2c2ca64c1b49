"""PyTorch, and cuDNN by its own interface: what the peers share."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from schedules.core.errors import ToolchainError

INSTALL = "pip install 'te-schedules[torch]'"
NCHW, NHWC = 0, 1  # cudnnTensorFormat_t
FLOAT, INT8, INT32 = 0, 3, 4  # cudnnDataType_t


def torch_module() -> Any:
    """PyTorch.  Raises ToolchainError if it is not installed."""
    try:
        import torch
    except ImportError:
        raise ToolchainError(f"PyTorch is not installed, and peers are measured through it; {INSTALL}") from None
    return torch


@lru_cache
def library() -> ctypes.CDLL:
    """cuDNN 9's library, the one that PyTorch uses.  Raises ToolchainError if it is not there."""
    torch_module()
    try:
        import nvidia.cudnn as package
    except ImportError:
        raise ToolchainError(f"cuDNN's library was not found beside PyTorch; {INSTALL}") from None
    return ctypes.CDLL(str(Path(next(iter(package.__path__))) / "lib" / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)


def ok(status: int) -> None:
    """Raise RuntimeError in cuDNN's words if `status` (a cudnnStatus_t) is not success."""
    if status:
        library().cudnnGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(library().cudnnGetErrorString(status).decode())


def descriptor(create: str, set_up: str, *values: Any) -> ctypes.c_void_p:
    """A descriptor made by `create` and filled by `set_up`."""
    made = ctypes.c_void_p()
    ok(getattr(library(), create)(ctypes.byref(made)))
    ok(getattr(library(), set_up)(made, *values))
    return made


def pointer(tensor: Any) -> ctypes.c_void_p:
    """Where a PyTorch tensor's data lies."""
    return ctypes.c_void_p(tensor.data_ptr())


def handle() -> ctypes.c_void_p:
    """The process's cuDNN handle, set to PyTorch's current stream: ask for it before each call."""
    made = _handle()
    ok(library().cudnnSetStream(made, ctypes.c_void_p(torch_module().cuda.current_stream().cuda_stream)))
    return made


@lru_cache
def _handle() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    ok(library().cudnnCreate(ctypes.byref(made)))
    return made
