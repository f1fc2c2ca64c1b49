"""A GPU's driver, as a library.

NVIDIA's (libcuda) and AMD's (libamdhip64, of ROCm or of a PyTorch that brings one) have the same functions under two
names.  A bundle's load.py holds this module, which therefore needs nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_LIBRARIES = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"}
_WITH_HIP = ("torch", "_rocm_sdk_core")  # packages that may have it in their lib: PyTorch, and ROCm from pip
_INSTALL = {"cuda": "install NVIDIA's driver", "rocm": "install ROCm, or PyTorch for ROCm"}
_NAMES = {
    "init": ("cuInit", "hipInit"),
    "count": ("cuDeviceGetCount", "hipGetDeviceCount"),
    "retain": ("cuDevicePrimaryCtxRetain", ""),
    "current": ("cuCtxGetCurrent", "hipGetDevice"),
    "make_current": ("cuCtxSetCurrent", "hipSetDevice"),
    "load": ("cuModuleLoadData", "hipModuleLoadData"),
    "unload": ("cuModuleUnload", "hipModuleUnload"),
    "function": ("cuModuleGetFunction", "hipModuleGetFunction"),
    "attribute": ("cuFuncSetAttribute", ""),
    "allocate": ("cuMemAlloc_v2", "hipMalloc"),
    "free": ("cuMemFree_v2", "hipFree"),
    "capture": ("cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2"),
    "capture_mode": ("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"),
    "encode": ("cuTensorMapEncodeTiled", ""),
    "launch": ("cuLaunchKernelEx", "hipModuleLaunchKernel"),
    "error": ("cuGetErrorString", "hipDrvGetErrorString"),
}
_RELAXED = 2  # of CUstreamCaptureMode: memory may be allocated


class KernelError(RuntimeError):
    """Base of the errors of this module; each is one line.  It is raised itself for a kernel that failed."""


class LoadError(KernelError):
    """This machine cannot load the kernel: another CPU or device, or a library that is not installed."""


class ArgumentError(KernelError, ValueError):
    """Tensors that the kernel does not take; nothing was run."""


class Driver:
    """A driver library; call it with one of `_NAMES` and that function's arguments.  Raises KernelError."""

    def __init__(self, kind: str) -> None:
        self.kind, self.library = kind, driver_library(kind)
        self.names = {name: pair[kind == "rocm"] for name, pair in _NAMES.items()}
        count = ctypes.c_int()
        try:
            self("init", 0)
            self("count", ctypes.byref(count))
        except (AttributeError, KernelError) as error:  # a stand-in for cross-building has no cuInit
            raise LoadError(f"no {kind} device can be used ({error}); {_INSTALL[kind]}") from None
        if not count.value:
            raise LoadError(f"this machine has no {kind} device")

    def __call__(self, name: str, *arguments: Any) -> None:
        self.bound(name, *arguments)()

    def bound(self, name: str, *arguments: Any) -> Callable[[], None]:
        """A call that is made again and again."""
        function = self.function(name)

        def call() -> None:
            if code := function(*arguments):
                raise self.error(name, code)

        return call

    def function(self, name: str) -> Callable[..., int]:
        """One of the library's own, which returns 0 or the code of an error."""
        found: Callable[..., int] = getattr(self.library, self.names[name])
        return found

    def error(self, name: str, code: int) -> KernelError:
        told = ctypes.c_char_p()
        if hasattr(self.library, self.names["error"]):  # ROCm has it from 5.5 on
            getattr(self.library, self.names["error"])(code, ctypes.byref(told))
        reason = told.value.decode(errors="replace") if told.value else "error"
        return KernelError(f"{self.names[name]} failed ({code}: {reason})")

    def context(self, index: int | None = None) -> Any:
        """What `on` takes for a device: CUDA's primary context, or its number; without `index` room for one."""
        if self.kind == "rocm":
            return ctypes.c_int(index or 0)
        found = ctypes.c_void_p()
        if index is not None:
            self("retain", ctypes.byref(found), index)
        return found

    @contextlib.contextmanager
    def on(self, context: Any) -> Iterator[None]:
        """With a device as the current one of this thread."""
        before = self.context()
        self("current", ctypes.byref(before))
        self("make_current", context)
        try:
            yield
        finally:
            self("make_current", before)

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """With memory that this thread may allocate and free whatever is captured meanwhile."""
        mode = ctypes.c_int(_RELAXED)
        self("capture_mode", ctypes.byref(mode))
        try:
            yield
        finally:
            self("capture_mode", ctypes.byref(mode))


@functools.cache
def driver_of(kind: str) -> Driver:
    """The driver of a kind of GPU, loaded once.  Raises LoadError."""
    return Driver(kind)


def driver_library(kind: str) -> ctypes.CDLL:
    """The first of `_places` that loads.  Raises LoadError."""
    reason: object = ""
    for name in _places(kind):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reason = reason or error
    raise LoadError(f"{_LIBRARIES[kind]} does not load ({reason}); {_INSTALL[kind]}")


def _places(kind: str) -> Iterator[str]:
    """Where the driver's library may be.  There may be several of HIP's, of any version, and a process must not use
    two: first that which is loaded already, then that of a Python package, then the system's."""
    if kind == "rocm":
        with contextlib.suppress(OSError):
            yield from re.findall(r"\S*/libamdhip64\.so\S*", Path("/proc/self/maps").read_text())
        for package in filter(None, map(importlib.util.find_spec, _WITH_HIP)):
            for root in package.submodule_search_locations or []:
                yield from map(str, sorted(Path(root).glob("lib/libamdhip64.so*")))
    yield _LIBRARIES[kind]
    if kind == "rocm":
        if known := ctypes.util.find_library("amdhip64"):
            yield known
        yield from map(str, sorted(Path("/opt").glob("rocm*/lib/libamdhip64.so*")))
