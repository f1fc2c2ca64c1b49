"""The kernel for a problem on this machine, as it was chosen and built before, by whatever process.

Two files stand for it.  A choice, by the problem and what it was chosen by: where it will run, the journals, this
package.  And a library, or for a GPU what its driver takes, by what was chosen and the compilers; so the same kernel
for many numbers of rows, or after another search, is one file.  To find both needs neither TVM's Python nor a compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from schedules.build.library import load_library
from schedules.build.present import cpu_name
from schedules.build.toolchain import cuda
from schedules.build.toolchain.link import write_library
from schedules.bundle.package.driver import KernelError
from schedules.bundle.package.launch import Launcher
from schedules.core.arch import Arch
from schedules.core.child import Child, Ended, Overdue, Stopped
from schedules.core.cpu import cpu_features, last_level_cache, second_level_cache
from schedules.core.errors import BuildError, DeviceError, SchedulesError, ToolchainError
from schedules.core.frames import apart, quick_frames
from schedules.core.parallel import origin, processes
from schedules.core.problem import Argument, Problem
from schedules.core.registry import operator_modules, operator_of
from schedules.core.text import warn_once
from schedules.core.threads import cores
from schedules.core.versions import sources, versions
from schedules.measure.choice import Choice, choose, choose_widened, journals_of
from schedules.predict.rank import ranked, varied
from schedules.store.disk import Disk


@dataclass(frozen=True)
class Chosen:
    """What serves a problem, `problem` itself or one that takes its tensors too, and as plain data what that is built
    with; `source` and `why` say where that comes from (`Choice.source`)."""

    problem: Problem
    arch: Arch
    schedule: str
    config: Mapping[str, Any]
    made: str  # schedule, config and arch in words
    source: str
    why: str
    fixed_shape: bool

    @cached_property
    def key(self) -> str:
        """Equal for kernels that are the same, whatever run-time extents they were asked for."""
        served = self.problem if self.fixed_shape else self.problem.any_extent()
        return digest({**facts(served, self.arch), "schedule": self.schedule, "config": self.config})


@dataclass(frozen=True)
class Kernel:
    """A function that is ready to be called: its tensors in order, and the workspaces that it wants after these."""

    arguments: tuple[Argument, ...]
    workspaces: tuple[Argument, ...]
    function: Callable[..., None] = field(repr=False)


def facts(problem: Problem, arch: Arch) -> dict[str, Any]:
    """What a kernel depends on, besides schedule and config.

    For a CPU that includes the machine; a GPU's name and figures are those of `arch.device`.
    """
    operator = operator_of(problem).name
    told = versions()
    host: list[Any] = [platform.machine()]
    if not arch.is_gpu:
        host += [cpu_name(), sorted(cpu_features() or ()), second_level_cache(), last_level_cache()]
    return {
        "operator": operator,
        "problem": problem.to_json(every=True),
        "arch": [str(arch), sorted(arch.features), dataclasses.asdict(arch.device)],
        "host": host,
        "compiler": cuda.compiler_installed() if arch.kind == "cuda" else "",  # others come with TVM
        "versions": [told[name] for name in ("te-schedules", "apache-tvm", "apache-tvm-ffi")],
        "sources": [sources(name) for name in ("schedules", operator_modules()[operator].partition(".")[0])],
    }


def digest(value: Any) -> str:
    """Of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def chosen_for(problem: Problem, arch: Arch, device: str | None, disk: Disk, shared: bool = False) -> Chosen:
    """As `choose` says, which is asked where `disk` does not know it; `device` is the GPU's name, and what is `shared`
    serves the problems that are alike but for a range too, where that can be.

    Raises what `choose` raises.
    """
    chosen, warnings = _choice(problem, arch, device, disk, shared)
    for text in warnings:
        warn_once(text)
    return chosen


def _choice(problem: Problem, arch: Arch, device: str | None, disk: Disk, shared: bool) -> tuple[Chosen, Sequence[str]]:
    """`chosen_for`, and what is to be said of it by the process that was asked."""
    name = _choice_name(problem, arch, device, shared)
    kept = disk.find(name)
    if kept is not None:
        return _chosen(problem, arch, kept.about["chosen"]), kept.about["warnings"]
    found = (choose_widened if shared else choose)(problem, arch, device=device)
    chosen = chosen_as(found, arch)
    disk.add(name, {"chosen": _about(chosen), "warnings": found.warnings})
    return chosen, found.warnings


