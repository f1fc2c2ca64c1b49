"""The process that runs kernels: `python -m schedules.emulate.worker REQUESTS RESPONSES PARENT RUNTIME`.

REQUESTS and RESPONSES are inherited pipe descriptors, PARENT the process to die with, RUNTIME the compiled runtime
library.  Only TVM's runtime library is loaded, never its compiler nor its CUDA runtime.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from schedules.check.emulate.device_module import (
    FLOAT_CODE,
    HANDLE_CODE,
    UINT_CODE,
    ArgumentType,
    KernelSignature,
    LaunchShape,
    parse_device_module,
)
from schedules.check.emulate.protocol import read_frame, write_frame
from schedules.check.emulate.tensor_map import TensorMap, encode_tiled
from schedules.core.process import die_with

_DEVICES = {"cuda": 2, "rocm": 10}  # of DLDeviceType
_ORDERS = {"forward": 0, "reverse": 1, "strided": 2}
_MESSAGE_BYTES = 1024
_MAP_BYTES = 128


class KernelFailed(Exception):
    """The runtime stopped a kernel; the text says why and where."""


class _LaunchOptions(ctypes.Structure):
    """`emu::LaunchOptions` of cxx/launch.h."""

    _fields_ = [
        ("grid", ctypes.c_int * 3),
        ("block", ctypes.c_int * 3),
        ("cluster", ctypes.c_int * 3),
        ("dynamic_shared", ctypes.c_int),
        ("late_copies", ctypes.c_int),
        ("order", ctypes.c_int),
        ("wave", ctypes.c_int),
    ]


class _Kernel(ctypes.Structure):
    """`emu::Kernel` of cxx/launch.h."""

    _fields_ = [("run", ctypes.c_void_p), ("shared", ctypes.c_void_p), ("parameters", ctypes.c_int)]


def _address(value: Any) -> int:
    """The address in a handle, 0 for null."""
    return (value.value if isinstance(value, ctypes.c_void_p) else value) or 0


def _argument_cell(value: Any, kind: ArgumentType, tensor_map: bool = False) -> Any:
    """A ctypes object holding one kernel argument as the kernel's parameter type has it."""
    if tensor_map:
        return _map_cell(ctypes.string_at(_address(value), _MAP_BYTES))
    if kind.code == HANDLE_CODE:
        return ctypes.c_void_p(_address(value))
    if kind.code == FLOAT_CODE:
        return (ctypes.c_float if kind.bits == 32 else ctypes.c_double)(value)
    prefix = "c_uint" if kind.code == UINT_CODE else "c_int"
    return getattr(ctypes, f"{prefix}{max(8, kind.bits)}")(value)


