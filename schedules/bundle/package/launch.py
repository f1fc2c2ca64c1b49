"""Kernels launched by the GPU's driver, as data says: no TVM.

`Launcher` loads a cubin or a code object and launches what `launches` of kernel.json lists; how that reads is told in
docs/libraries.md.

A bundle's load.py holds this module and those it imports, which need nothing else of the package.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from schedules.bundle.package.driver import ArgumentError, Driver, KernelError, LoadError, driver_of
from schedules.bundle.package.tensors import Tensor, look_at

VECTOR_BYTES = 16  # of the widest load: a GPU faults on an address that is no multiple of it
OPT_IN = 48 << 10  # bytes of dynamic shared memory that a kernel may use unasked
PORTABLE_CLUSTER = 8  # blocks
ALIGNED = 256  # bytes, of each workspace
CALLS = 256  # that are kept ready, of different shapes; tensor maps, of different addresses
NATIVE = 64  # parameters of a kernel that machine code launches
ADDRESS, MAP, CONSTANT = range(3)  # what a parameter is
PLACES = {"cuda": (2, 13), "rocm": (10,)}  # DLPack's device types
CODE = {"cuda": "kernel.cubin", "rocm": "kernel.hsaco"}

_MOST_SHARED, _ANY_CLUSTER = 8, 14  # of CUfunction_attribute
_COOPERATIVE, _CLUSTER, _DEPENDENT = 2, 4, 6  # of CUlaunchAttributeID
_ODD, _ELSEWHERE = -1, -2  # what kept a call from launching, besides the driver's errors: an address, another context
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
        self.driver, self.index, self.lock = driver, index, threading.Lock()
        self.context, self.stream = driver.context(index), ctypes.c_void_p()
        self.status, self.graph = ctypes.c_int(), ctypes.c_uint64()
        found = ctypes.byref(self.status), ctypes.byref(self.graph)
        self.ask_capture = driver.bound("capture", self.stream, *found, None, None, None)
        self.memory: dict[Any, tuple[int, int]] = {}  # for a stream and graph: address and bytes
        self.all: list[int] = []
        self.functions: dict[str, ctypes.c_void_p] = {}
        self.shared: dict[str, int] = {}  # dynamic bytes that a kernel was allowed
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

    def workspace(self, wanted: int, stream: int) -> int:
        """The address of so many bytes for a stream and the graph that it captures, by who has the lock."""
        self.stream.value = stream
        self.ask_capture()
        key = stream, self.graph.value if self.status.value else None
        address, size = self.memory.get(key, (0, 0))
        if size < wanted:
            memory = ctypes.c_void_p()
            with self.driver.relaxed():
                self.driver("allocate", ctypes.byref(memory), ctypes.c_size_t(wanted))
            address = memory.value or 0
            self.all.append(address)
            self.memory[key] = address, wanted
        return address

    def allow(self, symbol: str, shared: int) -> None:
        """Let a kernel have so many bytes of dynamic shared memory."""
        if self.driver.kind == "cuda" and shared > self.shared.get(symbol, OPT_IN):
            self.driver("attribute", self.functions[symbol], _MOST_SHARED, shared)
            self.shared[symbol] = shared


class _Map:
    """A CUtensorMap, which has to lie at a multiple of 64 bytes, for each address that a buffer had: it depends on
    nothing else that changes.  `place` is the buffer's number."""

    def __init__(self, driver: Driver, told: Mapping[str, Any], place: int) -> None:
        self.driver, self.place, self.type, self.rank = driver, place, told["type"], len(told["dims"])
        self.lists = [(kind * max(1, len(told[word])))(*told[word]) for word, kind in _MAP_WORDS.items()]
        self.modes = [told[word] for word in ("interleave", "swizzle", "promotion", "fill")]
        self.made: dict[int, Any] = {}

    def of(self, address: int) -> Any:
        """The map of a buffer at this address."""
        cell = self.made.get(address)
        if cell is None:
            memory = (ctypes.c_uint8 * 192)()
            cell = (ctypes.c_uint8 * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
            where = ctypes.c_void_p(address)
            self.driver("encode", ctypes.byref(cell), self.type, self.rank, where, *self.lists, *self.modes)
            if len(self.made) >= CALLS:
                self.made = {}  # who launches with one of these has it
            self.made[address] = cell
        return cell


class _Kernel:
    """A launch of a call: the function, its configuration, and of each parameter whether it is a buffer, a map or a
    constant (ADDRESS, MAP, CONSTANT), and the buffer's or map's number, or the constant's address."""

    def __init__(
        self, device: _Loaded, told: Mapping[str, Any], places: Mapping[str, int], maps: Sequence[str]
    ) -> None:
        device.allow(told["symbol"], told["shared"])
        self.function, self.shared = device.functions[told["symbol"]], told["shared"]
        self.shape = [*told["grid"], *told["block"]]
        self.kept: list[Any] = []
        self.parameters: list[tuple[int, int]] = []
        for each in told["arguments"]:
            if "map" in each:
                self.parameters.append((MAP, maps.index(each["map"])))
            elif "buffer" in each:
                self.parameters.append((ADDRESS, places[each["buffer"]]))
            else:
                self.kept.append(_TYPES[each["dtype"]](each["value"]))
                self.parameters.append((CONSTANT, ctypes.addressof(self.kept[-1])))
        attributes: list[_Attribute] = []
        if told["cooperative"]:
            attributes.append(_Attribute(_COOPERATIVE, 0, (1,)))
        if prod(told["cluster"]) > 1:
            attributes.append(_Attribute(_CLUSTER, 0, tuple(told["cluster"])))
        if told["dependent"]:
            attributes.append(_Attribute(_DEPENDENT, 0, (1,)))
        self.attributes = (_Attribute * max(1, len(attributes)))(*attributes)
        self.count = len(attributes)

    def config(self) -> _Config:
        listed = ctypes.cast(self.attributes, ctypes.c_void_p)
        return _Config(*self.shape, self.shared, None, listed, self.count)


class _Call:
    """What the driver reads of a call: ready but for stream and words, which are the addresses of tensors and
    workspaces.  For one thread at a time."""

    def __init__(self, driver: Driver, kernels: Sequence[_Kernel], words: int) -> None:
        self.current, self.words = driver.context(), (ctypes.c_uint64 * max(1, words))()
        self.ask_current = functools.partial(driver.function("current"), ctypes.byref(self.current))
        self.fill = functools.partial(struct.Struct(f"={words}Q").pack_into, self.words, 0)
        self.stream = 0
        self.streams, self.launches, self.slots = [], [], []  # type: ignore[var-annotated]
        self.maps: dict[int, Any] = {}  # that the driver reads
        for kernel in kernels:
            parameters = (ctypes.c_void_p * max(1, len(kernel.parameters)))()
            for at, (kind, of) in enumerate(kernel.parameters):
                if kind == MAP:
                    self.slots.append((parameters, at, of))
                else:
                    parameters[at] = of if kind == CONSTANT else ctypes.addressof(self.words) + 8 * of
            if driver.kind == "rocm":
                stream = ctypes.c_void_p()
                given: tuple[Any, ...] = kernel.function, *kernel.shape, kernel.shared, stream, parameters, None
            else:
                config = kernel.config()
                stream = ctypes.c_void_p.from_buffer(config, _Config.stream.offset)
                given = ctypes.byref(config), kernel.function, parameters, None
            self.streams.append(stream)
            self.launches.append(functools.partial(driver.function("launch"), *given))

    def use(self, stream: int) -> None:
        """Launch on this stream from now on."""
        for cell in self.streams:
            cell.value = stream
        self.stream = stream

    def point(self, maps: Sequence[Any]) -> None:
        """Launch with these tensor maps."""
        for parameters, at, of in self.slots:
            self.maps[of] = maps[of]
            parameters[at] = ctypes.addressof(maps[of])


class _Job:
    """What the machine code of `schedules.build.launch_code` reads of a call; it knows in which order."""

    def __init__(self, device: _Loaded, kernels: Sequence[_Kernel], words: int) -> None:
        self.kept: list[Any] = [device, kernels]
        listed = []
        for kernel in kernels:
            config, numbers = kernel.config(), [number for pair in kernel.parameters for number in pair]
            # maps come after all addresses
            numbers[1::2] = [of + words if kind == MAP else of for kind, of in kernel.parameters]
            parameters = (ctypes.c_uint64 * max(1, len(numbers)))(*numbers)
            self.kept += [config, parameters]
            listed += [ctypes.addressof(config), kernel.function.value or 0, len(kernel.parameters)]
            listed += [ctypes.addressof(parameters)]
        kernel_list = (ctypes.c_uint64 * len(listed))(*listed)
        functions = [ctypes.cast(device.driver.function(name), ctypes.c_void_p) for name in ("launch", "current")]  # type: ignore[arg-type]
        numbers = [*(each.value or 0 for each in (*functions, device.context)), words, len(kernels)]
        job = (ctypes.c_uint64 * (len(numbers) + 1))(*numbers, ctypes.addressof(kernel_list))
        self.kept += [kernel_list, job]
        self.address = ctypes.addressof(job)


class Ready:
    """A call of a kernel with tensors of certain shapes on one device, given their addresses and a stream.

    By `native`, machine code that launches, or else in Python.
    """

    def __init__(self, device: _Loaded, planned: Mapping[str, Any], names: Sequence[str], native: Any) -> None:
        self.device, self.context = device, device.context.value
        self.offsets: list[int] = []  # of workspaces in their memory
        self.bytes = 0
        for size in planned["workspaces"].values():
            self.offsets.append(self.bytes)
            self.bytes += -(-size // ALIGNED) * ALIGNED
        places = {name: at for at, name in enumerate((*names, *planned["workspaces"]))}
        self.maps = [_Map(device.driver, told, places[told["buffer"]]) for told in planned["maps"].values()]
        with device.lock, device.driver.on(device.context):
            kernels = [_Kernel(device, told, places, list(planned["maps"])) for told in planned["kernels"]]
        self.make = functools.partial(_Call, device.driver, kernels, len(places))
        self.free: list[_Call] = []  # a thread has its own while it launches
        self.native: Any = None
        if native is not None and all(len(kernel.parameters) <= NATIVE for kernel in kernels):
            self.job = _Job(device, kernels, len(places))
            self.native = functools.partial(native, self.job.address)

    @property
    def run(self) -> Callable[..., int]:
        """A function of a stream and addresses that launches: it returns 0, or what kept it from that."""
        if self.offsets:
            return self._with_workspaces
        return self._run if self.native is None or self.maps else self.native  # type: ignore[no-any-return]

    def __call__(self, addresses: Sequence[int], stream: int) -> bool:
        """Launch, with addresses of tensors that the kernel takes; False, and nothing is done, if one of them is no
        multiple of VECTOR_BYTES.  Raises KernelError."""
        code = self.run(stream, *addresses)
        return not code or self.settle(code, functools.partial(self.run, stream, *addresses))

    def settle(self, code: int, run: Callable[[], int]) -> bool:
        """After `run` returned this code, and launched nothing: as a call returns, run again where another context than
        this device's was the current one."""
        if code == _ELSEWHERE:
            with self.device.driver.on(self.device.context):
                code = run()
        if code not in (0, _ODD):
            raise self.device.driver.error("launch", code)
        return not code

    def _run(self, stream: int, *addresses: int) -> int:
        maps = [each.of(addresses[each.place]) for each in self.maps]
        if self.native is not None:
            return int(self.native(stream, *addresses, *map(ctypes.addressof, maps)))
        if any(address % VECTOR_BYTES for address in addresses):
            return _ODD
        try:
            call = self.free.pop()
        except IndexError:
            call = self.make()
        if call.ask_current() or call.current.value != self.context:
            self.free.append(call)
            return _ELSEWHERE
        call.fill(*addresses)
        if stream != call.stream:
            call.use(stream)
        if maps:
            call.point(maps)
        code = 0
        for launch in call.launches:
            code = code or launch()
        self.free.append(call)
        return code

    def _with_workspaces(self, stream: int, *addresses: int) -> int:
        with self.device.lock, self.device.driver.on(self.device.context):  # kernels that share one follow each other
            start = self.device.workspace(self.bytes, stream)
            return self._run(stream, *addresses, *[start + offset for offset in self.offsets])


class Launcher:
    """A kernel as a function of tensors.

    Those of PyTorch run on its current stream, others on the stream that TVM's FFI is told to use, if it is loaded,
    else on the default stream.

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
        native: Any = None,
    ) -> None:
        """`kind` is cuda or rocm, `built_for` the arch for messages; `launches` and `arguments` as in kernel.json.
        `native` is the machine code that launches CUDA kernels (`schedules.build.launch_code`), if there is any.

        Raises LoadError.
        """
        if "why" in launches:
            raise LoadError(f"it cannot be launched without TVM's runtime: {launches['why']}")
        self.driver, self.kind, self.built_for, self.code = driver_of(kind), kind, built_for, code
        self.launches, self.arguments, self.native = launches, arguments, native
        self.places = {argument["name"]: at for at, argument in enumerate(arguments)}
        self.latest: tuple[tuple[Any, ...], Any] = (), None  # facts of PyTorch's tensors, and the call for them
        self.calls: dict[Any, Ready] = {}  # by device and shapes
        self.devices: dict[int, _Loaded] = {}
        self.lock = threading.Lock()
        torch = sys.modules.get("torch")
        self._on(torch.cuda.current_device() if torch and torch.cuda.is_initialized() else 0)

    def __call__(self, *tensors: Any) -> None:
        """Launch.  Raises ArgumentError before anything runs, LoadError for a device that takes no such code."""
        torch = sys.modules.get("torch")
        facts, call = self.latest
        addresses = None if torch is None else _addresses(tensors, facts, torch.Tensor)
        if addresses is None:
            call, addresses = self._prepared(tensors, torch)
        index = call.device.index
        if torch is not None and isinstance(tensors[0], torch.Tensor):
            stream = torch._C._cuda_getCurrentRawStream(index)
        else:
            ffi = sys.modules.get("tvm_ffi")
            stream = ffi.get_raw_stream(ffi.device(PLACES[self.kind][0], index)) if ffi else 0
        call(addresses, stream)

    def ready(self, *tensors: Any) -> Ready:
        """The launch of tensors like these, for who knows that they are.  Raises ArgumentError, LoadError."""
        return self._prepared(tensors, None)[0]

    def _prepared(self, tensors: Sequence[Any], torch: Any) -> tuple[Ready, list[int]]:
        """The call for tensors like these, and their addresses.  Raises ArgumentError, LoadError."""
        names = list(self.places)
        if len(tensors) != len(names):
            raise ArgumentError(f"{len(tensors)} tensors given, {len(names)} needed: {', '.join(names)}")
        given = [look_at(tensor, name) for name, tensor in zip(names, tensors, strict=True)]
        facts = tuple([each[1:] for each in given])
        call = self.calls.get(facts)
        if call is None:
            self._check(given)
            sizes = {name: given[self.places[of]].shape[axis] for name, (of, axis) in self.launches["sizes"].items()}
            call = Ready(self._on(given[0].device), plan(self.launches, names, sizes), names, self.native)
            if len(self.calls) >= CALLS:
                self.calls.clear()
            self.calls[facts] = call
        for name, each in zip(names, given, strict=True):
            if each.address % VECTOR_BYTES:
                raise ArgumentError(f"{name} does not start at a multiple of {VECTOR_BYTES} bytes; copy it first")
        if torch is not None and all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            self.latest = tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]), call
        return call, [each.address for each in given]

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

    def _check(self, given: Sequence[Tensor]) -> None:
        """Raise ArgumentError unless the kernel takes such tensors."""
        extents: dict[str, int] = {}  # at run time, of all arguments alike
        for argument, found in zip(self.arguments, given, strict=True):
            name = argument["name"]
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
            if found.device != given[0].device:
                raise ArgumentError(f"tensors lie on devices {given[0].device} and {found.device}; move them to one")


def _addresses(tensors: Sequence[Any], facts: Sequence[Any], kind: Any) -> list[int] | None:
    """Addresses of PyTorch's tensors that have these shapes, dtypes and devices and are contiguous; None if one is
    another, or not aligned."""
    if len(tensors) != len(facts):
        return None
    found = []
    for tensor, (shape, dtype, device) in zip(tensors, facts, strict=True):
        if not isinstance(tensor, kind) or tensor.shape != shape or tensor.dtype is not dtype:
            return None
        address = tensor.data_ptr()
        if tensor.device != device or not tensor.is_contiguous() or address % VECTOR_BYTES:
            return None
        found.append(address)
    return found


def _described(kind: str, built_for: str, code: bytes) -> str:
    """The code in words; AMD's says which version it is."""
    if kind == "cuda":
        return f"code for {built_for}"
    version = code[8] + 2  # e_ident[EI_ABIVERSION] (LLVM, "User Guide for AMDGPU Backend")
    since = "; ROCm reads version 6 from 6.3 on" if version == 6 else ""
    return f"code object for {built_for}, version {version}{since}"
