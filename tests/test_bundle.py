"""Bundles: written whole or not at all, refused when altered or for another device, loaded without TVM's Python."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules import bundle as bundle_module
from schedules.arch import parse_arch
from schedules.build import Built, build
from schedules.bundle import Bundle, Loaded, embedded_machines, write_bundle
from schedules.conv2d_hwcn.definition import HwcnProblem, reference
from schedules.errors import ArgumentError, BuildError, BundleError, ToolchainError
from schedules.toolchain import cuda, devices, link
from schedules.toolchain.devices import Device
from schedules.toolchain.stub_elf import shared_library

PROBLEM = HwcnProblem(n=8, h=5, w=4, ci=3, co=6, kh=3, kw=3, pad=(1, 1))
CUDA, ROCM = "cuda:sm_90a", "rocm:gfx90a"


def _cuda_missing() -> str | None:
    try:
        cuda.load_cudart()
    except ToolchainError as error:
        return str(error)
    return None if cuda.nvrtc_available() else "no NVRTC; pip install 'te-schedules[cuda]'"


needs_cuda = pytest.mark.skipif(_cuda_missing() is not None, reason=f"cross-building for CUDA: {_cuda_missing()}")
needs_rocm = pytest.mark.skipif(
    link.find_lld() is None, reason="no linker for AMD GPUs; pip install 'te-schedules[rocm]'"
)


@pytest.fixture(scope="module")
def built() -> Built:
    return build(PROBLEM, parse_arch("llvm"))


@pytest.fixture(scope="module")
def built_cuda() -> Built:
    return build(PROBLEM, parse_arch(CUDA))


@pytest.fixture
def folder(built: Built, tmp_path: Path) -> Path:
    write_bundle(built, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def cuda_folder(built_cuda: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(built_cuda, tmp_path_factory.mktemp("cuda") / "bundle").path


def entries(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


# ---- what is written


def test_manifest(folder: Path) -> None:
    manifest = json.loads((folder / "kernel.json").read_text())
    assert manifest["operator"] == "conv2d_hwcn" and manifest["schedule"] == "cpu"
    assert [(a["name"], a["output"]) for a in manifest["arguments"]] == [("data", 0), ("filter", 0), ("output", 1)]
    assert manifest["arguments"][0]["shape"] == [5, 4, 3, 8]
    assert manifest["versions"].keys() >= {"te-schedules", "apache-tvm", "apache-tvm-ffi", "numpy", "python"}
    assert set(manifest["files"]) == entries(folder) - {"kernel.json"}
    assert {
        "kernel.so",
        "kernel.ll",
        "kernel.s",
        "scheduled.tir",
        "lowered.tir",
        "load.py",
        "definition.txt",
    } <= entries(folder)
    assert "conv" in (folder / "definition.txt").read_text()
    assert entries(folder.parent) == {"bundle"}
    assert folder.stat().st_mode & 0o055, "a bundle is for others to read, too"


def test_measured_time_is_kept(built: Built, tmp_path: Path) -> None:
    written = write_bundle(built, tmp_path / "b", measured={"median_us": 1.5, "device": "x"})
    assert Bundle.open(written.path).manifest["measured"] == {"median_us": 1.5, "device": "x"}


def test_open_gives_back_what_was_built(built: Built, folder: Path) -> None:
    opened = Bundle.open(folder)
    assert opened.problem == PROBLEM and opened.arch == built.arch and opened.launch is None
    made = opened.material()
    assert made.sources == built.sources and made.lowered == built.lowered


@needs_cuda
def test_cuda_bundle_holds_a_cubin_and_no_source(built_cuda: Built, cuda_folder: Path) -> None:
    library = (cuda_folder / "kernel.so").read_bytes()
    assert 190 in embedded_machines(library)
    assert (cuda_folder / "kernel.cubin").read_bytes() in library
    assert b"__global__" not in library
    assert "__global__" in (cuda_folder / "kernel.cu").read_text()
    assert ".target sm_90a" in (cuda_folder / "kernel.ptx").read_text()
    opened = Bundle.open(cuda_folder)
    assert opened.resources == built_cuda.resources and opened.resources[0].registers > 0
    assert opened.launch == built_cuda.launch


@needs_rocm
def test_rocm_bundle_holds_a_code_object(tmp_path: Path) -> None:
    written = write_bundle(build(PROBLEM, parse_arch(ROCM)), tmp_path / "bundle")
    library = written.library.read_bytes()
    assert 224 in embedded_machines(library)
    assert (written.path / "kernel.hsaco").read_bytes() in library
    assert "main_kernel" in (written.path / "kernel.s").read_text()
    assert written.resources[0].registers > 0 and written.resources[0].stack == 0


def test_library_without_device_code_is_not_exported(tmp_path: Path) -> None:
    if _cuda_missing():
        pytest.skip(str(_cuda_missing()))
    bare = build(PROBLEM, parse_arch(CUDA), device_code=False)
    with pytest.raises(BuildError, match="no code for cuda:sm_90a"):
        write_bundle(bare, tmp_path / "bundle")
    assert not entries(tmp_path)


# ---- atomicity and the destination


class Failing:
    def inspect_source(self, _: str) -> str:
        return ""

    def export_library(self, *_: Any, **__: Any) -> None:
        raise BuildError("no")


def test_failed_export_leaves_nothing(built: Built, tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        write_bundle(dataclasses.replace(built, module=Failing()), tmp_path / "new" / "deep" / "bundle")
    assert not entries(tmp_path)


def test_failure_after_the_files_were_written_leaves_nothing(built: Built, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_bundle(built, tmp_path / "new" / "bundle", measured={"unprintable": object()})
    assert not entries(tmp_path)


def test_failed_replacement_leaves_the_old_bundle(built: Built, folder: Path) -> None:
    before = (folder / "kernel.json").read_bytes()
    with pytest.raises(TypeError):
        write_bundle(built, folder, force=True, measured={"unprintable": object()})
    assert (folder / "kernel.json").read_bytes() == before
    assert entries(folder.parent) == {"bundle"}
    Bundle.open(folder)


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "two renames"])
def test_force_replaces(built: Built, folder: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(bundle_module, "_renameat2", lambda: None)
    write_bundle(built, folder, force=True, measured={"median_us": 2})
    assert Bundle.open(folder).manifest["measured"] == {"median_us": 2}
    assert entries(folder.parent) == {"bundle"}


def test_empty_folder_is_taken(built: Built, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Bundle.open(write_bundle(built, tmp_path / "empty").path)


def occupied(path: Path) -> str:
    path.mkdir()
    (path / "thesis.txt").write_text("mine")
    return "not a bundle"


def a_file(path: Path) -> str:
    path.write_text("mine")
    return "is a file"


def below_a_file(path: Path) -> str:
    path.parent.mkdir()
    path.parent.rmdir()
    path.parent.write_text("mine")
    return "is a file"


def someones_json(path: Path) -> str:
    path.mkdir()
    (path / "kernel.json").write_text('{"name": "jupyter"}')
    return "not a bundle"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("prepare", [occupied, a_file, someones_json, below_a_file])
def test_what_is_not_a_bundle_is_never_replaced(
    built: Built, tmp_path: Path, prepare: Callable[[Path], str], force: bool
) -> None:
    out = tmp_path / "taken" / "out" if prepare is below_a_file else tmp_path / "taken"
    reason = prepare(out)
    before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(BundleError, match=reason):
        write_bundle(built, out, force=force)
    assert sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()) == before


def test_a_bundle_is_replaced_only_with_force(built: Built, folder: Path) -> None:
    with pytest.raises(BundleError, match="holds a bundle .*--force"):
        write_bundle(built, folder)


def test_other_files_in_a_bundle_are_not_deleted(built: Built, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"no part of its bundle \(notes.txt\)"):
        write_bundle(built, folder, force=True)
    assert (folder / "notes.txt").read_text() == "mine"


# ---- altered bundles


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize("alter", [truncate, append, Path.unlink])
@pytest.mark.parametrize("name", ["kernel.so", "kernel.ll", "lowered.tir", "load.py"])
def test_altered_files_are_named(folder: Path, name: str, alter: Callable[[Path], None]) -> None:
    alter(folder / name)
    with pytest.raises(BundleError, match=f"{name}.*build it again"):
        Bundle.open(folder)


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (truncate, "cannot be read"),
        (Path.unlink, "not a bundle"),
        (edit(schema=99), "schema 99"),
        (edit(problem=[]), "malformed at 'problem'"),
        (edit(measured={"median_us": 0.001}), "not what was built"),
        (edit(files={}), "not what was built"),
    ],
    ids=["truncated", "missing", "schema", "form", "edited", "no files"],
)
def test_altered_manifest_is_refused(folder: Path, alter: Callable[[Path], None], reason: str) -> None:
    alter(folder / "kernel.json")
    with pytest.raises(BundleError, match=reason) as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a folder"):
        Bundle.open(tmp_path / "nothing")


# ---- loading here


def arrays(problem: HwcnProblem = PROBLEM) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(a.shape).astype(a.dtype) for a in problem.arguments()]
    made[-1][...] = np.nan
    return made


def shifted(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy whose address is `offset` bytes past a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("offset", [0, 4, 16])
def test_load_and_run(folder: Path, offset: int) -> None:
    data, weight, out = (shifted(array, offset) for array in arrays())
    Bundle.open(folder).load()(data, weight, out)
    np.testing.assert_allclose(out, reference(PROBLEM, [data, weight])[0].values, rtol=1e-4, atol=1e-4)


def wrong_shape(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return [np.zeros((5, 4, 3, 9), "float32"), *tensors[1:]]


def wrong_dtype(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return [tensors[0].astype("float64"), *tensors[1:]]


def not_contiguous(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return [np.ascontiguousarray(tensors[0].T).T, *tensors[1:]]


def too_few(tensors: list[np.ndarray]) -> list[np.ndarray]:
    return tensors[1:]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (wrong_shape, r"data has shape \(5, 4, 3, 9\), needed \(5, 4, 3, 8\)"),
        (wrong_dtype, "data has dtype float64, needed float32"),
        (not_contiguous, "data is not contiguous"),
        (too_few, "2 tensors given, 3 needed"),
    ],
)
def test_wrong_tensors_raise_before_anything_runs(
    folder: Path, spoil: Callable[[list[np.ndarray]], list[np.ndarray]], reason: str
) -> None:
    tensors = arrays()
    with pytest.raises(ArgumentError, match=reason):
        Bundle.open(folder).load()(*spoil(tensors))
    assert np.isnan(tensors[-1]).all()


def test_tensors_of_another_device_raise_before_anything_runs() -> None:
    def run(*_: Any) -> None:
        pytest.fail("the kernel was started")

    with pytest.raises(ArgumentError, match="data lies on llvm, the function was built for cuda:sm_90a"):
        Loaded(PROBLEM, parse_arch(CUDA), run)(*arrays())


class OnGpu:
    """What torch shows of a CUDA tensor."""

    def __init__(self, shape: tuple[int, ...], address: int) -> None:
        self.shape, self.dtype, self.address = shape, "torch.float32", address

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.address

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_a_misaligned_gpu_tensor_raises_before_anything_runs() -> None:
    started = []
    loaded = Loaded(PROBLEM, parse_arch(CUDA), lambda *_: started.append(1))
    shapes = [argument.shape for argument in PROBLEM.arguments()]
    loaded(*(OnGpu(shape, 1024) for shape in shapes))
    assert started.pop()
    with pytest.raises(ArgumentError, match="filter does not start at a multiple of 16 bytes"):
        loaded(OnGpu(shapes[0], 1024), OnGpu(shapes[1], 1028), OnGpu(shapes[2], 1024))
    assert not started


# ---- another device


@needs_cuda
@pytest.mark.parametrize(
    ("here", "reason"),
    [
        ((), r"built for sm_90a \(9.0\), this machine has no cuda device"),
        (
            (Device("cuda", "NVIDIA A100", "8.0"),),
            r"built for sm_90a \(9.0\), this device is 8.0; rebuild with --target cuda:sm_80",
        ),
        ((Device("cuda", "RTX 3090", "8.6"),), r"this device is 8.6; rebuild with --target cuda:sm_86"),
    ],
)
def test_cuda_device_must_match(
    cuda_folder: Path, monkeypatch: pytest.MonkeyPatch, here: tuple[Device, ...], reason: str
) -> None:
    monkeypatch.setattr(devices, "cuda", lambda: here)
    with pytest.raises(BundleError, match=reason):
        Bundle.open(cuda_folder).load()


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("cuda:sm_80", "8.0", True),
        ("cuda:sm_80", "8.6", True),
        ("cuda:sm_86", "8.0", False),
        ("cuda:sm_80", "9.0", False),
        ("cuda:sm_90a", "9.0", True),
        ("cuda:sm_90a", "9.1", False),
    ],
)
def test_which_device_runs_which_cubin(arch: str, capability: str, runs: bool) -> None:
    assert Device("cuda", "a GPU", capability).runs(parse_arch(arch)) is runs


def test_cpu_features_must_match(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = Bundle.open(folder).manifest["target"]["cpu_features"]
    if not needed:
        pytest.skip("built for this machine's baseline, which needs no feature")
    monkeypatch.setattr(devices, "cpu_features", lambda: frozenset(needed) - {needed[0]})
    with pytest.raises(BundleError, match=f"this one lacks {needed[0]}; rebuild with --target llvm"):
        Bundle.open(folder).load()


def test_machine_must_match(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Bundle.open(folder)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(BundleError, match="this machine is riscv64"):
        opened.load()


@needs_rocm
def test_rocm_bundle_does_not_load_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_bundle(build(PROBLEM, parse_arch(ROCM)), tmp_path / "bundle")
    monkeypatch.setattr(devices, "rocm", lambda: ())
    with pytest.raises(BundleError, match="no rocm device"):
        written.load()


# ---- loading in a process that has tvm_ffi and the runtime library, and nothing else


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for sys.path with tvm_ffi, NumPy and NVIDIA's libraries: no tvm to import, no site-packages."""
    path = tmp_path_factory.mktemp("bare")
    for name in ("tvm_ffi", "numpy", "nvidia", "typing_extensions"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or [])
        source = Path(places[0] if places else str(spec.origin))
        (path / source.name).symlink_to(source)
        libraries = source.with_name(f"{name}.libs")
        if libraries.is_dir():
            (path / libraries.name).symlink_to(libraries)
    return path


