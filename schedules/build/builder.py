"""Building: problem, schedule, config and arch in; runnable module, sources and resource use out.

The CLI, the tests, the search and the scripts all build through `build`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from schedules.build.launches import launches
from schedules.build.library import VECTOR_BYTES, Launch
from schedules.build.toolchain import cuda, link
from schedules.core import interrupts, threads
from schedules.core.arch import GRID, Arch, waves_by_registers
from schedules.core.errors import ArgumentError, BuildError, ConfigError, SchedulesError
from schedules.core.frames import quick_frames
from schedules.core.operator import Array, Operator, ScheduleSpec
from schedules.core.problem import Argument, Config, Problem
from schedules.core.quiet import ROCM_WARNINGS, without_lines
from schedules.core.registry import operator_of
from schedules.lowering import pipeline
from schedules.lowering.barriers import CODE
from schedules.predict.start import started

AXES = ("x", "y", "z")
CODE_OBJECT = 5  # of an AMD GPU: every ROCm 6 reads it, version 6 only ROCm from 6.3 on


# LLVM's module flag for the version of an AMD GPU's code object
_VERSION = """\
!llvm.module.flags = !{{!0}}
!0 = !{{i32 1, !"amdhsa_code_object_version", i32 {}}}
"""


@dataclass(frozen=True)
class Built:
    """One built operator problem."""

    operator: Operator
    problem: Problem
    schedule: ScheduleSpec
    config: Config
    arch: Arch
    module: Any = field(repr=False)  # tvm.runtime.Module with "main"
    scheduled: tvm.IRModule = field(repr=False)
    host: tvm.IRModule = field(repr=False)  # lowered: the function and its kernels
    resources: tuple[cuda.KernelResources, ...]
    log: str = field(repr=False)  # of the CUDA compiler: ptxas's report and warnings
    launch: Launch | None
    compiler: str
    seconds: float
    code_object: int | None  # an AMD GPU's is of this version
    # what the device compiler made: ptx, cubin, hsaco; ll and s of AMD's where TVM's are of another size of blocks
    binaries: dict[str, str | bytes] = field(repr=False)

    @cached_property
    def lowered(self) -> str:
        """`host` as text."""
        return str(self.host.script())

    @cached_property
    def program(self) -> str:
        """SHA-256 of the lowered program: equal for builds that do the same, whatever config they came from."""
        return hashlib.sha256(self.lowered.encode()).hexdigest()

    @cached_property
    def launches(self) -> dict[str, Any] | None:
        """What a function for a GPU launches, as data (`launches`)."""
        if not self.arch.is_gpu:
            return None
        return launches(self.host, self.schedule.arguments(self.problem))

    @cached_property
    def sources(self) -> dict[str, str | bytes]:
        """Generated code by file ending: ll and s for LLVM; cu, ptx and cubin for CUDA; ll, s and hsaco for ROCm."""
        if self.arch.kind == "llvm":
            return {"ll": self.module.inspect_source("ll"), "s": self.module.inspect_source("asm")}
        device = self.module.imports[0]
        if self.arch.kind == "cuda":
            return {"cu": device.inspect_source("cuda"), **self.binaries}
        return {"ll": device.inspect_source(), "s": device.inspect_source("asm"), **self.binaries}

    def __call__(self, *tensors: Any) -> None:
        """Run on tensors of the arch's device (NumPy arrays, DLPack tensors or TVM tensors), in the order of
        ``problem.arguments()``; outputs are written in place.

        Raises ArgumentError before anything runs if a tensor does not fit.
        """
        taken = check_arguments(self.schedule.arguments(self.problem), self.arch, tensors)
        self.module["main"](*taken)


def build(
    problem: Problem,
    arch: Arch,
    schedule: str | None = None,
    config: Config | dict[str, Any] | None = None,
    *,
    device_code: bool = True,
    code_object: int = CODE_OBJECT,
) -> Built:
    """Build `problem` for `arch` with the named schedule and `config` (a Config, or fields that it must have),
    or what is predicted to be the fastest (`predict.start`).

    With device_code=False the CUDA compiler is not run; the module then only serves the emulator.  `code_object` is the
    version of an AMD GPU's code object.
    Raises ConfigError, UnknownNameError, ToolchainError or BuildError.
    """
    spec, config = started(problem, arch, schedule, config)
    with quick_frames():
        made = spec.apply(problem, config, arch)
    op = operator_of(problem)
    return build_scheduled(op, problem, spec, config, arch, made, device_code=device_code, code_object=code_object)


def build_scheduled(
    op: Operator,
    problem: Problem,
    spec: ScheduleSpec,
    config: Config,
    arch: Arch,
    mod: tvm.IRModule,
    *,
    device_code: bool = True,
    host_code: bool = True,
    code_object: int = CODE_OBJECT,
    instruments: Sequence[Any] = (),
) -> Built:
    """Build a program that is already scheduled, with TVM's pass `instruments` watching.

    Without host_code LLVM spends a tenth of the time on a GPU's function, whose kernels something else launches.
    """
    start = time.perf_counter()
    launch = launch_of(mod, arch) if arch.is_gpu else None
    if launch and launch.threads > arch.max_threads:
        raise BuildError(f"the schedule launches {launch.threads} threads a block, {arch} allows {arch.max_threads}")
    for axis, extent, most in zip(AXES, launch.grid if launch else (), GRID, strict=False):
        if isinstance(extent, int) and extent > most:
            raise ConfigError(
                f"{spec.name} launches {extent} blocks along {axis}, GPUs allow {most}; use larger tiles or another "
                f"--schedule, or split the problem"
            )
    arguments = spec.arguments(problem)
    module, made, state = _compile(mod, arch, device_code, host_code, instruments, arguments, code_object)
    return Built(
        operator=op,
        problem=problem,
        schedule=spec,
        config=config,
        arch=arch,
        module=module,
        scheduled=mod,
        host=state.host,
        resources=cuda.parse_resources(made.cubin.log) if made.cubin else (),
        log=made.cubin.log if made.cubin else "",
        launch=launch,
        compiler=made.cubin.compiler if made.cubin else _llvm(),
        seconds=time.perf_counter() - start,
        code_object=code_object if arch.kind == "rocm" else None,
        binaries=made.binaries(),
    )


def _llvm() -> str:
    return f"llvm {tvm.target.codegen.llvm_version_major()}"


@lru_cache
def compiler_of(arch: Arch) -> str:
    """The compiler that makes device code for `arch` here, as `Built.compiler` names it.  Raises ToolchainError."""
    if arch.kind != "cuda":
        return _llvm()
    return cuda.compile_cuda('extern "C" __global__ void nothing() {}', arch.name).compiler


def compiled(mod: tvm.IRModule, arch: Arch) -> Any:
    """The runtime module of a scheduled program that belongs to no operator.  Raises what `build` raises."""
    return _compile(mod, arch)[0]


def _compile(
    mod: tvm.IRModule,
    arch: Arch,
    device_code: bool = True,
    host_code: bool = True,
    instruments: Sequence[Any] = (),
    arguments: Sequence[Argument] = (),
    code_object: int = CODE_OBJECT,
) -> tuple[Any, _Made, pipeline.Lowering]:
    """The runtime module of `mod`, what the device compiler made, and what the lowering left."""
    target = arch.target()
    if arch.is_gpu and not (device_code and host_code):  # without device code, the emulator runs it once or twice
        target = target.with_host(tvm.target.Target({"kind": "llvm", "opt-level": 0}))
    with _callbacks(arch, device_code, code_object) as made, pipeline.lowering(mod, arguments) as state:
        try:
            with (
                without_lines(ROCM_WARNINGS if arch.kind == "rocm" else ()),
                target,
                tvm.transform.PassContext(config=pipeline.config(arch.kind, mod), instruments=instruments),
            ):
                module = tirx.build(mod, target=target, pipeline=pipeline.name_for(mod))
                return threads.share(module) if arch.kind == "llvm" else module, made, state
        except SchedulesError:
            raise
        except Exception as error:  # TVM raises many types; whichever it is, the build failed and says so
            if made.error is not None:
                raise made.error from None
            if interrupts.asked():  # a KeyboardInterrupt in a callback comes back as a RuntimeError without a word
                raise KeyboardInterrupt from error
            raise BuildError(f"TVM refused the program: {telling_line(error)}") from error


def telling_line(error: BaseException) -> str:
    """The line of TVM's message that says what was wrong: not the program listings around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Check failed" in line or line.startswith("Error message:")]
    return telling[-1] if telling else lines[0] if lines else type(error).__name__


