"""A library's folder, which is a Python project as it lies there, and its wheel.

te-kernels-llvm-0.1.0/
    pyproject.toml, setup.cfg
    te_kernels_llvm/        the package: put the folder above on sys.path, or install it
        __init__.py, __main__.py, index.json
        kernels/<preset>/   a bundle each
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.bundle.bundle import source
from schedules.bundle.library.collect import Made, described
from schedules.bundle.package import INDEX, KERNELS, SCHEMA, read_index, require_files
from schedules.bundle.package.loader import DamagedError, digest
from schedules.bundle.signature import require_signed, sign, signature_of
from schedules.core.arch import Arch
from schedules.core.errors import BuildError, BundleError, ToolchainError, UsageError
from schedules.core.folders import whole_folder
from schedules.core.registry import operator
from schedules.core.versions import versions
from schedules.measure.records import now

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_CODE = ("__init__.py", "__main__.py", "loader.py")
_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Operator kernels for {target}, built by te-schedules {schedules}"
requires-python = ">=3.10"
dependencies = [{dependencies}]

[tool.setuptools]
packages = ["{package}"]
include-package-data = false

[tool.setuptools.package-data]
{package} = ["index.json*", "kernels/*/*"]
"""
# the kernels are machine code: the wheel says for which machine, and that any Python will do
_SETUP = """\
[bdist_wheel]
plat_name = linux_{machine}
"""
_BUILD_WHEEL = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@dataclass(frozen=True)
class Library:
    """A library's folder `path`, the package inside, and its index."""

    path: Path
    package: str
    index: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, key: Ed25519PublicKey | None = None) -> Library:
        """The library in `path`, its folder or its package's.

        Raises BundleError if it is not one, or a file not as it was written; with a `key`, if its owner did not sign
        it, or if there is a file in the package that is not signed.
        """
        home = cls._home(Path(path)) or Path(path)
        if key is not None:
            require_signed(home / INDEX.name, key)
        try:
            index = read_index(home / INDEX.name)
            require_files(home, index)
        except DamagedError as error:
            raise BundleError(str(error)) from None
        library = cls(home.parent, home.name, index)
        if key is not None and (others := library._others()):
            raise BundleError(f"{home} holds {others[0]}, which is not signed; remove it")
        return library

    @classmethod
    def is_at(cls, path: str | Path) -> bool:
        """Whether there is a library in `path`, intact or not."""
        return cls._home(Path(path)) is not None

    @staticmethod
    def _home(path: Path) -> Path | None:
        """The package's folder in or at `path`."""
        files = (path / INDEX.name, *sorted(path.glob(f"*/{INDEX.name}")))
        return next((file.parent for file in files if file.exists()), None)

    @property
    def bundles(self) -> list[Path]:
        """The folders of its kernels."""
        return [self.home / entry["folder"] for entry in self.index["kernels"].values()]

    def _others(self) -> list[str]:
        """What is in the package's folder and no part of it."""
        kernels = self.index["kernels"].values()
        known = {*self.index["code"], INDEX.name, signature_of(INDEX).name, KERNELS, *(k["folder"] for k in kernels)}
        known |= {f"{kernel['folder']}/{name}" for kernel in kernels for name in kernel["files"]}
        return sorted({str(file.relative_to(self.home)) for file in self.home.rglob("*")} - known)

    @property
    def home(self) -> Path:
        """The package's folder."""
        return self.path / self.package


def library_name(arch: Arch) -> str:
    """The distribution's name: te-kernels-cuda-sm_90a, te-kernels-llvm, ..."""
    return f"te-kernels-{str(arch).replace(':', '-')}"


