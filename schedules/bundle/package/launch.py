"""Kernels launched by the GPU's driver, as data says: no TVM.

NVIDIA's driver library (libcuda) and AMD's (libamdhip64, of ROCm or of a PyTorch that brings one) have the same
functions under two names.  `Launcher` loads a cubin or a code object with them and launches what `launches` of
kernel.json lists; how that reads is told in docs/libraries.md.

A bundle's load.py holds this module, which therefore needs nothing else of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

VECTOR_BYTES = 16  # of the widest load: a GPU faults on an address that is no multiple of it
OPT_IN = 48 << 10  # bytes of dynamic shared memory that a kernel may use unasked
PORTABLE_CLUSTER = 8  # blocks
PLACES = {"cuda": (2, 13), "rocm": (10,)}  # DLPack's device types
CODE = {"cuda": "kernel.cubin", "rocm": "kernel.hsaco"}

_LIBRARIES = {
    "cuda": ("libcuda.so.1",),
    "rocm": tuple(f"libamdhip64.so{version}" for version in ("", ".7", ".6", ".5")),
}
_INSTALL = {"cuda": "install NVIDIA's driver", "rocm": "install ROCm, or PyTorch for ROCm"}
_NAMES = {
    "init": ("cuInit", "hipInit"),
    "count": ("cuDeviceGetCount", "hipGetDeviceCount"),
    "retain": ("cuDevicePrimaryCtxRetain", ""),
    "push": ("cuCtxPushCurrent_v2", ""),
    "pop": ("cuCtxPopCurrent_v2", ""),
    "device": ("", "hipGetDevice"),
    "set_device": ("", "hipSetDevice"),
    "load": ("cuModuleLoadData", "hipModuleLoadData"),
    "unload": ("cuModuleUnload", "hipModuleUnload"),
    "function": ("cuModuleGetFunction", "hipModuleGetFunction"),
    "attribute": ("cuFuncSetAttribute", ""),
    "allocate": ("cuMemAlloc_v2", "hipMalloc"),
    "free": ("cuMemFree_v2", "hipFree"),
    "capture": ("cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2"),
    "capture_mode": ("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"),
    "encode": ("cuTensorMapEncodeTiled", ""),
    "launch": ("cuLaunchKernel", "hipModuleLaunchKernel"),
    "launch_with": ("cuLaunchKernelEx", ""),
    "error": ("cuGetErrorString", "hipDrvGetErrorString"),
}
_MOST_SHARED, _ANY_CLUSTER = 8, 14  # of CUfunction_attribute
_COOPERATIVE, _CLUSTER, _DEPENDENT = 2, 4, 6  # of CUlaunchAttributeID
_RELAXED = 2  # of CUstreamCaptureMode: memory may be allocated
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
}
_MAP_WORDS = {"dims": ctypes.c_uint64, "strides": ctypes.c_uint64, "box": ctypes.c_uint32}
_MAP_WORDS["element_strides"] = ctypes.c_uint32
_TYPES = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "uint32": ctypes.c_uint32, "uint64": ctypes.c_uint64}
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}  # of DLPack's types
_KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool"}  # of NumPy's


class KernelError(RuntimeError):
    """Base of the errors of this module; each is one line.  It is raised itself for a kernel that failed."""


class LoadError(KernelError):
    """This machine cannot load the kernel: another CPU or device, or a library that is not installed."""


class ArgumentError(KernelError, ValueError):
    """Tensors that the kernel does not take; nothing was run."""


def value(formula: Any, sizes: Mapping[str, int]) -> int:
    """The number that a formula stands for: a number, the name of a size, or [operation, formula, formula]."""
    if isinstance(formula, list):
        name, left, right = formula
        return int(_OPERATIONS[name](value(left, sizes), value(right, sizes)))
    return sizes[formula] if isinstance(formula, str) else int(formula)


def plan(launches: Mapping[str, Any], arguments: Iterable[str], sizes: Mapping[str, int]) -> dict[str, Any]:
    """`launches` with numbers in place of formulas.

    Raises KeyError for a name that is nowhere, ValueError for a number that no launch has.
    """
    spaces = {each["name"]: _most(value(each["bytes"], sizes), 1 << 48) for each in launches["workspaces"]}
    known = {"buffer": {*arguments, *spaces}, "map": launches["maps"].keys(), "dtype": _TYPES.keys()}

    def named(told: Mapping[str, Any]) -> Mapping[str, Any]:
        for word in known.keys() & told.keys():
            if told[word] not in known[word]:
                raise KeyError(told[word])
        return {**told, "value": value(told["value"], sizes)} if "value" in told else told

    def numbers(told: Mapping[str, Any], words: Iterable[str], count: int | None = None) -> dict[str, Any]:
        found = {word: [_most(value(each, sizes), 1 << 40) for each in told[word]] for word in words}
        if count is not None and any(len(each) != count or 0 in each for each in found.values()):
            raise ValueError(f"{count} numbers are needed")
        return {**told, **found}

    maps = {name: numbers(named(told), _MAP_WORDS) for name, told in launches["maps"].items()}
    kernels = [
        {
            **numbers(told, ("grid", "block", "cluster"), 3),
            "shared": _most(value(told["shared"], sizes), 1 << 20),
            "arguments": [named(each) for each in told["arguments"]],
        }
        for told in launches["kernels"]
    ]
    return {"workspaces": spaces, "maps": maps, "kernels": kernels}


def _most(number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise ValueError(f"{number} is not 0 to {most}")
    return number


class Tensor:
    """What is to be known of a tensor, from PyTorch's own methods, DLPack, or the CUDA array interface."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Any, dtype: str, place: int | None, index: int
    ) -> None:
        self.address, self.shape, self.dtype = address, tuple(map(int, shape)), dtype
        self.place, self.index, self.contiguous = place, index, True
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(strides or ()), strict=False):
            self.contiguous &= extent == 1 or int(stride) == expected
            expected *= extent


