"""Bundles: a built kernel as a folder that loads without this package, TVM's Python or any compiler.

kernel.so            the function, with the device code inside
kernel.cu, .ptx ...  the texts it was made from
scheduled.tir, lowered.tir, definition.txt
kernel.json          what it is, how to call it, what it was built with, and a checksum of every other file
load.py              loads it with tvm_ffi and TVM's runtime library alone
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import struct
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.build.inspect import Material, material
from schedules.build.toolchain import devices
from schedules.build.toolchain.cuda import KernelResources
from schedules.build.toolchain.link import link_library
from schedules.core.arch import Arch, host_cpu, parse_arch
from schedules.core.errors import BuildError, BundleError
from schedules.core.folders import whole_folder
from schedules.core.operator import Operator
from schedules.core.problem import Argument, Problem
from schedules.core.registry import operator as find_operator
from schedules.core.versions import versions

if TYPE_CHECKING:
    from schedules.build.builder import Built, Launch

SCHEMA = 1
MANIFEST = "kernel.json"
LIBRARY = "kernel.so"
_MACHINES = {"cuda": 190, "rocm": 224}  # e_machine of a cubin and of an HSA code object
_KEYS: dict[str, type | tuple[type, ...]] = {
    "operator": str,
    "problem": dict,
    "schedule": str,
    "config": dict,
    "target": dict,
    "library": str,
    "arguments": list,
    "launch": (dict, type(None)),
    "resources": list,
    "compiler": str,
    "versions": dict,
    "measured": (dict, type(None)),
    "built": str,
    "files": dict,
}


@dataclass(frozen=True)
class Loaded:
    """A bundle's function on this machine."""

    problem: Problem
    arch: Arch
    arguments: tuple[Argument, ...]
    function: Any = field(repr=False)

    def __call__(self, *tensors: Any) -> None:
        """Run on tensors of the arch's device, in the order of `arguments`; outputs are written in place.

        Raises ArgumentError before anything runs if a tensor does not fit.
        """
        from schedules.build.builder import check_arguments

        self.function(*check_arguments(self.arguments, self.arch, tensors))