def chosen_as(choice: Choice, arch: Arch) -> Chosen:
    """A choice as what serves its problem on `arch`."""
    return Chosen(
        choice.problem,
        arch,
        choice.schedule,
        choice.config.to_json(),
        made=f"{choice.schedule} {choice.config} for {arch}",
        source=choice.source,
        why=str(dataclasses.replace(choice, passed_over="")),
        fixed_shape=operator_of(choice.problem).schedule(choice.schedule).fixed_shape,
    )


def _about(chosen: Chosen) -> dict[str, Any]:
    """What a choice's file has of it, which `_chosen` reads."""
    words = {each.name: getattr(chosen, each.name) for each in dataclasses.fields(chosen) if each.name != "arch"}
    return {**words, "problem": chosen.problem.to_json(every=True)}


def contenders(chosen: Chosen, count: int) -> list[Chosen]:
    """`chosen`, and if it is a default what else is worth trying, `count` in all at most: the next that are predicted
    to be fast, and differ in schedule or tiles first."""
    found, arch = [chosen], chosen.arch
    for each in varied(ranked(chosen.problem, arch)) if chosen.source == "default" else ():
        other = chosen_as(Choice(chosen.problem, each.schedule, each.config, None, predicted=each), arch)
        if len(found) < count and other.key not in {one.key for one in found}:
            found.append(other)
    return found


def winner(problem: Problem, arch: Arch, device: str | None, disk: Disk) -> Chosen | None:
    """The contender that was the fastest, if they were timed before."""
    kept = disk.find(_choice_name(problem, arch, device, shared=False, timed=True))
    return _chosen(problem, arch, kept.about["chosen"]) if kept else None


def keep_winner(chosen: Chosen, why: str, problem: Problem, device: str | None, disk: Disk) -> Chosen:
    """Have `winner` find a contender, and why it is the one; it is handed back so."""
    found = dataclasses.replace(chosen, why=why)
    disk.add(_choice_name(problem, chosen.arch, device, shared=False, timed=True), {"chosen": _about(found)})
    return found


def kernel_of(chosen: Chosen, disk: Disk) -> Kernel:
    """The kernel from `disk`, where it is written to if it has to be built.

    Several processes that need the same one wait for the first.  Raises ConfigError, ToolchainError, BuildError.
    """
    name = f"{chosen.key}.so"
    found = _loaded(name, chosen, disk)
    if found is None:
        with disk.alone(name):
            found = _loaded(name, chosen, disk)
            if found is None:
                built = apart(_built, name, chosen, disk)
                apart(_write_native, chosen.arch, disk)
                # to load what was written is quicker than to have LLVM make it once more, for this process
                found = _loaded(name, chosen, disk) or built()
    return found


def look_around() -> None:
    """Look up what all names of kernels depend on, which is kept for the process: many small files, at each of which a
    thread waits long for one that computes beside it.  So this is for the latter, beforehand."""
    versions()
    sources("schedules")
    cuda.compiler_installed()


def missing(problems: Mapping[Problem, bool], arch: Arch, device: str | None, disk: Disk) -> dict[Problem, bool]:
    """Those of `problems`, each with whether it is shared, that `is_kept` does not find; it looks at journals once."""
    journals = {name: _journals_of(name) for name in {operator_of(problem).name for problem in problems}}
    return {
        problem: shared
        for problem, shared in problems.items()
        if not is_kept(problem, arch, device, disk, shared, journals[operator_of(problem).name])
    }


def is_kept(
    problem: Problem,
    arch: Arch,
    device: str | None,
    disk: Disk,
    shared: bool = False,
    journals: Sequence[Any] | None = None,
) -> bool:
    """Whether `disk` has all that is needed, so that nothing would be chosen or built; `journals` as `_journals_of`."""
    kept = disk.find(_choice_name(problem, arch, device, shared, journals))
    return kept is not None and (disk.folder / f"{_chosen(problem, arch, kept.about['chosen']).key}.so").exists()


def build_all(
    problems: Mapping[Problem, bool],
    arch: Arch,
    device: str | None,
    disk: Disk,
    done: Callable[[], None] = lambda: None,
) -> dict[Problem, SchedulesError]:
    """Have all cores choose and build the kernels of `problems`, each with whether it is shared, in processes of their
    own, and write them to `disk`; `done` is called after each.  What is there is not built again.

    Returns the errors of those that cannot be built.
    """
    tasks = {problem: (_make, (problem, arch, device, disk, shared)) for problem, shared in problems.items()}
    if not tasks:
        return {}
    return _by_all_cores(tasks, next(iter(problems)), arch, device, disk, done)


