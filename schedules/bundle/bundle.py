"""Bundles: a built kernel as a folder that loads without this package, TVM's Python or any compiler.

kernel.so            the function, with the device code inside
kernel.cu, .ptx ...  the texts it was made from
scheduled.tir, lowered.tir, definition.txt
kernel.json          what it is, how to call it, what it was built with, and a checksum of every other file
load.py              loads it with tvm_ffi and TVM's runtime library alone, or with a GPU's driver alone
kernel.json.sig      if it is signed, the signature of kernel.json

load.py is `package.loader`, which reads kernel.json here too, as `source` makes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import struct
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.build.inspect import Material, material
from schedules.build.library import Launch, load_library
from schedules.build.toolchain import devices
from schedules.build.toolchain.cuda import KernelResources
from schedules.build.toolchain.link import write_library
from schedules.bundle.package import loader
from schedules.bundle.package.loader import MANIFEST
from schedules.bundle.signature import require_signed, sign, signature_of
from schedules.core.arch import Arch, host_cpu, parse_arch
from schedules.core.cpu import cpu_features
from schedules.core.errors import BuildError, BundleError, SchedulesError, ToolchainError
from schedules.core.folders import whole_folder
from schedules.core.operator import Operator
from schedules.core.problem import Argument, Config, Problem
from schedules.core.registry import operator as find_operator
from schedules.core.versions import versions

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from schedules.build.builder import Built

LIBRARY = "kernel.so"
RANGE = ("ranged_axis", "least")
TEXTS = ("definition.txt", "scheduled.tir", "lowered.tir")
_MACHINES = {"cuda": 190, "rocm": 224}  # e_machine of a cubin and of an HSA code object


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
    def open(cls, path: str | Path, key: Ed25519PublicKey | None = None) -> Bundle:
        """The bundle in the folder `path`.

        Raises BundleError if it is not one, or not as it was written; with a `key`, if its owner did not sign it, or if
        there is a file that is not signed.
        """
        path = Path(path)
        if not path.is_dir():
            raise BundleError(f"{path} is not a folder; give the one that `schedules build --out` wrote")
        if key is not None:
            require_signed(path / MANIFEST, key)
        try:
            manifest = loader.manifest(path)
            loader.require_intact(path, manifest["files"])
        except loader.DamagedError as error:
            raise BundleError(str(error)) from None
        if key is not None and (others := _others(path, manifest)):
            raise BundleError(f"{path} holds {others[0]}, which is not signed; remove it")
        arguments = tuple(Argument(**{**a, "shape": tuple(a["shape"])}) for a in manifest["arguments"])
        used = tuple(KernelResources(**r) for r in manifest["resources"])
        shape = manifest["launch"]
        launch = shape and Launch(tuple(shape["grid"]), tuple(shape["block"]), shape.get("cluster", 1))
        opened = cls(path, manifest, arguments, used, launch)
        opened._require_known()
        return opened

    def _require_known(self) -> None:
        """Raise BundleError unless this version has what the bundle is of, and the bundle the texts that it should."""
        file = self.path / MANIFEST
        try:
            if self.config and self.problem and self.arch.kind != self.manifest["target"]["kind"]:
                raise BundleError(f"{file} is malformed at 'target.kind'; build it again")
        except BundleError:
            raise
        except SchedulesError as error:
            raise BundleError(
                f"{file} has what this version does not know ({str(error)[:200]}); build it again"
            ) from None
        if missing := [name for name in TEXTS if name not in self.manifest["files"]]:
            raise BundleError(f"{file} has no checksum of {missing[0]}; build it again")

    @property
    def operator(self) -> Operator:
        return find_operator(self.manifest["operator"])

    @property
    def problem(self) -> Problem:
        return self.operator.problem.parse(self.manifest["problem"])

    @property
    def config(self) -> Config:
        return self.operator.schedule(self.manifest["schedule"]).config.parse(self.manifest["config"])

    @property
    def arch(self) -> Arch:
        return parse_arch(self.manifest["target"]["arch"])

    @property
    def library(self) -> Path:
        return self.path / self.manifest["library"]

    def material(self) -> Material:
        """The bundle's texts, for `schedules.build.inspect`.  Raises BundleError if one is no text."""
        sources: dict[str, str | bytes] = {}
        for name in self.manifest["files"]:
            stem, _, ending = name.partition(".")
            if stem == "kernel" and ending != "so":
                binary = ending in ("cubin", "hsaco")
                sources[ending] = (self.path / name).read_bytes() if binary else self._text(name)
        definition, scheduled, lowered = map(self._text, TEXTS)
        return Material(
            title=f"{self.manifest['operator']} {self.problem}, {self.manifest['schedule']} for {self.arch}",
            arch=self.arch,
            launch=self.launch,
            resources=self.resources,
            definition=definition,
            scheduled=scheduled,
            lowered=lowered,
            sources=sources,
        )

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except (OSError, ValueError) as error:
            raise BundleError(f"{self.path / name} cannot be read ({error}); build it again") from None

    def check_device(self) -> None:
        """Raise BundleError, saying what to do, unless this machine runs what the bundle was built for."""
        target, arch = self.manifest["target"], self.arch
        if target["machine"] != platform.machine():
            raise BundleError(f"built for {target['machine']}, this machine is {platform.machine()}; build it here")
        has = cpu_features()
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

    def load(self, by_driver: bool = False) -> Loaded:
        """The function, which checks its tensors.  TVM's host code launches the kernels of a GPU, or with `by_driver`,
        and where only that can, its driver.

        Raises BundleError if this machine cannot run it, or if the operator now takes other arguments than it did.
        """
        self.check_device()
        problem, arch = self.problem, self.arch
        if self.operator.schedule(self.manifest["schedule"]).arguments(problem) != self.arguments:
            was = self.manifest["versions"].get("te-schedules")
            raise BundleError(f"{self.path} was written by te-schedules {was} with other arguments; build it again")
        try:
            by_driver = arch.is_gpu and by_driver or loader.by_driver(self.manifest)
            function = loader.launcher(self.path, self.manifest) if by_driver else load_library(self.library, arch)
        except ToolchainError:
            raise
        except loader.KernelError as error:
            raise BundleError(str(error)) from None
        except Exception as error:  # tvm_ffi raises many types
            reason = " ".join(str(error).split())
            raise BundleError(f"{self.library} does not load ({reason}); build it again") from error
        return Loaded(problem, arch, self.arguments, function)