@dataclass(frozen=True)
class Bundle:
    """An exported kernel whose files were found complete and unaltered."""

    path: Path
    manifest: dict[str, Any] = field(repr=False)
    arguments: tuple[Argument, ...]
    resources: tuple[KernelResources, ...]
    launch: Launch | None

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """The bundle in the folder `path`.  Raises BundleError if it is not one, or not as it was written."""
        path = Path(path)
        if not path.is_dir():
            raise BundleError(f"{path} is not a folder; give the one that `schedules build --out` wrote")
        manifest = _read_manifest(path)
        for name, digest in manifest["files"].items():
            if not (path / name).is_file():
                raise BundleError(f"{path} lacks {name}; build it again")
            if _sha256((path / name).read_bytes()) != digest:
                raise BundleError(f"{path / name} is not what was built (truncated or edited); build it again")
        from schedules.build.builder import Launch

        try:
            arguments = tuple(Argument(**{**a, "shape": tuple(a["shape"])}) for a in manifest["arguments"])
            used = tuple(KernelResources(**r) for r in manifest["resources"])
            shape = manifest["launch"]
            launch = shape and Launch(tuple(shape["grid"]), tuple(shape["block"]), shape.get("cluster", 1))
        except (KeyError, TypeError) as error:
            raise BundleError(f"{path / MANIFEST} is malformed ({error}); build it again") from None
        return cls(path, manifest, arguments, used, launch)

    @property
    def operator(self) -> Operator:
        return find_operator(self.manifest["operator"])

    @property
    def problem(self) -> Problem:
        return self.operator.problem.parse(self.manifest["problem"])

    @property
    def arch(self) -> Arch:
        return parse_arch(self.manifest["target"]["arch"])

    @property
    def library(self) -> Path:
        return self.path / self.manifest["library"]

    def material(self) -> Material:
        """The bundle's texts, for `schedules.build.inspect`."""
        sources: dict[str, str | bytes] = {}
        for name in self.manifest["files"]:
            stem, _, ending = name.partition(".")
            if stem == "kernel" and ending != "so":
                data = (self.path / name).read_bytes()
                sources[ending] = data if ending in ("cubin", "hsaco") else data.decode()
        return Material(
            title=f"{self.manifest['operator']} {self.problem}, {self.manifest['schedule']} for {self.arch}",
            arch=self.arch,
            launch=self.launch,
            resources=self.resources,
            definition=(self.path / "definition.txt").read_text(),
            scheduled=(self.path / "scheduled.tir").read_text(),
            lowered=(self.path / "lowered.tir").read_text(),
            sources=sources,
        )

    def check_device(self) -> None:
        """Raise BundleError, saying what to do, unless this machine runs what the bundle was built for."""
        target, arch = self.manifest["target"], self.arch
        if target["machine"] != platform.machine():
            raise BundleError(f"built for {target['machine']}, this machine is {platform.machine()}; build it here")
        has = devices.cpu_features()
        missing = [feature for feature in target["cpu_features"] if has is not None and feature not in has]
        if missing:
            raise BundleError(
                f"built for the CPU {target['mcpu']}, this one lacks {', '.join(missing)}; rebuild with --target llvm"
            )
        if not arch.is_gpu or devices.of_arch(arch):
            return
        wanted = f"built for {arch.name}" + (f" ({arch.compute_capability})" if arch.kind == "cuda" else "")
        here = devices.cuda() if arch.kind == "cuda" else devices.rocm()
        if not here:
            raise BundleError(f"{wanted}, this machine has no {arch.kind} device; run it where there is one")
        fits = here[0].newest_arch() or "llvm"
        raise BundleError(f"{wanted}, this device is {here[0].capability}; rebuild with --target {fits}")

    def load(self) -> Loaded:
        """The function, which checks its tensors.

        Raises BundleError if this machine cannot run it, or if the operator now takes other arguments than it did.
        """
        self.check_device()
        problem, arch = self.problem, self.arch
        if self.operator.schedule(self.manifest["schedule"]).arguments(problem) != self.arguments:
            was = self.manifest["versions"].get("te-schedules")
            raise BundleError(f"{self.path} was written by te-schedules {was} with other arguments; build it again")
        import tvm_ffi

        from schedules.build.builder import load_library

        if arch.kind == "rocm" and tvm_ffi.get_global_func("device_api.rocm", allow_missing=True) is None:
            raise BundleError(f"built for {arch}, this TVM has no ROCm runtime; load it with a TVM built with ROCm")
        return Loaded(problem, arch, self.arguments, load_library(self.library, arch))


def write_bundle(
    built: Built, out: str | Path, *, force: bool = False, measured: dict[str, Any] | None = None
) -> Bundle:
    """Write `built` into the folder `out`, all of it or nothing.

    `measured` is what a measurement found, kept in kernel.json.  With `force` a bundle that is there is replaced; any
    other folder or file never is.  Raises BundleError, or BuildError if the library would need a compiler to load.
    """
    out = Path(out)
    check_destination(out, force=force)
    out = out.resolve()
    with whole_folder(out) as temporary:
        _fill(temporary, built, measured)
    return Bundle.open(out)


def check_destination(out: str | Path, *, force: bool = False) -> None:
    """Raise BundleError unless a bundle may be written to `out`; asked before a build, so that none is wasted."""
    out = Path(out)
    if out.is_dir():
        entries = {entry.name for entry in out.iterdir()}
        if not entries:
            return
        try:
            manifest = _read_manifest(out)
        except BundleError:
            raise BundleError(f"{out} is not empty and not a bundle; choose another --out") from None
        others = sorted(entries - {*manifest["files"], MANIFEST, "__pycache__"})
        if others:
            raise BundleError(f"{out} holds files that are no part of its bundle ({others[0]}); choose another --out")
        if not force:
            what = f"{manifest['operator']} for {manifest['target'].get('arch')}"
            raise BundleError(f"{out} holds a bundle ({what}); choose another --out, or pass --force to replace it")
        return
    if out.exists():
        raise BundleError(f"{out} is a file; --out needs a folder")
    parent = next((folder for folder in out.absolute().parents if folder.exists()), Path("/"))
    if not parent.is_dir():
        raise BundleError(f"{parent} is a file; --out needs a folder")
    if not os.access(parent, os.W_OK):
        raise BundleError(f"{parent} is not writable; choose another --out")


