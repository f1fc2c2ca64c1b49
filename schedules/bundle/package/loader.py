"""Load this kernel without TVM's Python or a compiler.

    from load import load
    kernel = load()
    kernel(*tensors)  # in the order that `python load.py` prints; outputs are written in place

TVM's runtime library, by tvm_ffi, runs kernels for a CPU and most for CUDA.  A GPU's driver alone launches those for
ROCm, those with workspaces of their own, and those for CUDA where there is no such library.

A CPU kernel's parallel loops run on PyTorch's threads where it is loaded, as many as torch.set_num_threads says; else
on TVM's, one for each core or as many as TVM_NUM_THREADS says, bound to cores only if TVM_BIND_THREADS is set.

Loading runs the machine code of this folder.  Its checksums tell damage; they do not tell who made it.
"""

if __name__ == "__main__":  # Ctrl-C while modules are imported is one line too; nothing is left to clean up
    import os
    import signal

    def _interrupted(*_: object) -> None:
        os.write(2, b"load.py: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, _interrupted)

import ctypes
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedules.bundle.package.driver import ArgumentError, KernelError, LoadError
from schedules.bundle.package.launch import CODE, VECTOR_BYTES, Launcher, plan
from schedules.core.threads import before_call, share

HERE = Path(__file__).resolve().parent
MANIFEST = "kernel.json"
SCHEMA = 1
AGAIN = "build it again"

NAME = re.compile(r"\w[\w.+-]{0,199}", re.ASCII)  # of a file: no folder, no link upward
SHA256 = re.compile(r"[0-9a-f]{64}")
WORD = re.compile(r"[\w.:+-]{1,200}", re.ASCII)
SCALAR = (str, int, float, bool, None, [int])
FORMULA = (int, WORD, [object])  # `plan` reads it
LAUNCHES = {
    "sizes": {WORD: [(WORD, int)]},
    "workspaces": [{"name": WORD, "bytes": FORMULA}],
    "maps": {
        WORD: {
            **{"buffer": WORD, "type": int, "interleave": int, "swizzle": int, "promotion": int, "fill": int},
            **{name: [FORMULA] for name in ("dims", "strides", "box", "element_strides")},
        }
    },
    "kernels": [
        {
            **{"symbol": WORD, "grid": [FORMULA], "block": [FORMULA], "cluster": [int], "shared": FORMULA},
            **{"dependent": bool, "cooperative": bool},
            "arguments": [({"buffer": WORD}, {"map": WORD}, {"value": FORMULA, "dtype": WORD})],
        }
    ],
}
# What kernel.json holds: a type; a pattern of a text; a tuple of what may stand there; a list or a table of one kind;
# or an object with these keys, those with ? if it has them.
KERNEL = {
    "operator": WORD,
    "problem": {WORD: SCALAR},
    "schedule": WORD,
    "config": {WORD: SCALAR},
    "target": {
        "arch": WORD,
        "kind": re.compile("llvm|cuda|rocm"),
        "code_object": (int, None),
        "machine": WORD,
        "mcpu": (str, None),
        "cpu_features": [WORD],
    },
    "library": NAME,
    "arguments": [
        {
            **{"name": WORD, "shape": [int], "dtype": WORD, "output": bool, "runtime_axis": (int, None)},
            **{"ranged_axis?": int, "least?": int},
        }
    ],
    "launch": ({"grid": [(int, str)], "block": [int], "cluster?": int}, None),
    "launches": (LAUNCHES, {"why": str}, None),
    "resources": [
        {"name": WORD, "registers": int, "shared": int, "stack": int, "spill_stores": int, "spill_loads": int}
    ],
    "compiler": str,
    "versions": {WORD: str},
    "measured": ({"median_us?": (float, int), "device?": str}, None),
    "built": str,
    "files": {NAME: SHA256},
}


class DamagedError(KernelError):
    """A file that is missing, or is not what was built."""


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    `arguments` are its tensors in call order, outputs last: name, shape, dtype, output, and runtime_axis, the axis
    whose extent may be another at each call, or None; with `ranged_axis`, its extent may be one from `least` to the
    shape's.
    """

    name: str
    operator: str
    problem: Mapping[str, Any]
    schedule: str
    config: Mapping[str, Any]
    arguments: tuple[Mapping[str, Any], ...]
    target: Mapping[str, Any]
    function: Any = field(repr=False)

    def __call__(self, *tensors: Any) -> None:
        """Run on NumPy, PyTorch or other DLPack tensors of the target's device; outputs are written in place.

        Raises ArgumentError before anything runs if they do not fit, KernelError if the kernel fails.
        """
        if self.target["kind"] == "llvm":
            before_call()
        elif not isinstance(self.function, Launcher):
            for argument, tensor in zip(self.arguments, tensors, strict=False):
                if hasattr(tensor, "data_ptr") and tensor.data_ptr() % VECTOR_BYTES:
                    raise ArgumentError(f"{argument['name']} does not start at a multiple of {VECTOR_BYTES} bytes")
        try:
            self.function(*tensors)
        except KernelError:
            raise
        except BufferError as error:
            remedy = "pass what can be written, and what NumPy has no type for as a tensor of PyTorch or TVM"
            raise ArgumentError(f"{_line(error)}; {remedy}") from None
        except (TypeError, ValueError, AttributeError) as error:  # the function looks at its tensors first
            raise ArgumentError(_line(error)) from None
        except Exception as error:
            raise KernelError(f"{self.name} failed: {_line(error)}") from error


def load(folder: str | Path = HERE) -> Kernel:
    """The kernel in `folder`.  Raises DamagedError, LoadError."""
    folder = Path(folder)
    about = manifest(folder)
    target, library = about["target"], about["library"]
    require_intact(folder, {library: about["files"][library]})
    if target["machine"] != platform.machine():
        raise LoadError(f"built for {target['machine']}, this machine is {platform.machine()}")
    flags = _cpu_flags()
    missing = [feature for feature in target["cpu_features"] if flags and feature not in flags]
    if missing:
        raise LoadError(f"built for the CPU {target['mcpu']}, this one lacks {', '.join(missing)}")
    try:
        function = None if by_driver(about) else _by_tvm(folder, about)
    except LoadError:
        if target["kind"] != "cuda" or "kernels" not in about["launches"]:
            raise
        function = None
    function = function or launcher(folder, about)
    words = {key: about[key] for key in ("operator", "problem", "schedule", "config", "target")}
    return Kernel(folder.name, **words, arguments=tuple(about["arguments"]), function=function)


def by_driver(about: Mapping[str, Any]) -> bool:
    """Whether the GPU's driver is to launch a bundle with this manifest: TVM's runtime knows no ROCm where pip brought
    it, and a workspace of its pool may be gone when a captured graph is replayed."""
    launches = about["launches"] or {}
    return about["target"]["kind"] == "rocm" or bool(launches.get("workspaces"))


def launcher(folder: Path, about: Mapping[str, Any]) -> Launcher:
    """The kernel in `folder` as its driver launches it.  Raises DamagedError, LoadError."""
    target, launches = about["target"], about["launches"]
    name = CODE[target["kind"]]
    require_intact(folder, {name: about["files"][name]})
    return Launcher(target["kind"], target["arch"], (folder / name).read_bytes(), launches, about["arguments"])


def _by_tvm(folder: Path, about: Mapping[str, Any]) -> Any:
    target, library = about["target"], about["library"]
    try:
        import tvm_ffi
    except ImportError as error:
        wanted = about["versions"].get("apache-tvm-ffi")
        raise LoadError(f"{_line(error)}; pip install apache-tvm-ffi{f'=={wanted}' if wanted else ''}") from None
    _open("libtvm_runtime.so", "tvm", "lib", "pip install apache-tvm, or set TVM_LIBRARY_PATH to its folder")
    if target["kind"] == "cuda":
        _open("libcudart.so.13", "nvidia", "cu13/lib", "pip install nvidia-cuda-runtime")
        _open("libtvm_runtime_cuda.so", "tvm", "lib", "it needs the NVIDIA driver (libcuda.so.1)")
    try:
        module = tvm_ffi.load_module(str(folder / library))
        return (share(module) if target["kind"] == "llvm" else module)["main"]
    except Exception as error:  # tvm_ffi raises many types
        raise LoadError(f"{folder / library} does not load ({_line(error)})") from error


def manifest(folder: Path = HERE) -> dict[str, Any]:
    """The contents of kernel.json in `folder`.  Raises DamagedError."""
    file = folder / MANIFEST
    about = document(file, "bundle", SCHEMA, KERNEL, AGAIN)
    for name in (about["library"], "load.py"):
        if name not in about["files"]:
            raise DamagedError(f"{file} has no checksum of {name}; {AGAIN}")
    launch = about["launch"]
    sizes = launch and [*launch["block"], *(extent for extent in launch["grid"] if type(extent) is int)]
    if launch and (not len(launch["grid"]) == len(launch["block"]) == 3 or min(sizes) < 1):
        raise DamagedError(f"{file} is malformed at 'launch'; {AGAIN}")
    _require_launches(file, about)
    for argument in about["arguments"]:
        extents, axes = argument["shape"], (argument["runtime_axis"] or 0, argument.get("ranged_axis", 0))
        within = 0 <= min(axes) <= max(axes) < len(extents) and min(extents) >= 1
        if not within or not 1 <= argument.get("least", 1) <= extents[axes[1]]:
            raise DamagedError(f"{file} is malformed at 'arguments' ({argument['name']}); {AGAIN}")
    return about


def _require_launches(file: Path, about: Mapping[str, Any]) -> None:
    """Raise DamagedError unless there is all that the launches of a kernel for a GPU name."""
    kind, launches = about["target"]["kind"], about["launches"]
    try:
        if (kind == "llvm") != (launches is None) or kind != "llvm" and CODE[kind] not in about["files"]:
            raise KeyError(kind)
        if kind != "llvm" and "why" not in launches:
            shapes = {argument["name"]: argument["shape"] for argument in about["arguments"]}
            plan(launches, shapes, {name: shapes[of][axis] for name, (of, axis) in launches["sizes"].items()})
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise DamagedError(f"{file} is malformed at 'launches'; {AGAIN}") from None


def document(file: Path, kind: str, schema: int, form: dict[str, Any], remedy: str) -> dict[str, Any]:
    """The JSON object in `file`, its form and its own checksum, `sha256`, checked.  Raises DamagedError."""
    if not os.path.lexists(file):
        raise DamagedError(f"{file.parent} is not a {kind}: it has no {file.name}")
    try:
        found = json.loads(_content(file.parent, file.name, remedy))
        if not isinstance(found, dict) or "schema" not in found:
            raise DamagedError(f"{file} is not a {kind}'s; {remedy}")
        if found["schema"] != schema:
            said = str(found["schema"])[:20]
            raise DamagedError(f"{file} has schema {said!r}, this reads {schema}; {remedy}".replace("'", ""))
        at = misfit(found, form)
        if at is not None:
            raise DamagedError(f"{file} is malformed at {at[:80]!r}; {remedy}")
        if found.get("sha256") != digest(found):
            raise DamagedError(f"{file} is not what was built (truncated or edited); {remedy}")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read ({type(error).__name__}: {_line(error)[:80]}); {remedy}") from None
    return found


def misfit(value: Any, form: Any) -> str | None:
    """Where `value` is not of `form`, as names and places with dots between; None if it is."""
    if isinstance(form, tuple):
        places = [misfit(value, each) for each in form]
        return None if None in places else max(places, key=lambda at: len(at or ""))
    if isinstance(form, list):
        if not isinstance(value, list):
            return ""
        return _first((str(at), misfit(item, form[0])) for at, item in enumerate(value))
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return ""
        if len(form) == 1 and isinstance(next(iter(form)), re.Pattern):
            ((key, inner),) = form.items()
            return _first((name, misfit(name, key) or misfit(item, inner)) for name, item in value.items())
        there = {name.rstrip("?"): each for name, each in form.items() if name[-1] != "?" or name[:-1] in value}
        return _first((name, misfit(value.get(name, ...), each)) for name, each in there.items())
    if form is None:
        fits = value is None
    elif isinstance(form, re.Pattern):
        fits = isinstance(value, str) and form.fullmatch(value) is not None
    elif form is str:
        fits = isinstance(value, str) and value.isprintable()
    elif form is float:
        fits = type(value) is float and math.isfinite(value)
    elif form is int:
        fits = type(value) is int and abs(value) < 1 << 63
    else:
        fits = isinstance(value, form)
    return None if fits else ""


def _first(places: Iterable[tuple[str, str | None]]) -> str | None:
    return next((f"{name}.{at}".rstrip(".") for name, at in places if at is not None), None)


def digest(found: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, without what it says of itself."""
    content = {key: value for key, value in found.items() if key != "sha256"}
    return sha256(json.dumps(content, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    """A checksum as text."""
    return hashlib.sha256(data).hexdigest()


def require_intact(folder: Path, files: Mapping[str, str], remedy: str = AGAIN) -> None:
    """Compare files of `folder` with their checksums.  Raises DamagedError."""
    for name, wanted in files.items():
        if sha256(_content(folder, name, remedy)) != wanted:
            raise DamagedError(f"{folder / name} is not what was built (truncated or edited); {remedy}")


def _content(folder: Path, name: str, remedy: str) -> bytes:
    """Of a file that lies in `folder` itself.  Raises DamagedError."""
    file = folder / name
    try:
        if file.resolve().parent != folder.resolve():
            raise DamagedError(f"{file} leads outside its folder; {remedy}")
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise DamagedError(f"{file} is not a file; {remedy}")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedError(f"{file} cannot be read ({reason}); {remedy}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _cpu_flags() -> tuple[str, ...] | list[str]:
    """The features that the system lists of its CPU; none if it lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    return next((line.split() for line in lines if line.startswith("flags")), ())


def _open(name: str, package: str, places: str, remedy: str) -> None:
    """Load the shared library `name` from TVM_LIBRARY_PATH, from `places` in an installed `package`, or as the system
    finds it."""
    folders = [Path(folder) for folder in os.environ.get("TVM_LIBRARY_PATH", "").split(os.pathsep) if folder]
    spec = importlib.util.find_spec(package)  # finds the package without importing it
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += sorted(Path(root).glob(places), reverse=True)
    path = next((folder / name for folder in folders if (folder / name).is_file()), name)
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LoadError(f"{name} does not load ({_line(error)}); {remedy}") from None


def main(words: list[str]) -> int:
    """Say what the kernel is, and load it; 2 if it is damaged, 1 if it does not load here."""
    try:
        if words:
            print(f"load.py: error: {words[0]!r} is not known; it takes no arguments", file=sys.stderr)
            return 2
        about = manifest()
        print(about["operator"], " ".join(f"{name}={value}" for name, value in about["problem"].items()))
        print(f"schedule {about['schedule']}, built for {about['target']['arch']}")
        for argument in about["arguments"]:
            axis, ranged = argument["runtime_axis"], argument.get("ranged_axis")
            shape = ["any" if at == axis else str(extent) for at, extent in enumerate(argument["shape"])]
            if ranged is not None:
                shape[ranged] = f"{argument['least']}-{shape[ranged]}"
            print("out" if argument["output"] else "in ", argument["name"], argument["dtype"], *shape)
        sys.stdout.flush()
        load()
    except KernelError as error:
        print(f"load.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, DamagedError) else 1
    except BrokenPipeError:  # the reader has seen enough; keep Python from saying so when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
