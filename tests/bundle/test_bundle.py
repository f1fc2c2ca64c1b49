"""Bundles: written whole or not at all, refused when altered or for another device, loaded without TVM's Python."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules.build.builder import Built, build
from schedules.build.toolchain import devices
from schedules.build.toolchain.devices import LocalDevice
from schedules.bundle import bundle as bundle_module
from schedules.bundle.bundle import Bundle, Loaded, embedded_machines, write_bundle
from schedules.bundle.package import loader
from schedules.core import folders
from schedules.core.arch import parse_arch
from schedules.core.errors import ArgumentError, BuildError, BundleError
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, reference
from schedules.show.doctor import examine
from tests.bundle.hostile import mutants

PROBLEM = HwcnProblem(n=8, h=5, w=4, ci=3, co=6, kh=3, kw=3, pad=(1, 1))
CUDA, ROCM = "cuda:sm_90a", "rocm:gfx90a"


STATES = {state.target: state for state in examine().targets}
needs_cuda = pytest.mark.skipif(not STATES["cuda:sm_90a"].build, reason=STATES["cuda:sm_90a"].note)
needs_rocm = pytest.mark.skipif(not STATES["rocm:gfx90a"].build, reason=STATES["rocm:gfx90a"].note)


@pytest.fixture(scope="module")
def built() -> Built:
    return build(PROBLEM, parse_arch("llvm"))


@pytest.fixture(scope="module")
def built_cuda() -> Built:
    return build(PROBLEM, parse_arch(CUDA))


@pytest.fixture(scope="module")
def written(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(built, tmp_path_factory.mktemp("written") / "bundle").path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A bundle of the test's own: a copy, which takes no linker."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


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


@needs_cuda
def test_library_without_device_code_is_not_exported(tmp_path: Path) -> None:
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
        monkeypatch.setattr(folders, "_renameat2", lambda: None)
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


def rewrite(folder: Path, manifest: dict[str, Any]) -> None:
    """As whoever alters a bundle would: with its checksum made anew."""
    text = json.dumps({**manifest, "sha256": loader.digest(manifest)})
    (folder / "kernel.json").write_text(text)


def test_a_hostile_manifest_is_one_line(folder: Path) -> None:
    """Any value at any place is refused, or does no harm up to the load."""
    manifest = json.loads((folder / "kernel.json").read_text())
    refused = 0
    for at, mutant in mutants(manifest):
        rewrite(folder, mutant)
        try:
            loader.manifest(folder)
            opened = Bundle.open(folder)
        except (loader.DamagedError, BundleError) as error:
            refused += 1
            assert str(error).isprintable(), at
            continue
        assert opened.library.parent == folder and opened.library.name in opened.manifest["files"]
        opened.material()
        with contextlib.suppress(BundleError):
            opened.load()
    assert refused > 600


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "[" * 100_000, '{"schema": 1}', '{"schema":' + "9" * 9999])
def test_a_manifest_that_is_none(folder: Path, text: str) -> None:
    (folder / "kernel.json").write_text(text)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def absolute(folder: Path) -> str:
    outside = folder.parent / "outside.so"
    shutil.copy(folder / "kernel.so", outside)
    return str(outside)


def upward(folder: Path) -> str:
    absolute(folder)
    return "../outside.so"


def linked(folder: Path) -> str:
    (folder / "other.so").symlink_to(absolute(folder))
    return "other.so"


@pytest.mark.parametrize("name", [absolute, upward, linked])
@pytest.mark.parametrize("listed", [True, False])
def test_a_library_outside_is_never_loaded(folder: Path, name: Callable[[Path], str], listed: bool) -> None:
    manifest = json.loads((folder / "kernel.json").read_text())
    digest = manifest["files"]["kernel.so"]
    manifest["library"] = name(folder)
    if listed:
        manifest["files"][manifest["library"]] = digest
    rewrite(folder, manifest)
    for load in (lambda: Bundle.open(folder), lambda: loader.load(folder)):
        with pytest.raises((BundleError, loader.DamagedError), match="malformed|outside|no checksum"):
            load()


@pytest.mark.parametrize("name", ["kernel.so", "load.py", "definition.txt"])
def test_what_is_loaded_has_a_checksum(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "kernel.json").read_text())
    del manifest["files"][name]
    rewrite(folder, manifest)
    with pytest.raises(BundleError, match=f"no checksum of {name}"):
        Bundle.open(folder)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "kernel.json").unlink()
    os.mkfifo(folder / "kernel.json")
    with pytest.raises(BundleError, match="is not a file"):
        Bundle.open(folder)


def test_a_library_that_is_none_is_one_line(folder: Path) -> None:
    """Its checksum made anew, too."""
    (folder / "kernel.so").write_bytes(b"no ELF")
    manifest = json.loads((folder / "kernel.json").read_text())
    manifest["files"]["kernel.so"] = loader.sha256(b"no ELF")
    rewrite(folder, manifest)
    with pytest.raises(BundleError, match="kernel.so does not load") as caught:
        Bundle.open(folder).load()
    assert str(caught.value).isprintable()
    with pytest.raises(loader.LoadError, match="kernel.so does not load"):
        loader.load(folder)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not a folder"):
        Bundle.open(tmp_path / "nothing")


# ---- loading here


def arrays(problem: HwcnProblem = PROBLEM) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(a.shape).astype(a.dtype) for a in problem.arguments()]
    made[-1][...] = np.nan
    return made


def test_load_and_run(folder: Path) -> None:
    data, weight, out = arrays()
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
        Loaded(PROBLEM, parse_arch(CUDA), PROBLEM.arguments(), run)(*arrays())


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
    loaded = Loaded(PROBLEM, parse_arch(CUDA), PROBLEM.arguments(), lambda *_: started.append(1))
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
            (LocalDevice("cuda", "NVIDIA A100", "8.0"),),
            r"built for sm_90a \(9.0\), this device is 8.0; rebuild with --target cuda:sm_80",
        ),
        ((LocalDevice("cuda", "RTX 3090", "8.6"),), r"this device is 8.6; rebuild with --target cuda:sm_86"),
    ],
)
def test_cuda_device_must_match(
    cuda_folder: Path, monkeypatch: pytest.MonkeyPatch, here: tuple[LocalDevice, ...], reason: str
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
    assert LocalDevice("cuda", "a GPU", capability).runs(parse_arch(arch)) is runs


def test_cpu_features_must_match(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = Bundle.open(folder).manifest["target"]["cpu_features"]
    if not needed:
        pytest.skip("built for this machine's baseline, which needs no feature")
    monkeypatch.setattr(bundle_module, "cpu_features", lambda: frozenset(needed) - {needed[0]})
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