def _map_cell(encoded: bytes) -> Any:
    return (ctypes.c_uint64 * (_MAP_BYTES // 8)).from_buffer_copy(encoded)


class Worker:
    """Answers requests; holds what the current request's kernels need while TVM's host code calls back."""

    def __init__(self, runtime: Path) -> None:
        import tvm_ffi
        from tvm_ffi import libinfo

        package = importlib.util.find_spec("tvm")
        if package is None or not package.submodule_search_locations:
            raise ImportError("apache-tvm is not installed")
        tvm_folder = Path(package.submodule_search_locations[0])
        ctypes.CDLL(libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(tvm_folder / "lib" / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
        self.runtime = ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        self.tvm_ffi = tvm_ffi
        self.make_module = tvm_ffi.get_global_func("schedules.emulate.module")
        self.make_tensor = tvm_ffi.get_global_func("schedules.emulate.tensor")
        self.address = tvm_ffi.get_global_func("schedules.emulate.address")
        self.check_padding = tvm_ffi.get_global_func("schedules.emulate.check_padding")
        for kind in ("cuda", "hip"):
            tvm_ffi.register_global_func(f"ffi.Module.load_from_bytes.{kind}", self.load_device_module, override=True)
        tvm_ffi.register_global_func("runtime.cuTensorMapEncodeTiled", self.encode_tensor_map, override=True)
        self.kernels: ctypes.CDLL | None = None
        self.mode: dict[str, str] = {}
        self.wave = 32
        self.failure = ""

    # ---- Launching ----

    def launch(self, name: str, cells: Sequence[Any], shape: LaunchShape) -> None:
        try:
            kernel = _Kernel.in_dll(self.kernels, f"emu_kernel_{name}")  # type: ignore[arg-type]
        except ValueError:
            raise KernelFailed(f"the source has no kernel {name!r}") from None
        if kernel.parameters != len(cells):
            raise KernelFailed(f"kernel {name!r} takes {kernel.parameters} arguments and is given {len(cells)}")
        three = ctypes.c_int * 3
        late = self.mode["copies"] == "late"
        extents = three(*shape.grid), three(*shape.block), three(*shape.cluster)
        options = _LaunchOptions(*extents, shape.dynamic_shared, late, _ORDERS[self.mode["order"]], self.wave)
        arguments = (ctypes.c_void_p * max(1, len(cells)))(*map(ctypes.addressof, cells))
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self.runtime.emu_launch(ctypes.byref(kernel), arguments, ctypes.byref(options), message, _MESSAGE_BYTES):
            raise KernelFailed(message.value.decode(errors="replace"))

    def load_device_module(self, blob: bytes) -> Any:
        """Stands in for the loader of TVM's CUDA or ROCm runtime: gives kernels that run in the emulator."""
        signatures = parse_device_module(bytes(blob))
        kernels = {name: self.tvm_ffi.convert(self._kernel(name, s)) for name, s in signatures.items()}
        return self.make_module(kernels)

    def _kernel(self, name: str, signature: KernelSignature) -> Any:
        def call(*values: Any) -> None:
            count = len(signature.arguments)
            try:
                shape = signature.launch_shape(tuple(int(value) for value in values[count:]))
                pairs = zip(values[:count], signature.arguments, strict=True)
                cells = [_argument_cell(v, t, i in signature.tensor_maps) for i, (v, t) in enumerate(pairs)]
                self.launch(name, cells, shape)
            except (KernelFailed, ValueError) as error:
                self.failure = str(error)  # what comes out of the host code is wrapped in its own words
                raise

        return call

    def encode_tensor_map(self, target: Any, dtype: Any, rank: int, data: Any, *rest: Any) -> None:
        """Stands in for the function of TVM's CUDA runtime that calls the driver."""
        try:
            encoded = encode_tiled(self.tvm_ffi.dtype(dtype).bits, rank, _address(data), rest)
        except ValueError as error:
            self.failure = str(error)
            raise
        ctypes.memmove(_address(target), encoded, _MAP_BYTES)

    # ---- Requests ----

    @contextlib.contextmanager
    def request(self, header: dict[str, Any]) -> Iterator[None]:
        """Loads the request's kernels and unloads them again: a worker may see thousands."""
        try:
            kernels = ctypes.CDLL(header["kernels"])
        except OSError as error:
            unknown = re.search(r"undefined symbol: (\S+)", str(error))
            if not unknown:
                raise
            name = unknown[1].replace("emu.amdgcn.", "llvm.amdgcn.")
            raise KernelFailed(f"the emulator does not know {name}, which the kernel calls") from None
        self.kernels, self.mode, self.wave, self.failure = kernels, header["mode"], header["wave"], ""
        try:
            yield
        finally:
            self.kernels = None
            _ctypes.dlclose(kernels._handle)

    def upload(self, kind: str, arguments: list[dict[str, Any]], payload: Sequence[bytearray]) -> list[Any]:
        tensors = []
        for argument, data in zip(arguments, payload, strict=True):
            dtype = self.tvm_ffi.dtype(argument["dtype"])
            tensor = self.make_tensor(self.tvm_ffi.Shape(argument["shape"]), dtype, _DEVICES[kind])
            ctypes.memmove(self.address(tensor), bytes(data), len(data))
            tensors.append(tensor)
        return tensors

    def handle(self, header: dict[str, Any], payload: Sequence[bytearray]) -> list[bytes]:
        with self.request(header):
            tensors = self.upload(header["kind"], header["arguments"], payload)
            if "library" in header:
                self.tvm_ffi.load_module(header["library"])[header["entry"]](*tensors)
            else:
                addresses = [self.address(tensor) for tensor in tensors]
                cells: list[Any] = [ctypes.c_void_p(address) for address in addresses]
                for fields in header["tensor_maps"]:
                    tensor_map = TensorMap(**fields)
                    cells.append(_map_cell(tensor_map.encode(addresses[tensor_map.argument])))
                self.launch(header["kernel"], cells, LaunchShape(**header["shape"]))
            damage = self.check_padding()
            if damage:
                raise KernelFailed(str(damage))
            return [ctypes.string_at(self.address(tensors[i]), len(payload[i])) for i in header["outputs"]]

    def serve(self, requests: int, responses: int) -> None:
        write_frame(responses, {"ready": True})
        while True:
            try:
                header, payload = read_frame(requests)
            except EOFError:
                return
            try:
                outputs = self.handle(header, payload)
            except Exception as error:  # whatever it is, the parent has to know, and the next request may be fine
                write_frame(responses, {"error": self.failure or _one_line(error)})
            else:
                write_frame(responses, {"ok": True}, outputs)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) if lines else type(error).__name__


def main(arguments: Sequence[str]) -> None:
    """Serve the requests of the parent: file descriptors of both pipes, its process id, and a folder."""
    requests, responses, parent = (int(argument) for argument in arguments[:3])
    die_with(parent)
    worker = Worker(Path(arguments[3]))
    worker.runtime.emu_report_crashes(responses)
    worker.serve(requests, responses)


if __name__ == "__main__":
    main(sys.argv[1:])