def write_bundle(
    built: Built,
    out: str | Path,
    *,
    force: bool = False,
    measured: dict[str, Any] | None = None,
    key: Ed25519PrivateKey | None = None,
) -> Bundle:
    """Write `built` into the folder `out`, all of it or nothing.

    `measured` is what a measurement found, kept in kernel.json.  With `force` a bundle that is there is replaced; any
    other folder or file never is.  With a `key` it is signed.  Raises BundleError, or BuildError if the library would
    need a compiler to load.
    """
    out = Path(out)
    check_destination(out, force=force)
    out = out.resolve()
    with whole_folder(out) as temporary:
        _fill(temporary, built, measured)
        if key is not None:
            sign(temporary / MANIFEST, key)
    return Bundle.open(out)


def check_destination(out: str | Path, *, force: bool = False) -> None:
    """Raise BundleError unless a bundle may be written to `out`; asked before a build, so that none is wasted."""
    out = Path(out)
    if out.is_dir():
        if not any(out.iterdir()):
            return
        try:
            manifest = loader.manifest(out)
        except loader.DamagedError:
            raise BundleError(f"{out} is not empty and not a bundle; choose another --out") from None
        if others := [name for name in _others(out, manifest) if name != "__pycache__"]:
            raise BundleError(f"{out} holds files that are no part of its bundle ({others[0]}); choose another --out")
        if not force:
            what = f"{manifest['operator']} for {manifest['target']['arch']}"
            raise BundleError(f"{out} holds a bundle ({what}); choose another --out, or pass --force to replace it")
        return
    if out.exists():
        raise BundleError(f"{out} is a file; --out needs a folder")
    parent = next((folder for folder in out.absolute().parents if folder.exists()), Path("/"))
    if not parent.is_dir():
        raise BundleError(f"{parent} is a file; --out needs a folder")
    if not os.access(parent, os.W_OK):
        raise BundleError(f"{parent} is not writable; choose another --out")