def runtime_libraries() -> str:
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "lib")


PROLOGUE = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
assert importlib.util.find_spec("tvm") is None and importlib.util.find_spec("schedules") is None
spec = importlib.util.spec_from_file_location("load", sys.argv[2] + "/load.py")
load = importlib.util.module_from_spec(spec)
spec.loader.exec_module(load)
"""


def clean_run(code: str, bare: Path, bundle: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` after PROLOGUE with only `environment` set: PATH is empty, there is no site-packages."""
    command = [sys.executable, "-I", "-S", "-c", PROLOGUE + code, str(bare), str(bundle)]
    return subprocess.run(command, env={"PATH": "", **environment}, capture_output=True, text=True, timeout=60)


def test_llvm_bundle_runs_in_a_clean_process(folder: Path, bare: Path, tmp_path: Path) -> None:
    data, weight, out = arrays()
    np.savez(tmp_path / "arrays.npz", data=data, weight=weight, out=out)
    code = f"""
import numpy as np
given = dict(np.load({str(tmp_path / "arrays.npz")!r}))
load.load()(given["data"], given["weight"], given["out"])
np.save({str(tmp_path / "out.npy")!r}, given["out"])
assert "tvm" not in sys.modules
"""
    done = clean_run(code, bare, folder, TVM_LIBRARY_PATH=runtime_libraries())
    assert done.returncode == 0, done.stderr
    wanted = reference(PROBLEM, [data, weight])[0].values
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, rtol=1e-4, atol=1e-4)