def build_contenders(
    wanted: Sequence[Chosen], device: str | None, disk: Disk, done: Callable[[], None] = lambda: None
) -> dict[str, SchedulesError]:
    """The same of what is chosen already; errors by keys."""
    lacking = {each.key: (_make_chosen, (each, disk)) for each in wanted if disk.find(f"{each.key}.so") is None}
    for _ in range(len(wanted) - len(lacking)):
        done()
    if not lacking:
        return {}
    return _by_all_cores(lacking, wanted[0].problem, wanted[0].arch, device, disk, done)


K = TypeVar("K")


def _by_all_cores(
    tasks: Mapping[K, tuple[Callable[..., None], tuple[Any, ...]]],
    first: Problem,
    arch: Arch,
    device: str | None,
    disk: Disk,
    done: Callable[[], None] = lambda: None,
) -> dict[K, SchedulesError]:
    """Run builds, `first` of these problems, in processes of their own; the errors of those that end with one."""
    failed: dict[K, SchedulesError] = {}
    with contextlib.ExitStack() as held:
        builder = _ready_ahead.pop() if _ready_ahead else held.enter_context(origin(_ready, arch))
        with contextlib.suppress(Ended):  # its copies tell why
            builder.call(_ready_for, (first, arch, device))
        pool = held.enter_context(processes(min(cores() or 1, len(tasks)), main=False, origin=builder))
        running = {pool.schedule(*task): name for name, task in tasks.items()}
        pool.schedule(_write_native, (arch, disk))
        for task in as_completed(running):
            try:
                task.result()
            except SchedulesError as error:
                failed[running[task]] = error
            except (Ended, Overdue, Stopped) as ended:
                failed[running[task]] = BuildError(f"the build of {running[task]} ended: {ended}")
            done()
    return failed


_ready_ahead: list[Child] = []


@contextlib.contextmanager
def ready_to_build(arch: Arch) -> Iterator[None]:
    """While the body finds out what to build, a process for `build_all` to copy starts."""
    with origin(_ready, arch) as builder:
        _ready_ahead.append(builder)
        try:
            yield
        finally:
            if builder in _ready_ahead:
                _ready_ahead.remove(builder)


def _ready(arch: Arch) -> None:
    """In a process that is copied for each core: what all builds need is there."""
    gc.disable()  # it and its copies end soon, and looking for garbage would have them copy all memory
    with contextlib.suppress(ImportError, SchedulesError):  # which who builds is told
        from schedules.build.builder import compiler_of

        compiler_of(arch)


def _ready_for(problem: Problem, arch: Arch, device: str | None) -> None:
    """In that process: what was measured is read, and how to choose."""
    with contextlib.suppress(ImportError, SchedulesError):
        choose(problem, arch, device=device)


def _make(problem: Problem, arch: Arch, device: str | None, disk: Disk, shared: bool) -> None:
    """In a worker process."""
    _make_chosen(_choice(problem, arch, device, disk, shared)[0], disk)


def _make_chosen(chosen: Chosen, disk: Disk) -> None:
    """In a worker process."""
    name = f"{chosen.key}.so"
    if disk.find(name) is None:
        with disk.alone(name):
            if disk.find(name) is None:
                _built(name, chosen, disk)


def _chosen(problem: Problem, arch: Arch, about: Mapping[str, Any]) -> Chosen:
    return Chosen(**{**about, "problem": type(problem).parse(about["problem"]), "arch": arch})


def _journals_of(operator: str) -> list[tuple[str, int, int]]:
    """What tells a journal's state, of each that a choice may depend on."""
    journals = []
    for file in journals_of(operator):
        with contextlib.suppress(OSError):  # gone meanwhile
            found = file.stat()
            journals.append((os.path.abspath(file), found.st_size, found.st_mtime_ns))
    return journals


def _choice_name(
    problem: Problem,
    arch: Arch,
    device: str | None,
    shared: bool,
    journals: Sequence[Any] | None = None,
    timed: bool = False,
) -> str:
    journals = _journals_of(operator_of(problem).name) if journals is None else journals
    asked = {"device": device, "journals": journals, "shared": shared, "timed": timed}
    return f"{digest({**facts(problem, arch), **asked})}.choice"