def embedded_machines(library: bytes) -> set[int]:
    """The e_machine of every ELF image inside `library`."""
    found, at = set(), library.find(b"\x7fELF", 1)
    while at >= 0 and at + 20 <= len(library):
        found.add(struct.unpack_from("<H", library, at + 18)[0])
        at = library.find(b"\x7fELF", at + 1)
    return found


def _fill(folder: Path, built: Built, measured: dict[str, Any] | None) -> None:
    made = material(built)
    built.module.export_library(str(folder / LIBRARY), fcompile=link_library)
    library = (folder / LIBRARY).read_bytes()
    if built.arch.is_gpu and _MACHINES[built.arch.kind] not in embedded_machines(library):
        raise BuildError(f"the library holds no code for {built.arch}; build with device code")
    if b"__global__" in library:
        raise BuildError("the library holds CUDA source, to be compiled at load; is TVM's CUDA runtime installed?")
    texts = {"scheduled.tir": made.scheduled, "lowered.tir": made.lowered, "definition.txt": made.definition}
    texts["load.py"] = resources.files("schedules.bundle").joinpath("load.py.in").read_text()
    for name, text in {**texts, **{f"kernel.{ending}": source for ending, source in made.sources.items()}}.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    # for a GPU only the launch runs on the CPU, in code for the baseline
    mcpu = None if built.arch.is_gpu else host_cpu(built.arch.name).get("mcpu")
    features = devices.needed_features(mcpu)
    if built.arch.name == "host":
        # an older kernel does not list every feature that the CPU has: what was built here must load here
        here = devices.cpu_features()
        features = tuple(name for name in features if here is None or name in here)
    manifest = {
        "schema": SCHEMA,
        "operator": built.operator.name,
        "problem": built.problem.to_json(),
        "schedule": built.schedule.name,
        "arithmetic": built.schedule.arithmetic.name,
        "config": built.config.to_json(),
        "target": {
            "arch": str(built.arch),
            "kind": built.arch.kind,
            "name": built.arch.name,
            "compute_capability": built.arch.compute_capability if built.arch.kind == "cuda" else None,
            "machine": platform.machine(),
            "mcpu": mcpu,
            "cpu_features": list(features),
        },
        "library": LIBRARY,
        "arguments": [dataclasses.asdict(argument) for argument in built.schedule.arguments(built.problem)],
        "launch": built.launch and dataclasses.asdict(built.launch),
        "resources": [dataclasses.asdict(used) for used in made.resources],
        "compiler": built.compiler,
        "versions": versions(),
        "measured": measured,
        "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": {path.name: _sha256(path.read_bytes()) for path in sorted(folder.iterdir())},
    }
    manifest["sha256"] = _digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the bundle in `path`, its form and its own checksum checked.  Raises BundleError."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        raise BundleError(f"{path} is not a bundle: it has no {MANIFEST}") from None
    except (ValueError, OSError) as error:
        raise BundleError(f"{file} cannot be read ({error}); build it again") from None
    if not isinstance(manifest, dict) or "schema" not in manifest:
        raise BundleError(f"{file} is not a bundle's; give a folder that `schedules build --out` wrote")
    if manifest["schema"] != SCHEMA:
        raise BundleError(f"{file} has schema {manifest['schema']}, this version reads {SCHEMA}; build it again")
    for key, kind in _KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise BundleError(f"{file} is malformed at {key!r}; build it again")
    if manifest.get("sha256") != _digest(manifest):
        raise BundleError(f"{file} is not what was built (truncated or edited); build it again")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return _sha256(json.dumps(content, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