def test_clean_process_without_the_runtime_says_so(folder: Path, bare: Path) -> None:
    done = clean_run("load.load()", bare, folder)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "libtvm_runtime.so does not load" in last and "TVM_LIBRARY_PATH" in last


def test_clean_process_refuses_an_altered_library(folder: Path, bare: Path) -> None:
    truncate(folder / "kernel.so")
    done = clean_run("load.load()", bare, folder, TVM_LIBRARY_PATH=runtime_libraries())
    assert "kernel.so is not what was built" in done.stderr.strip().splitlines()[-1]


def test_load_py_as_a_script_says_what_the_kernel_is(folder: Path) -> None:
    done = subprocess.run([sys.executable, str(folder / "load.py")], env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "schedule cpu, built for llvm",
        "in  data float32 5 4 3 8",
        "in  filter float32 3 3 3 6",
        "out output float32 5 4 6 8",
    ]


# tensors that claim to lie on a GPU, made without one
ON_GPU = """
import ctypes, tvm_ffi
class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]
kept = []
class OnGpu:
    def __init__(self, shape):
        strides, size = [], 1
        for extent in reversed(shape):
            strides.insert(0, size)
            size *= extent
        kept.append([(ctypes.c_int64 * len(shape))(*numbers) for numbers in (shape, strides)])
        places = [ctypes.addressof(numbers) for numbers in kept[-1]]
        self.tensor = DLTensor(1 << 24, (ctypes.c_int32 * 2)(2, 0), len(shape), 2, 32, 1, *places, 0, None, None)
        kept.append(self)
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)
main = load.load()
try:
    main(*[tvm_ffi.from_dlpack(OnGpu(argument["shape"])) for argument in load.KERNEL["arguments"]])
except Exception as error:
    print(error)
"""


