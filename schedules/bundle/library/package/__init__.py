"""Kernels built for one target, by operator and fields or by name; each is loaded when it is first asked for.

    import te_kernels_llvm as library

    softmax = library.load("softmax", rows=4096, cols=1000, dtype="float16")
    softmax(x, y)  # tensors of the target's device, in the order of `softmax.arguments`; outputs are written in place
    library.load("oneflow-1000")  # the same by the name of a preset

`python -m` with this package's name lists what is here.  Needs apache-tvm-ffi and TVM's runtime library: no compiler,
and nothing of te-schedules.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["DamagedError", "Kernel", "LibraryError", "LoadError", "NoKernelError", "check", "find", "index", "load"]

HERE = Path(__file__).resolve().parent
INDEX = HERE / "index.json"
SCHEMA = 1


class LibraryError(Exception):
    """Base of the errors of this library."""


class NoKernelError(LibraryError, LookupError):
    """What was asked for is not in this library; the message names what is nearest."""


class DamagedError(LibraryError):
    """A file that is missing, or is not what was built."""


class LoadError(LibraryError):
    """A kernel that this machine cannot load: another device, or a library that is not installed."""


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    `arguments` are its tensors in call order, outputs last: name, shape, dtype, output, and runtime_axis, the axis
    whose extent may be another at each call, or None.
    """

    name: str
    operator: str
    problem: Mapping[str, Any]
    schedule: str
    config: Mapping[str, Any]
    arguments: tuple[Mapping[str, Any], ...]
    function: Any = field(repr=False)

    def __call__(self, *tensors: Any) -> None:
        """Run on NumPy, PyTorch or other DLPack tensors of the target's device; outputs are written in place.

        The function itself refuses tensors of another shape, dtype or device, with tvm_ffi's errors.
        """
        self.function(*tensors)


@cache
def index() -> dict[str, Any]:
    """The contents of index.json.  Raises DamagedError."""
    try:
        found = json.loads(INDEX.read_text())
        said = found.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedError(
            f"{INDEX} cannot be read ({type(error).__name__}: {error}); install the library again"
        ) from None
    if said != _sha256(json.dumps(found, sort_keys=True).encode()):
        raise DamagedError(f"{INDEX} is not what was built (truncated or edited); install the library again")
    if found["schema"] != SCHEMA:
        raise DamagedError(
            f"{INDEX} has schema {found['schema']}, this module reads {SCHEMA}; install the library again"
        )
    return dict(found)


def find(name: str, /, **fields: Any) -> str:
    """The name of the kernel for a problem: an operator and its fields, or a preset and fields in place of its own.

    A field that is left out has its default, or, without one, the value that only one kernel has.  A kernel that takes
    any extent of a field at run time (`run_time` in the index) serves every value of it; the nearest is taken.  Raises
    NoKernelError.
    """
    kernels, operators = index()["kernels"], index()["operators"]
    if name in kernels:
        operator, wanted = kernels[name]["operator"], {**kernels[name]["problem"], **fields}
    elif name in operators:
        operator, wanted = name, {**operators[name]["defaults"], **fields}
    else:
        raise NoKernelError(_unknown("kernel or operator", name, [*operators, *kernels]))
    known = operators[operator]["fields"]
    for word in fields:
        if word not in known:
            raise NoKernelError(_unknown(f"field of {operator}", word, known))
    ours = {each: entry for each, entry in kernels.items() if entry["operator"] == operator}
    exact = [each for each, entry in ours.items() if not _differing(wanted, entry["problem"])]
    serving = [each for each, entry in ours.items() if _differing(wanted, entry["problem"]) <= set(entry["run_time"])]
    if fits := exact or serving:
        unsaid = [word for word in known if word not in wanted and _varies(word, (ours[each] for each in fits))]
        if unsaid:
            several = f"{len(fits)} kernels of {operator} fit ({_some(fits)})"
            raise NoKernelError(f"{several}; give {' and '.join(unsaid)} too")
        return min(fits, key=lambda each: _distance(wanted, ours[each]))
    nearest = min(ours, key=lambda each: len(_differing(wanted, ours[each]["problem"])))
    other = ours[nearest]["problem"]
    differing = sorted(_differing(wanted, other))
    said, has = (" ".join(f"{word}={_text(values[word])}" for word in differing) for values in (wanted, other))
    raise NoKernelError(f"no kernel of {operator} for {said}; the nearest is {nearest} with {has}")


def load(name: str, /, **fields: Any) -> Kernel:
    """The kernel for a problem, found as by `find`; loaded once in a process.

    Raises NoKernelError; DamagedError if a file is not what was built; LoadError if this machine cannot run it.
    """
    return _loaded(find(name, **fields))


def check(name: str | None = None) -> None:
    """Compare every file, or those of one kernel, with its checksum.  Raises DamagedError, NoKernelError."""
    for each in index()["kernels"] if name is None else [find(name)]:
        _require_intact(each, index()["kernels"][each]["files"])


@cache
def _loaded(name: str) -> Kernel:
    entry = index()["kernels"][name]
    _require_intact(name, ("kernel.json", "load.py", entry["library"]))
    loader = _module(HERE / entry["folder"] / "load.py", f"{__name__}.kernel {name}")
    try:
        function = loader.load()
    except ImportError as error:
        remedy = f"pip install apache-tvm-ffi=={index()['versions']['apache-tvm-ffi']}"
        raise LoadError(f"{name}: {error}; {remedy}") from error
    except (RuntimeError, OSError) as error:
        raise LoadError(f"{name}: {error}") from error
    arguments = tuple(loader.KERNEL["arguments"])
    return Kernel(name, entry["operator"], entry["problem"], entry["schedule"], entry["config"], arguments, function)


def _module(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _require_intact(name: str, files: Iterable[str]) -> None:
    entry = index()["kernels"][name]
    for each in files:
        file = HERE / entry["folder"] / each
        try:
            digest = _sha256(file.read_bytes())
        except OSError as error:
            raise DamagedError(f"{file} cannot be read ({error.strerror}); install the library again") from None
        if digest != entry["files"][each]["sha256"]:
            raise DamagedError(f"{file} is not what was built (truncated or edited); install the library again")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _differing(wanted: Mapping[str, Any], problem: Mapping[str, Any]) -> set[str]:
    """The fields of `wanted` that `problem` has otherwise; one number stands for a pair of it."""

    def plain(value: Any, like: Any) -> Any:
        if not isinstance(like, list):
            return value
        return list(value) if isinstance(value, (list, tuple)) else [value] * len(like)

    return {word for word, value in wanted.items() if plain(value, problem[word]) != problem[word]}


def _distance(wanted: Mapping[str, Any], entry: Mapping[str, Any]) -> float:
    """How many doublings of its run-time extents lie between a kernel and what is wanted."""
    pairs = [(wanted[word], entry["problem"][word]) for word in entry["run_time"] if word in wanted]
    return sum(abs(math.log2(max(a, 1) / b)) for a, b in pairs)


def _varies(word: str, entries: Iterable[Mapping[str, Any]]) -> bool:
    return len({json.dumps(entry["problem"][word]) for entry in entries}) > 1


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"unknown {kind} {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {_some(known, 12)}")
