"""Kernels built for one target, by operator and fields or by name; each is loaded when it is first asked for.

    import te_kernels_llvm as library

    softmax = library.load("softmax", rows=4096, cols=1000, dtype="float16")
    softmax(x, y)  # tensors of the target's device, in the order of `softmax.arguments`; outputs are written in place
    library.load("oneflow-1000")  # the same by the name of a preset

`python -m` with this package's name lists what is here.  Needs apache-tvm-ffi and TVM's runtime library, for ROCm
libamdhip64 alone: no compiler, and nothing of te-schedules.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

from .loader import MANIFEST as MANIFEST
from .loader import NAME, SCALAR, SHA256, WORD, DamagedError, Kernel, LoadError, document, require_intact
from .loader import ArgumentError as ArgumentError
from .loader import KernelError as LibraryError
from .loader import load as load_kernel

__all__ = [
    "ArgumentError",
    "DamagedError",
    "Kernel",
    "LibraryError",
    "LoadError",
    "NoKernelError",
    "check",
    "find",
    "index",
    "load",
]

HERE = Path(__file__).resolve().parent
INDEX = HERE / "index.json"
KERNELS = "kernels"
SCHEMA = 1
AGAIN = "install the library again"
FILES = {NAME: {"sha256": SHA256, "bytes": int}}
KERNEL = {
    "operator": WORD,
    "problem": {WORD: SCALAR},
    "run_time": [WORD],
    "schedule": WORD,
    "config": {WORD: SCALAR},
    "source": WORD,
    "why": str,
    "us": (float, int, None),
    "compiler": str,
    "library": NAME,
    "folder": str,
    "files": FILES,
    "bytes": int,
}
# what index.json holds; `code` are the files of the package itself
FORM = {
    "name": WORD,
    "version": WORD,
    "target": WORD,
    "machine": WORD,
    "built": str,
    "versions": {WORD: str},
    "operators": {WORD: {"fields": [WORD], "defaults": {WORD: SCALAR}}},
    "kernels": {NAME: KERNEL},
    "missing": {WORD: str},
    "code": FILES,
}


class NoKernelError(LibraryError, LookupError):
    """What was asked for is not in this library; the message names what is nearest."""


def read_index(file: Path) -> dict[str, Any]:
    """The contents of a library's index.  Raises DamagedError."""
    found = document(file, "library", SCHEMA, FORM, AGAIN)
    for name, entry in found["kernels"].items():
        kind = found["operators"].get(entry["operator"], {"fields": ()})
        sizes = [entry["problem"].get(word) for word in entry["run_time"]]
        fits = (
            entry["folder"] == f"{KERNELS}/{name}"
            and {entry["library"], MANIFEST, "load.py"} <= entry["files"].keys()
            and kind["fields"]
            and set(kind["fields"]) == entry["problem"].keys() >= set(kind["defaults"])
            and all(type(size) is int and size > 0 for size in sizes)
        )
        if not fits:
            raise DamagedError(f"{file} is malformed at 'kernels.{name}'; {AGAIN}")
    if found["operators"].keys() != {entry["operator"] for entry in found["kernels"].values()}:
        raise DamagedError(f"{file} is malformed at 'operators'; {AGAIN}")
    return found


@cache
def index() -> dict[str, Any]:
    """The contents of index.json.  Raises DamagedError."""
    return read_index(INDEX)


def find(name: str, /, **fields: Any) -> str:
    """The name of the kernel for a problem: an operator and its fields, or a preset and fields in place of its own.

    A field that is left out has its default, or, without one, the value that only one kernel has.  A kernel that takes
    other extents of a field at run time (`run_time` in the index) serves every value of it, of `n` from its `n_from`
    to its own; the nearest is taken.  Raises NoKernelError.
    """
    kernels, operators = index()["kernels"], index()["operators"]
    name = str(name)
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
    serving = [each for each, entry in ours.items() if _serves(entry, wanted)]
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
    require_files(HERE, index(), None if name is None else [find(name)])


def require_files(home: Path, about: Mapping[str, Any], kernels: Iterable[str] | None = None) -> None:
    """Compare every file of the library in `home`, or those of `kernels`, with its checksum.  Raises DamagedError."""
    if kernels is None:
        require_intact(home, _checksums(about["code"]), AGAIN)
    for each in about["kernels"] if kernels is None else kernels:
        entry = about["kernels"][each]
        require_intact(home / entry["folder"], _checksums(entry["files"]), AGAIN)


@cache
def _loaded(name: str) -> Kernel:
    entry = index()["kernels"][name]
    folder = HERE / entry["folder"]
    needed = (MANIFEST, "load.py", entry["library"])
    require_intact(folder, _checksums({each: entry["files"][each] for each in needed}), AGAIN)
    try:
        return dataclasses.replace(load_kernel(folder), problem=entry["problem"])
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def _checksums(files: Mapping[str, Any]) -> dict[str, str]:
    return {name: about["sha256"] for name, about in files.items()}


def _differing(wanted: Mapping[str, Any], problem: Mapping[str, Any]) -> set[str]:
    """The fields of `wanted` that `problem` has otherwise; one number stands for a pair of it."""

    def plain(value: Any, like: Any) -> Any:
        if not isinstance(like, list):
            return value
        return list(value) if isinstance(value, (list, tuple)) else [value] * len(like)

    return {word for word, value in wanted.items() if plain(value, problem[word]) != problem[word]}


def _serves(entry: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a kernel takes what is wanted, its run-time extents put aside."""
    problem, free = entry["problem"], set(entry["run_time"])
    sizes = {word: wanted[word] for word in free & wanted.keys()}
    if not all(isinstance(value, Integral) and value is not True and int(value) > 0 for value in sizes.values()):
        return False
    for word, size in sizes.items():
        if (least := problem.get(f"{word}_from")) and not least <= int(size) <= problem[word]:
            return False
    free |= {f"{word}_from" for word in free}
    return _differing(wanted, problem) <= free


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