@needs_cuda
def test_cuda_bundle_loads_up_to_the_launch(cuda_folder: Path, bare: Path, tmp_path: Path) -> None:
    driver = shared_library("libcuda.so.1", cuda._DRIVER_FUNCTIONS, 100)
    (tmp_path / "libcuda.so.1").write_bytes(driver)
    wheel = (bare / "nvidia").exists()
    search = os.pathsep.join([str(tmp_path), *([] if wheel else [os.environ.get("LD_LIBRARY_PATH", "")])])
    done = clean_run(ON_GPU, bare, cuda_folder, TVM_LIBRARY_PATH=runtime_libraries(), LD_LIBRARY_PATH=search)
    assert done.returncode == 0, done.stderr
    # the function accepted the tensors and asked CUDA for the device, which is not there
    assert "CUDA" in done.stdout and "driver" in done.stdout.lower(), done.stdout


@needs_cuda
def test_cuda_bundle_without_a_driver_says_so(cuda_folder: Path, bare: Path) -> None:
    if cuda.driver_present():
        pytest.skip("there is a driver here")
    done = clean_run("load.load()", bare, cuda_folder, TVM_LIBRARY_PATH=runtime_libraries())
    assert "libtvm_runtime_cuda.so does not load" in done.stderr.strip().splitlines()[-1]
    assert "NVIDIA driver" in done.stderr
