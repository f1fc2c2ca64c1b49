"""The kernel for a problem on this machine, as it was chosen and built before, by whatever process.

Two files stand for it.  A choice, by the problem and what it was chosen by: where it will run, the journals, this
package.  And a library, by what was chosen and the compilers; so the same kernel for many numbers of rows, or after
another search, is one file.  To find both needs neither TVM's Python nor a compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from schedules.build.library import load_library
from schedules.build.present import cpu_name
from schedules.build.toolchain import cuda, devices
from schedules.build.toolchain.link import write_library
from schedules.core.arch import Arch, last_level_cache
from schedules.core.child import Ended, Overdue, Stopped
from schedules.core.errors import BuildError, SchedulesError, ToolchainError
from schedules.core.parallel import processes
from schedules.core.problem import Argument, Problem
from schedules.core.registry import operator_modules, operator_of
from schedules.core.text import warn_once
from schedules.core.threads import cores
from schedules.core.versions import sources, versions
from schedules.measure.choice import choose, journals_of
from schedules.store.disk import Disk


@dataclass(frozen=True)
class Chosen:
    """What a problem is built with, as plain data; `why` says where that comes from."""

    problem: Problem
    arch: Arch
    schedule: str
    config: Mapping[str, Any]
    made: str  # schedule, config and arch in words
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
        host += [cpu_name(), sorted(devices.cpu_features() or ()), last_level_cache()]
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


def chosen_for(problem: Problem, arch: Arch, device: str | None, disk: Disk) -> Chosen:
    """As `choose` says, which is asked where `disk` does not know it; `device` is the GPU's name.

    Raises what `choose` raises.
    """
    name = _choice_name(problem, arch, device)
    kept = disk.find(name)
    if kept is None:
        found = choose(problem, arch, device=device)
        about: dict[str, Any] = {
            "schedule": found.schedule,
            "config": found.config.to_json(),
            "made": f"{found.schedule} {found.config} for {arch}",
            "why": str(dataclasses.replace(found, passed_over="")),
            "fixed_shape": operator_of(problem).schedule(found.schedule).fixed_shape,
        }
        warnings: Sequence[str] = found.warnings
        disk.add(name, {"chosen": about, "warnings": warnings})
    else:
        about, warnings = kept.about["chosen"], kept.about["warnings"]
    for text in warnings:
        warn_once(text)
    return Chosen(problem, arch, **about)


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
                built = _built(name, chosen, disk)
                # to load what was written is quicker than to have LLVM make it once more, for this process
                found = _loaded(name, chosen, disk) or built()
    return found


def is_kept(problem: Problem, arch: Arch, device: str | None, disk: Disk) -> bool:
    """Whether `disk` has all that is needed, so that nothing would be chosen or built."""
    kept = disk.find(_choice_name(problem, arch, device))
    return kept is not None and (disk.folder / f"{Chosen(problem, arch, **kept.about['chosen']).key}.so").exists()


def build_all(
    problems: Sequence[Problem], arch: Arch, device: str | None, disk: Disk, done: Callable[[], None] = lambda: None
) -> list[SchedulesError]:
    """Have all cores choose and build the kernels of `problems`, in processes of their own, and write them to `disk`;
    `done` is called after each.  What is there is not built again.

    Returns the errors of those that cannot be built.
    """
    failed: list[SchedulesError] = []
    with processes(min(cores() or 1, len(problems)), main=False) as pool:
        tasks = {pool.schedule(_make, (problem, arch, device, disk)): problem for problem in problems}
        for task in as_completed(tasks):
            try:
                task.result()
            except SchedulesError as error:
                failed.append(error)
            except (Ended, Overdue, Stopped) as ended:
                failed.append(BuildError(f"{tasks[task]} cannot be built: {ended}"))
            done()
    return failed


def _make(problem: Problem, arch: Arch, device: str | None, disk: Disk) -> None:
    """In a worker process."""
    chosen = chosen_for(problem, arch, device, disk)
    name = f"{chosen.key}.so"
    if disk.find(name) is None:
        with disk.alone(name):
            if disk.find(name) is None:
                _built(name, chosen, disk)


def _choice_name(problem: Problem, arch: Arch, device: str | None) -> str:
    journals = []
    for file in journals_of(operator_of(problem).name):
        with contextlib.suppress(OSError):  # gone meanwhile
            found = file.stat()
            journals.append((os.path.abspath(file), found.st_size, found.st_mtime_ns))
    return f"{digest({**facts(problem, arch), 'device': device, 'journals': journals})}.choice"


def _loaded(name: str, chosen: Chosen, disk: Disk) -> Kernel | None:
    kept = disk.find(name)
    if kept is None:
        return None
    try:
        function = load_library(kept.file, chosen.arch)
    except ToolchainError:
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
    from schedules.build.workspace import workspaces_as_arguments

    problem, arch = chosen.problem, chosen.arch
    operator = operator_of(problem)
    spec = operator.schedule_for(problem, arch, chosen.schedule)
    config = spec.config.parse(chosen.config)
    scheduled = spec.apply(problem, config, arch)
    workspaces: tuple[Argument, ...] = ()
    if arch.is_gpu:  # on a CPU, calls are over when they return
        scheduled, workspaces = workspaces_as_arguments(scheduled)
    made = build_scheduled(operator, problem, spec, config, arch, scheduled)
    arguments = spec.arguments(problem)
    about = {
        "operator": operator.name,
        "problem": str(problem),
        "arch": str(arch),
        "made": chosen.made,
        "arguments": [dataclasses.asdict(argument) for argument in arguments],
        "workspaces": [dataclasses.asdict(workspace) for workspace in workspaces],
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_library(made.module, Path(folder) / name)
            disk.add(name, about, (Path(folder) / name).read_bytes())
    except (ToolchainError, BuildError, OSError) as error:  # no linker, or no room
        disk.refuse(str(error))
    return lambda: Kernel(arguments, workspaces, made.module["main"])