@dataclass
class _Made:
    """What the compile callbacks produced during one build."""

    cubin: cuda.Cubin | None = None
    code_object: bytes | None = None
    error: SchedulesError | None = None
    amd: link.AmdCode | None = None  # in place of what TVM's code generator made

    def binaries(self) -> dict[str, str | bytes]:
        if self.cubin:
            return {"ptx": self.cubin.ptx, "cubin": self.cubin.cubin}
        texts = {"ll": self.amd.ll, "s": self.amd.assembly} if self.amd else {}
        return {**texts, "hsaco": self.code_object} if self.code_object else {}


@contextlib.contextmanager
def _callbacks(arch: Arch, device_code: bool, code_object: int) -> Iterator[_Made]:
    """Answer TVM's requests for a cubin or a code object, keeping what was made and the typed error if it failed.

    An error raised inside a callback comes back from TVM with its type lost, hence ``error``.
    """
    made = _Made()

    def compile_cuda(source: str) -> bytes:
        if not device_code:
            return b"\x7fELF not compiled"
        try:
            made.cubin = cuda.compile_cuda(str(source), arch.name)
        except SchedulesError as error:
            made.error = error
            raise
        return made.cubin.cubin

    def link_rocm(relocatable: bytes) -> bytes:
        if not device_code:
            return bytes(relocatable)
        try:
            made.code_object = link.link_code_object(made.amd.relocatable if made.amd else bytes(relocatable))
        except SchedulesError as error:
            made.error = error
            raise
        return made.code_object

    def build_rocm(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
        module = _tvm_build_rocm()(mod, target)
        kernels = mod.functions.values()
        threads = max(map(_threads, kernels))
        blocks = max(int(kernel.attrs.get(pipeline.LEAST_BLOCKS, 0)) for kernel in kernels)
        assembly = str(module.inspect_source("asm")) if blocks else ""
        registers, shared = (_most(assembly, name) for name in ("vgpr_count", "group_segment_fixed_size"))
        blocks = min(blocks, arch.shared_sm // max(shared, 1))
        waves = min(-(-blocks * -(-threads // arch.wave) // arch.simds), arch.waves_simd)
        crowded = waves_by_registers(arch, registers) < waves
        if threads > link.STAMPED or crowded:
            ll = str(module.inspect_source())
            made.amd = link.for_blocks_of(max(threads, link.STAMPED), ll, arch.name, waves if crowded else 0)
            module = _tvm_build_rocm()(mod, target)  # again for the module alone, which is made of what is linked
        return module

    if arch.kind == "cuda":
        import tvm.support.nvcc  # registers the callback that is replaced here; later it would undo this

        cuda.ensure_runtime()
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cuda, override=True)
    elif arch.kind == "rocm":
        import tvm.support.rocm  # likewise

        tvm_ffi.register_global_func("tvm_callback_rocm_link", link_rocm, override=True)
        _tvm_build_rocm()  # before it is replaced
        tvm_ffi.register_global_func("target.build.rocm", build_rocm, override=True)
        with tempfile.TemporaryDirectory() as folder:
            # no device libraries: exp, log, sqrt, erf, tanh and pow compile to instructions without them
            version = Path(folder) / "version.ll"
            version.write_text(_VERSION.format(100 * code_object))
            linked = tvm.runtime.convert([str(CODE), str(version)])
            tvm_ffi.register_global_func("tvm_callback_rocm_bitcode_path", lambda: linked, override=True)
            yield made
        return
    yield made


@lru_cache
def _tvm_build_rocm() -> Any:
    """TVM's own code generation for AMD GPUs."""
    return tvm_ffi.get_global_func("target.build.rocm")


def _most(assembly: str, name: str) -> int:
    """The largest of the numbers called `name` in the metadata of AMD's assembly; 0 if there are none."""
    return max(map(int, re.findall(rf"^[ -]+\.{name}: +(\d+)", assembly, re.M)), default=0)


def _threads(kernel: tirx.PrimFunc) -> int:
    """Threads of a block of a lowered kernel."""
    extents: dict[str, int] = {}

    def visit(scope: Any) -> None:
        if scope.attr_key == "thread_extent" and str(scope.node.thread_tag).startswith("threadIdx"):
            extents[str(scope.node.thread_tag)] = int(scope.value)

    tvm_ffi.structural_walk(kernel.body, (tirx.AttrStmt, visit))
    return math.prod(extents.values())


def launch_of(mod: tvm.IRModule, arch: Arch) -> Launch:
    """Grid and block of a program: of a scheduled one read off its thread-bound loops, of one in TIRx off the launch
    that its scopes are lowered to."""
    extents: dict[str, int | str] = {}

    def visit(loop: Any) -> Any:
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            extent = loop.extent
            extents[str(loop.thread_binding.thread_tag)] = (
                int(extent) if isinstance(extent, tirx.IntImm) else str(extent)
            )
        return loop

    def visit_scope(scope: Any) -> None:
        if scope.attr_key == "thread_extent":
            extent = scope.value
            extents[str(scope.node.thread_tag)] = int(extent) if isinstance(extent, tirx.IntImm) else str(extent)

    if pipeline.is_tirx(mod):
        with arch.target():
            mod = tirx.transform.LowerTIRx()(mod)
        tvm_ffi.structural_walk(mod["main"].body, (tirx.AttrStmt, visit_scope))
    else:
        tvm_ffi.structural_map(mod["main"].body, (tirx.For, visit))
    grid = tuple(extents.get(f"blockIdx.{axis}", 1) for axis in AXES)
    block = tuple(int(extents.get(f"threadIdx.{axis}", 1)) for axis in AXES)
    return Launch(grid, block, int(extents.get("clusterCtaIdx.x", 1)))  # type: ignore[arg-type]


def check_arguments(arguments: Sequence[Argument], arch: Arch, tensors: Sequence[Any]) -> list[Any]:
    """`tensors` as TVM takes them.  Raises ArgumentError unless they are what a function of `arguments` takes, in
    order."""
    if len(tensors) != len(arguments):
        wanted = ", ".join(argument.name for argument in arguments)
        raise ArgumentError(f"{len(tensors)} tensors given, {len(arguments)} needed: {wanted}")
    runtime: int | None = None
    ranged: int | None = None
    for argument, tensor in zip(arguments, tensors, strict=True):
        if not hasattr(tensor, "__dlpack_device__"):
            kind = type(tensor).__name__
            raise ArgumentError(f"{argument.name} is a {kind}, needed a tensor: of NumPy, TVM or PyTorch, by DLPack")
        shape = tuple(int(extent) for extent in tensor.shape)
        wanted_shape: list[int] = list(argument.shape)
        if argument.runtime_axis is not None and len(shape) == len(wanted_shape):
            runtime = shape[argument.runtime_axis] if runtime is None else runtime
            wanted_shape[argument.runtime_axis] = runtime
        if argument.ranged_axis is not None and argument.least is not None and len(shape) == len(wanted_shape):
            ranged = shape[argument.ranged_axis] if ranged is None else ranged
            most = wanted_shape[argument.ranged_axis]
            if not argument.least <= ranged <= most:
                raise ArgumentError(
                    f"{argument.name} has shape {shape}, needed {argument.least} to {most} along axis "
                    f"{argument.ranged_axis}, the range that this kernel was built for"
                )
            wanted_shape[argument.ranged_axis] = ranged
        if shape != tuple(wanted_shape):
            raise ArgumentError(f"{argument.name} has shape {shape}, needed {tuple(wanted_shape)}")
        if 0 in shape:
            raise ArgumentError(f"{argument.name} has shape {shape}, which is empty; every extent must be at least 1")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != argument.dtype:
            raise ArgumentError(f"{argument.name} has dtype {dtype}, needed {argument.dtype}")
        if not _contiguous(tensor):
            raise ArgumentError(f"{argument.name} is not contiguous; copy it first")
        device = _device_kind(tensor)
        if device != arch.kind:
            raise ArgumentError(f"{argument.name} lies on {device}, the function was built for {arch}")
        if arch.is_gpu and hasattr(tensor, "data_ptr") and tensor.data_ptr() % VECTOR_BYTES:
            raise ArgumentError(f"{argument.name} does not start at a multiple of {VECTOR_BYTES} bytes; copy it first")
        if argument.output and isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
            raise ArgumentError(f"{argument.name} is read-only, and the function writes it; give one that is writable")
    return [_taken(tensor) if isinstance(tensor, np.ndarray) else tensor for tensor in tensors]


def _taken(array: Array) -> Any:
    """`array` as TVM takes it: its own memory, which NumPy hands out by DLPack only if it is writable and of a dtype
    that NumPy knows."""
    if array.flags.writeable and array.dtype.kind != "V":
        return array
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    raw = tvm_ffi.from_dlpack(np.ctypeslib.as_array(memory))
    return raw._create_view(array.shape, str(array.dtype))


def _contiguous(tensor: Any) -> bool:
    if hasattr(tensor, "is_contiguous"):
        return bool(tensor.is_contiguous())
    if hasattr(tensor, "flags"):
        return bool(tensor.flags["C_CONTIGUOUS"])
    strides = getattr(tensor, "strides", None)
    expected = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(strides or ()), strict=False):
        if extent != 1 and int(stride) != expected:
            return False
        expected *= int(extent)
    return True


def _device_kind(tensor: Any) -> str:
    if not hasattr(tensor, "__dlpack_device__"):
        return "llvm"
    kind = int(tensor.__dlpack_device__()[0])
    return {1: "llvm", 2: "cuda", 3: "llvm", 10: "rocm", 13: "cuda"}.get(kind, f"device type {kind}")