def source(file: str) -> str:
    """A module of `package` as it stands alone: with what it imports of the rest of this package in its place, once."""
    there: set[str] = set()

    def alone(text: str) -> str:
        return re.sub(r"^from (schedules\.[\w.]+) import .*\n", inlined, text, flags=re.MULTILINE)

    def inlined(line: re.Match[str]) -> str:
        if line[1] in there:
            return ""
        there.add(line[1])
        folder, _, name = line[1].rpartition(".")
        body = resources.files(folder).joinpath(f"{name}.py").read_text()
        return alone(body.partition("from __future__ import annotations\n\n")[2])  # after the docstring

    return alone(resources.files("schedules.bundle.package").joinpath(file).read_text())


def embedded_machines(library: bytes) -> set[int]:
    """The e_machine of every ELF image inside `library`."""
    found, at = set(), library.find(b"\x7fELF", 1)
    while at >= 0 and at + 20 <= len(library):
        found.add(struct.unpack_from("<H", library, at + 18)[0])
        at = library.find(b"\x7fELF", at + 1)
    return found


def _fill(folder: Path, built: Built, measured: dict[str, Any] | None) -> None:
    made = material(built)
    write_library(built.module, folder / LIBRARY)
    library = (folder / LIBRARY).read_bytes()
    if built.arch.is_gpu and _MACHINES[built.arch.kind] not in embedded_machines(library):
        raise BuildError(f"the library holds no code for {built.arch}; build with device code")
    if b"__global__" in library:
        raise BuildError("the library holds CUDA source, to be compiled at load; is TVM's CUDA runtime installed?")
    texts = {"scheduled.tir": made.scheduled, "lowered.tir": made.lowered, "definition.txt": made.definition}
    texts["load.py"] = source("loader.py")
    for name, text in {**texts, **{f"kernel.{ending}": source for ending, source in made.sources.items()}}.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    # for a GPU only the launch runs on the CPU, in code for the baseline
    mcpu = None if built.arch.is_gpu else host_cpu(built.arch.name).get("mcpu")
    features = devices.needed_features(mcpu)
    if built.arch.name == "host":
        # an older kernel does not list every feature that the CPU has: what was built here must load here
        here = cpu_features()
        features = tuple(name for name in features if here is None or name in here)
    manifest = {
        "schema": loader.SCHEMA,
        "operator": built.operator.name,
        "problem": built.problem.to_json(),
        "schedule": built.schedule.name,
        "arithmetic": built.schedule.arithmetic_of(built.problem, built.config).name,
        "config": built.config.to_json(),
        "target": {
            "arch": str(built.arch),
            "kind": built.arch.kind,
            "name": built.arch.name,
            "compute_capability": built.arch.compute_capability if built.arch.kind == "cuda" else None,
            "code_object": built.code_object,
            "machine": platform.machine(),
            "mcpu": mcpu,
            "cpu_features": list(features),
        },
        "library": LIBRARY,
        "arguments": [_described(argument) for argument in built.schedule.arguments(built.problem)],
        "launch": built.launch and dataclasses.asdict(built.launch),
        "launches": built.launches,
        "resources": [dataclasses.asdict(used) for used in made.resources],
        "compiler": built.compiler,
        "versions": versions(),
        "measured": measured,
        "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": {path.name: loader.sha256(path.read_bytes()) for path in sorted(folder.iterdir())},
    }
    manifest["sha256"] = loader.digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _described(argument: Argument) -> dict[str, Any]:
    """An argument as kernel.json has it: of a range only where there is one."""
    told = dataclasses.asdict(argument)
    return told if argument.ranged_axis is not None else {k: v for k, v in told.items() if k not in RANGE}


def _others(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What is in the folder of a bundle and no part of it."""
    known = {*manifest["files"], MANIFEST, signature_of(folder / MANIFEST).name}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