def write_library(
    folder: str | Path,
    arch: Arch,
    version: str,
    make: Callable[[Path], Sequence[Made]],
    *,
    force: bool = False,
    key: Ed25519PrivateKey | None = None,
) -> Library:
    """Write the library for `arch` into ``folder/<name>-<version>``, all of it or nothing.

    `make` builds bundles into the folder that it is given, each into a folder with its preset's name.  With `force` a
    library that is there is replaced; anything else never is.  With a `key` it is signed.  Raises UsageError for the
    version, BundleError, BuildError if no kernel was built.
    """
    name = library_name(arch)
    package = re.sub(r"[^a-z0-9]+", "_", name.lower())
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?(\+[a-z0-9.]+)?", version):
        raise UsageError(f"version {version!r} is not a version of Python packages; write 1.2 or 1.2.post1")
    out = Path(folder).resolve() / f"{name}-{version}"
    check_destination(out, package, force=force)
    with whole_folder(out) as temporary:
        home = temporary / package
        home.mkdir()
        made = make(home / KERNELS)
        if not any(each.entry for each in made):
            why = next((each.why for each in made), "no preset was asked for")
            raise BuildError(f"no kernel was built for {arch}: {why}")
        for file in _CODE:
            (home / file).write_text(source(file))
        index = _index(name, version, arch, made, described(home / file for file in _CODE))
        (home / INDEX.name).write_text(json.dumps(index, indent=1) + "\n")
        if key is not None:
            sign(home / INDEX.name, key)
        (temporary / "pyproject.toml").write_text(_project(index, package))
        (temporary / "setup.cfg").write_text(_SETUP.format(machine=platform.machine()))
    return Library(out, package, index)


def check_destination(out: Path, package: str, *, force: bool = False) -> None:
    """Raise BundleError unless a library may be written to `out`; asked before anything is built."""
    if not out.exists() or out.is_dir() and not any(out.iterdir()):
        return
    if not (out / package / INDEX.name).is_file():
        raise BundleError(f"{out} is there and not a library; choose another --out")
    if not force:
        raise BundleError(f"{out} holds a library; choose another --out or --version, or pass --force to replace it")


def build_wheel(library: Library, folder: str | Path) -> Path:
    """The library as a wheel in `folder`.  Raises ToolchainError if setuptools is not installed, or too old."""
    folder = Path(folder).resolve()
    with tempfile.TemporaryDirectory() as scratch:  # setuptools leaves what it made beside the project
        project = Path(scratch) / "project"
        shutil.copytree(library.path, project, ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-c", _BUILD_WHEEL, str(folder)]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ToolchainError(f"setuptools made no wheel ({last}); pip install 'setuptools>=77'")
    return folder / done.stdout.strip().splitlines()[-1]


def _index(name: str, version: str, arch: Arch, made: Sequence[Made], code: dict[str, Any]) -> dict[str, Any]:
    kernels = {each.preset: {**each.entry, "folder": f"{KERNELS}/{each.preset}"} for each in made if each.entry}
    kinds = {owner: operator(owner).problem for owner in dict.fromkeys(e["operator"] for e in kernels.values())}
    index = {
        "schema": SCHEMA,
        "name": name,
        "version": version,
        "target": str(arch),
        "machine": platform.machine(),
        "built": now(),
        "versions": versions(),
        "operators": {owner: _fields(kind) for owner, kind in kinds.items()},
        "kernels": kernels,
        "missing": {each.preset: _printable(each.why) for each in made if not each.entry},
        "code": code,
    }
    return {**json.loads(json.dumps(index)), "sha256": digest(index)}


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a kind of problem, and the defaults of those that have one."""
    fields = [field for field in dataclasses.fields(kind) if field.init]
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return {"fields": [field.name for field in fields], "defaults": defaults}


def _project(index: dict[str, Any], package: str) -> str:
    made = index["versions"]
    runtime = () if index["target"].startswith("rocm:") else ("apache-tvm", "apache-tvm-ffi")
    needs = [f"{name}=={made[name]}" for name in runtime]
    if index["target"].startswith("cuda:"):
        needs.append("nvidia-cuda-runtime>=13.0,<14")
    dependencies = ", ".join(f'"{each}"' for each in needs)
    about = {key: index[key] for key in ("name", "version", "target")}
    return _PROJECT.format(**about, package=package, schedules=made["te-schedules"], dependencies=dependencies)