class _DLTensor(ctypes.Structure):
    """DLTensor of DLPack, of which a capsule holds a DLManagedTensor that starts with it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _tensor(tensor: Any, name: str) -> Tensor:
    """What is to be known of `tensor`.  Raises ArgumentError for what is no tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        place, index = tensor.__dlpack_device__()
        return Tensor(tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, int(place), index)
    if hasattr(tensor, "__dlpack__"):
        try:
            return _of_capsule(tensor.__dlpack__())
        except BufferError as error:
            raise ArgumentError(f"{name}: {error}; pass what can be written") from None
    told = getattr(tensor, "__cuda_array_interface__", None)
    if told is None:
        raise ArgumentError(f"{name} is a {type(tensor).__name__}, needed a tensor: of PyTorch, or by DLPack")
    kind, size = told["typestr"][1], int(told["typestr"][2:])
    strides = told.get("strides") and [stride // size for stride in told["strides"]]
    dtype = f"{_KINDS.get(kind, kind)}{8 * size if kind != 'b' else ''}"
    return Tensor(told["data"][0], told["shape"], strides, dtype, None, 0)


def _of_capsule(capsule: Any) -> Tensor:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    shape = found.shape[: found.ndim]
    strides = found.strides[: found.ndim] if found.strides else None
    dtype = f"{_CODES.get(found.code, found.code)}{found.bits if found.code != 6 else ''}"
    address = (found.data or 0) + found.byte_offset
    return Tensor(address, shape, strides, dtype, found.device_type, found.device_id)


def _stream(tensor: Any, index: int) -> int:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return 0
    return int(torch.cuda.current_stream(index).cuda_stream)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{kind}_{axis}", ctypes.c_uint32) for kind in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    ]


class Driver:
    """A driver library; call it with one of `_NAMES` and that function's arguments.  Raises KernelError."""

    def __init__(self, kind: str) -> None:
        self.kind, self.library = kind, _library(kind)
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
        code = getattr(self.library, self.names[name])(*arguments)
        if code:
            told = ctypes.c_char_p()
            if hasattr(self.library, self.names["error"]):  # ROCm has it from 5.5 on
                getattr(self.library, self.names["error"])(code, ctypes.byref(told))
            reason = told.value.decode(errors="replace") if told.value else "error"
            raise KernelError(f"{self.names[name]} failed ({code}: {reason})")

    def context(self, index: int) -> Any:
        """What `on` takes for a device: CUDA's primary context, or its number."""
        if self.kind == "rocm":
            return index
        found = ctypes.c_void_p()
        self("retain", ctypes.byref(found), index)
        return found

    @contextlib.contextmanager
    def on(self, context: Any) -> Iterator[None]:
        """With a device as the current one of this thread."""
        before = ctypes.c_int() if self.kind == "rocm" else ctypes.c_void_p()
        if self.kind == "rocm":
            self("device", ctypes.byref(before))
            self("set_device", context)
        else:
            self("push", context)
        try:
            yield
        finally:
            if self.kind == "rocm":
                self("set_device", before)
            else:
                self("pop", ctypes.byref(before))

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """With memory that this thread may allocate and free whatever is captured meanwhile."""
        mode = ctypes.c_int(_RELAXED)
        self("capture_mode", ctypes.byref(mode))
        try:
            yield
        finally:
            self("capture_mode", ctypes.byref(mode))


def _release(driver: Driver, context: Any, module: Any, memory: Sequence[int]) -> None:
    with driver.on(context), driver.relaxed():
        for address in memory:
            driver("free", ctypes.c_void_p(address))
        driver("unload", module)


class _Loaded:
    """The code on one device, and the workspaces there."""

    def __init__(
        self, driver: Driver, index: int, code: bytes, kernels: Sequence[Mapping[str, Any]], told: str
    ) -> None:
        """`told` is the code in words.  Raises LoadError."""
        self.driver, self.lock = driver, threading.Lock()
        self.context = self.driver.context(index)
        self.memory: dict[Any, tuple[int, int]] = {}  # of a workspace for a stream and graph: address and bytes
        self.all: list[int] = []
        self.functions: dict[str, ctypes.c_void_p] = {}
        module = ctypes.c_void_p()
        with self.driver.on(self.context):
            try:
                self.driver("load", ctypes.byref(module), code)
            except KernelError as error:
                raise LoadError(f"{error}; device {index} takes no {told}") from None
            for kernel in kernels:
                function = self.functions[kernel["symbol"]] = ctypes.c_void_p()
                self.driver("function", ctypes.byref(function), module, kernel["symbol"].encode())
                if prod(kernel["cluster"]) > PORTABLE_CLUSTER:
                    self.driver("attribute", function, _ANY_CLUSTER, 1)
        # not at exit, when the driver may be gone
        weakref.finalize(self, _release, self.driver, self.context, module, self.all).atexit = False

    def fill(self, addresses: dict[str, int], workspaces: Mapping[str, int], stream: Any) -> None:
        """Add the addresses of `workspaces`, of so many bytes, by who has the lock."""
        if not workspaces:
            return
        graph, status = ctypes.c_uint64(), ctypes.c_int()
        self.driver("capture", stream, ctypes.byref(status), ctypes.byref(graph), None, None, None)
        for name, wanted in workspaces.items():
            key = name, stream.value, graph.value if status.value else None
            address, size = self.memory.get(key, (0, 0))
            if size < wanted:
                address = self._allocated(wanted)
                self.memory[key] = address, wanted
            addresses[name] = address

    def _allocated(self, size: int) -> int:
        memory = ctypes.c_void_p()
        with self.driver.relaxed():
            self.driver("allocate", ctypes.byref(memory), ctypes.c_size_t(size))
        self.all.append(memory.value or 0)
        return memory.value or 0

    def launch(self, kernel: Mapping[str, Any], cells: Sequence[Any], stream: Any) -> None:
        """Pass `cells` to a kernel."""
        function, shared = self.functions[kernel["symbol"]], kernel["shared"]
        if shared > OPT_IN and self.driver.kind == "cuda":
            self.driver("attribute", function, _MOST_SHARED, shared)
        shape = [*kernel["grid"], *kernel["block"]]
        parameters = (ctypes.c_void_p * max(1, len(cells)))(*map(ctypes.addressof, cells))
        attributes: list[_Attribute] = []
        if kernel["cooperative"]:
            attributes.append(_Attribute(_COOPERATIVE, 0, (1,)))
        if prod(kernel["cluster"]) > 1:
            attributes.append(_Attribute(_CLUSTER, 0, tuple(kernel["cluster"])))
        if kernel["dependent"]:
            attributes.append(_Attribute(_DEPENDENT, 0, (1,)))
        if attributes:
            listed = (_Attribute * len(attributes))(*attributes)
            config = _Config(*shape, shared, stream, ctypes.cast(listed, ctypes.c_void_p), len(attributes))
            self.driver("launch_with", ctypes.byref(config), function, parameters, None)
        else:
            self.driver("launch", function, *shape, shared, stream, parameters, None)


def _cell(passed: Mapping[str, Any], addresses: Mapping[str, int], maps: Mapping[str, Any]) -> Any:
    """A ctypes object that holds one parameter."""
    if "map" in passed:
        return maps[passed["map"]]
    if "buffer" in passed:
        return ctypes.c_void_p(addresses[passed["buffer"]])
    return _TYPES[passed["dtype"]](passed["value"])


class Launcher:
    """A kernel as a function of tensors: those of PyTorch run on its current stream, others on the default stream.

    Its workspaces are its own: memory for each device, stream and captured graph, and for each larger size that is
    asked for, which lives as long as this object.  So a graph that was captured with it may be replayed until then.
    """

    def __init__(
        self,
        kind: str,
        built_for: str,
        code: bytes,
        launches: Mapping[str, Any],
        arguments: Sequence[Mapping[str, Any]],
    ) -> None:
        """`kind` is cuda or rocm, `built_for` the arch for messages; `launches` and `arguments` as in kernel.json.

        Raises LoadError.
        """
        if "why" in launches:
            raise LoadError(f"it cannot be launched without TVM's runtime: {launches['why']}")
        self.driver, self.kind, self.built_for, self.code = _driver(kind), kind, built_for, code
        self.launches, self.arguments = launches, arguments
        self.places = {argument["name"]: at for at, argument in enumerate(arguments)}
        self.planned: tuple[Any, dict[str, Any]] = None, {}  # for the sizes of the last call
        self.devices: dict[int, _Loaded] = {}
        self.lock = threading.Lock()
        torch = sys.modules.get("torch")
        self._on(torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0)

    def __call__(self, *tensors: Any) -> None:
        """Launch.  Raises ArgumentError before anything runs, LoadError for a device that takes no such code."""
        given = self._checked(tensors)
        index, addresses = given[0].index, {name: given[at].address for name, at in self.places.items()}
        sizes = {name: given[self.places[of]].shape[axis] for name, (of, axis) in self.launches["sizes"].items()}
        known, planned = self.planned
        if sizes != known:
            planned = plan(self.launches, self.places, sizes)
            self.planned = sizes, planned
        device, stream = self._on(index), ctypes.c_void_p(_stream(tensors[0], index))
        with self.driver.on(device.context), device.lock:  # kernels that share a workspace follow each other
            device.fill(addresses, planned["workspaces"], stream)
            maps = {name: self._encoded(told, addresses) for name, told in planned["maps"].items()}
            for kernel in planned["kernels"]:
                device.launch(kernel, [_cell(passed, addresses, maps) for passed in kernel["arguments"]], stream)

    def _on(self, index: int) -> _Loaded:
        with self.lock:
            if index not in self.devices:
                self.devices[index] = _Loaded(
                    self.driver,
                    index,
                    self.code,
                    self.launches["kernels"],
                    _described(self.kind, self.built_for, self.code),
                )
            return self.devices[index]

    def _checked(self, tensors: Sequence[Any]) -> list[Tensor]:
        if len(tensors) != len(self.arguments):
            names = ", ".join(argument["name"] for argument in self.arguments)
            raise ArgumentError(f"{len(tensors)} tensors given, {len(self.arguments)} needed: {names}")
        given: list[Tensor] = []
        extents: dict[str, int] = {}  # at run time, of all arguments alike
        for argument, tensor in zip(self.arguments, tensors, strict=True):
            name, found = argument["name"], _tensor(tensor, argument["name"])
            given.append(found)
            wanted = list(argument["shape"])
            for word in ("runtime_axis", "ranged_axis"):
                axis = argument.get(word)
                if axis is not None and len(found.shape) == len(wanted):
                    least, most = argument.get("least") or 1, wanted[axis] if word == "ranged_axis" else 1 << 62
                    wanted[axis] = extents.setdefault(word, found.shape[axis])
                    if not least <= wanted[axis] <= most:
                        raise ArgumentError(f"{name} has shape {found.shape}, needed {least} to {most} on axis {axis}")
            if found.shape != tuple(wanted):
                raise ArgumentError(f"{name} has shape {found.shape}, needed {tuple(wanted)}")
            if found.dtype != argument["dtype"]:
                raise ArgumentError(f"{name} has dtype {found.dtype}, needed {argument['dtype']}")
            if not found.contiguous:
                raise ArgumentError(f"{name} is not contiguous; copy it first")
            if found.place is not None and found.place not in PLACES[self.kind]:
                raise ArgumentError(f"{name} does not lie on a {self.kind} device; move it to one")
            if found.index != given[0].index:
                raise ArgumentError(f"tensors lie on devices {given[0].index} and {found.index}; move them to one")
            if found.address % VECTOR_BYTES:
                raise ArgumentError(f"{name} does not start at a multiple of {VECTOR_BYTES} bytes; copy it first")
        return given

    def _encoded(self, told: Mapping[str, Any], addresses: Mapping[str, int]) -> Any:
        """A CUtensorMap, which has to lie at a multiple of 64 bytes."""
        memory = (ctypes.c_uint8 * 192)()
        cell = (ctypes.c_uint8 * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
        lists = [(kind * max(1, len(told[word])))(*told[word]) for word, kind in _MAP_WORDS.items()]
        address = ctypes.c_void_p(addresses[told["buffer"]])
        modes = [told[word] for word in ("interleave", "swizzle", "promotion", "fill")]
        self.driver("encode", ctypes.byref(cell), told["type"], len(told["dims"]), address, *lists, *modes)
        return cell


def _described(kind: str, built_for: str, code: bytes) -> str:
    """The code in words; AMD's says which version it is."""
    if kind == "cuda":
        return f"code for {built_for}"
    version = code[8] + 2  # e_ident[EI_ABIVERSION] (LLVM, "User Guide for AMDGPU Backend")
    since = "; ROCm reads version 6 from 6.3 on" if version == 6 else ""
    return f"code object for {built_for}, version {version}{since}"


@cache
def _driver(kind: str) -> Driver:
    return Driver(kind)


def _library(kind: str) -> ctypes.CDLL:
    """The driver library: that which is loaded already, PyTorch's own, or the system's.  Raises LoadError."""
    names, places = _LIBRARIES[kind], []
    if kind == "rocm":  # there may be several, and one process must not use two
        with contextlib.suppress(OSError):
            places += re.findall(r"\S*/libamdhip64\.so\S*", Path("/proc/self/maps").read_text())
        spec = importlib.util.find_spec("torch")
        for root in (spec.submodule_search_locations or []) if spec else []:
            places += map(str, Path(root).glob("lib/libamdhip64.so*"))
    reason: object = ""
    for name in (*places, *names, *(f"/opt/rocm/lib/{name}" for name in names if kind == "rocm")):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reason = reason or error
    raise LoadError(f"{names[0]} does not load ({reason}); {_INSTALL[kind]}")