def _loaded(name: str, chosen: Chosen, disk: Disk) -> Kernel | None:
    kept = disk.find(name)
    if kept is None:
        return None
    try:
        if chosen.arch.is_gpu:
            function: Callable[..., None] = _launcher(chosen.arch, kept.file.read_bytes(), kept.about, disk)
        else:
            function = load_library(kept.file, chosen.arch)
    except (ToolchainError, DeviceError):
        raise
    except Exception as error:  # tvm_ffi raises many types
        disk.drop(name, f"it does not load ({' '.join(str(error).split())})")
        return None
    arguments, workspaces = (
        tuple(Argument(**{**each, "shape": tuple(each["shape"])}) for each in kept.about[kind])
        for kind in ("arguments", "workspaces")
    )
    return Kernel(arguments, workspaces, function)


def _built(name: str, chosen: Chosen, disk: Disk) -> Callable[[], Kernel]:
    """Build the kernel and write it; what is returned makes it callable where it could not be written."""
    from schedules.build.builder import build_scheduled
    from schedules.build.launches import launches
    from schedules.build.workspace import workspaces_as_arguments

    problem, arch = chosen.problem, chosen.arch
    operator = operator_of(problem)
    spec = operator.schedule_for(problem, arch, chosen.schedule)
    config = spec.config.parse(chosen.config)
    with quick_frames():
        scheduled = spec.apply(problem, config, arch)
    workspaces: tuple[Argument, ...] = ()
    if arch.is_gpu:  # on a CPU, calls are over when they return
        scheduled, workspaces = workspaces_as_arguments(scheduled)
    made = build_scheduled(operator, problem, spec, config, arch, scheduled, host_code=False)
    arguments = spec.arguments(problem)
    about: dict[str, Any] = {
        "operator": operator.name,
        "problem": str(problem),
        "arch": str(arch),
        "made": chosen.made,
        "arguments": [dataclasses.asdict(argument) for argument in arguments],
        "workspaces": [dataclasses.asdict(workspace) for workspace in workspaces],
    }
    code: Any = made.binaries.get("cubin") or made.binaries.get("hsaco")
    if code:
        about["launches"] = launches(made.host, (*arguments, *workspaces))
    try:
        disk.add(name, about, code or _library(made.module))
    except (ToolchainError, BuildError, OSError) as error:  # no linker, or no room
        disk.refuse(str(error))
    return lambda: Kernel(arguments, workspaces, _launcher(arch, code, about, disk) if code else made.module["main"])


def _library(module: Any) -> bytes:
    """A TVM module as a shared library.  Raises ToolchainError, BuildError, OSError."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library.so"
        write_library(module, library)
        return library.read_bytes()


def _launcher(arch: Arch, code: bytes, about: Mapping[str, Any], disk: Disk) -> Launcher:
    """The function of a cubin or code object, of its arguments and workspaces.  Raises DeviceError."""
    native = _native(disk) if arch.kind == "cuda" else None
    arguments = [*about["arguments"], *about["workspaces"]]
    try:
        return Launcher(arch.kind, str(arch), code, about["launches"], arguments, native)
    except KernelError as error:
        raise DeviceError(str(error)) from None


def _native_name() -> str:
    told = versions()
    host = platform.machine(), cpu_name(), sorted(cpu_features() or ())
    made = [told[name] for name in ("te-schedules", "apache-tvm", "apache-tvm-ffi")]
    return f"{digest(['launch', host, made, sources('schedules')])}.so"


def _write_native(arch: Arch, disk: Disk) -> None:
    """Write the machine code that launches, unless it is there."""
    if arch.kind != "cuda" or disk.find(_native_name()) is not None:
        return
    from schedules.build.launch_code import build_launch

    try:
        disk.add(_native_name(), {}, _library(build_launch()))
    except (ToolchainError, BuildError, OSError) as error:  # no linker, or no room
        disk.refuse(str(error))


@cache
def _native(disk: Disk) -> Callable[..., int] | None:
    """The machine code that launches, if it was written; else Python does."""
    kept = disk.find(_native_name())
    if kept is None:
        return None
    try:
        import tvm_ffi

        return tvm_ffi.load_module(str(kept.file))["launch"]  # type: ignore[no-any-return]
    except Exception as error:  # tvm_ffi raises many types
        disk.drop(kept.file.name, f"it does not load ({' '.join(str(error).split())})")
        return None
