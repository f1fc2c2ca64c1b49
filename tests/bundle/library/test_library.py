"""A library built by the script, moved, and used by a process without this package."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.library import read_library
from schedules.build.present import cpu_name
from schedules.bundle.bundle import source
from schedules.bundle.library import collect as collecting
from schedules.bundle.library.collect import Made, Order, collect, run_time_fields
from schedules.bundle.library.write import Library, build_wheel, check_destination, write_library
from schedules.bundle.package.loader import digest, sha256
from schedules.core.arch import Arch
from schedules.core.device import slug
from schedules.core.errors import BundleError, ConfigError, SchedulesError, UnknownNameError, UsageError
from schedules.core.presets import Preset, preset
from schedules.core.registry import operator
from scripts import export_all
from tests.bare import bare_folder, clean_python, runtime_libraries
from tests.bundle.hostile import mutants
from tests.conftest import problem_of

CONV, SOFTMAX = "few-16x1x64x64-16-3x3", ("oneflow-32", "oneflow-100")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The script's library of three presets, and what it said."""
    out = tmp_path_factory.mktemp("written")
    words = [*SOFTMAX, CONV, "--out", str(out), "--version", "3.1", "--workers", "1", "--keep", str(out / "kept")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert export_all.main(words) == 0
    return out / "te-kernels-llvm-3.1", said.getvalue()


@pytest.fixture
def moved(written: tuple[Path, str], tmp_path: Path) -> Path:
    """The library elsewhere."""
    return Path(shutil.copytree(written[0], tmp_path / "elsewhere"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_folder(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def library(moved: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package of the moved library, in this process."""
    for name in ("te_kernels_llvm", "te_kernels_llvm.loader"):
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(moved))
    return importlib.import_module("te_kernels_llvm")


USE = """
import sys
sys.path[:0] = sys.argv[1:3]
import importlib.util
assert importlib.util.find_spec("tvm") is None and importlib.util.find_spec("schedules") is None
import numpy as np
import te_kernels_llvm as library
given = np.load(sys.argv[3] + "/arrays.npz")
y = np.full_like(given["x"], np.nan)
softmax = library.load("softmax", rows=7, cols=100, dtype="float16")
softmax(given["x"], y)
out = np.full((16, 16, 64, 64), np.nan, "float32")
library.load("conv2d_nchw", n=16, ci=1, h=64, w=64, co=16, kh=3, kw=3, pad=1)(given["data"], given["filter"], out)
assert [a["name"] for a in softmax.arguments] == ["x", "out"] or softmax.arguments[-1]["output"], softmax.arguments
np.savez(sys.argv[3] + "/results.npz", y=y, out=out)
assert not {"tvm", "schedules"} & set(sys.modules)
"""


def results_of(code: str, *words: str | Path, folder: Path) -> None:
    """Run `code` on random arrays and compare what it kept with NumPy."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, 100)).astype("float16")
    data, weight = rng.standard_normal((16, 1, 64, 64), "float32"), rng.standard_normal((16, 1, 3, 3), "float32")
    np.savez(folder / "arrays.npz", x=x, data=data, filter=weight)
    done = clean_python(code, *words, folder, TVM_LIBRARY_PATH=runtime_libraries())
    assert done.returncode == 0, done.stderr
    found = np.load(folder / "results.npz")
    powers = np.exp(x.astype("float64"))
    np.testing.assert_allclose(found["y"], powers / powers.sum(axis=1, keepdims=True), rtol=2e-3)
    padded = np.pad(data[:, 0].astype("float64"), ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    wanted = np.einsum("nhwij,oij->nohw", windows, weight[:, 0].astype("float64"))
    np.testing.assert_allclose(found["out"], wanted, rtol=1e-4, atol=1e-4)


def test_a_moved_library_runs_in_a_clean_process(moved: Path, bare: Path, tmp_path: Path) -> None:
    results_of(USE, bare, moved, folder=tmp_path)


def test_without_tvm_ffi_the_remedy_is_named(moved: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import te_kernels_llvm; te_kernels_llvm.load('oneflow-32')"
    last = clean_python(code, moved).stderr.strip().splitlines()[-1]
    assert "LoadError: oneflow-32: No module named 'tvm_ffi'; pip install apache-tvm-ffi==" in last


def test_what_the_script_says(written: tuple[Path, str]) -> None:
    folder, said = written
    assert f"{folder}: 3 kernels, " in said and "0 skipped, 0 failed" in said
    assert "oneflow-32: cpu, default config (no records of " in said
    assert "import " in said and "first kernel " in said and "each of 2 more: " in said
    times = json.loads((folder / "load_times.json").read_text())
    assert times["import_ms"] > 0 and not times["failed"]
    assert set(times["kernels_ms"]) == {*SOFTMAX, CONV} and min(times["kernels_ms"].values()) > 0
    kept = read_library(folder.parent / "kept" / slug(cpu_name()) / "export_all.json")
    assert kept["kernels_ms"] == times["kernels_ms"] and kept["wheel_nbytes"] is None and kept["seconds"] > 0
    about = json.loads((folder / "te_kernels_llvm" / "index.json").read_text())
    assert kept["nbytes"] == sum(entry["bytes"] for entry in about["kernels"].values())
    assert (about["name"], about["version"], about["target"]) == ("te-kernels-llvm", "3.1", "llvm")
    entry = about["kernels"]["oneflow-32"]
    assert entry["run_time"] == ["rows"] and entry["source"] == "default" and entry["problem"]["cols"] == 32
    files = folder / "te_kernels_llvm" / entry["folder"]
    assert {name: kept["bytes"] for name, kept in entry["files"].items()} == {
        file.name: file.stat().st_size for file in files.iterdir() if file.is_file()
    }


def test_kernels_are_found_by_name_and_by_fields(library: ModuleType) -> None:
    assert library.find("oneflow-32") == "oneflow-32"
    assert library.find("oneflow-32", cols=100) == "oneflow-100"
    assert library.find("softmax", rows=49152, cols=32) == "oneflow-32"
    assert library.find("softmax", cols=100) == "oneflow-100"  # the one value that there is
    assert library.find("softmax", rows=5, cols=32) == "oneflow-32"  # any number of rows
    geometry = dict(n=16, ci=1, h=64, w=64, co=16, kh=3, kw=3)
    for pad in (1, (1, 1), [1, 1]):
        assert library.find("conv2d_nchw", **geometry, pad=pad) == CONV
    with pytest.raises(library.NoKernelError, match="the nearest is few-16x1x64x64-16-3x3 with pad=1,1"):
        library.find("conv2d_nchw", **geometry)
    with pytest.raises(library.NoKernelError, match=r"for n=5; the nearest is few.* with n=16"):
        library.find("conv2d_nchw", **{**geometry, "n": 5}, pad=1)  # nothing of a convolution is open at run time
    with pytest.raises(library.NoKernelError, match=r"for dtype=float32; the nearest is oneflow-32 with dtype=float16"):
        library.find("softmax", cols=32, dtype="float32")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("softmx", {}, "unknown kernel or operator 'softmx'; did you mean 'softmax'"),
        ("zzz", {}, "there are softmax, conv2d_nchw, oneflow-32"),
        ("softmax", dict(columns=3), "unknown field of softmax 'columns'; did you mean 'cols'"),
        ("softmax", dict(rows=8), r"2 kernels of softmax fit \(oneflow-32, oneflow-100\); give cols too"),
    ],
)
def test_what_is_not_there_is_named(library: ModuleType, name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(library.NoKernelError, match=message):
        library.find(name, **fields)
    assert issubclass(library.NoKernelError, LookupError)


def test_a_range_of_batches_is_found_by_each(library: ModuleType) -> None:
    kernels = library.index()["kernels"]
    ranged = json.loads(json.dumps(kernels[CONV]))
    ranged |= {"problem": ranged["problem"] | {"n": 8, "n_from": 5}, "run_time": ["n"]}
    kernels["ranged"] = ranged
    geometry = dict(ci=1, h=64, w=64, co=16, kh=3, kw=3, pad=1)
    assert [library.find("conv2d_nchw", **geometry, n=n) for n in (5, 7, 8, 16)] == ["ranged"] * 3 + [CONV]
    for n in (4, 9, 5.5):
        with pytest.raises(library.NoKernelError, match="no kernel of conv2d_nchw for n="):
            library.find("conv2d_nchw", **geometry, n=n)
    assert library.find("conv2d_nchw", **geometry) == CONV  # the one that has no range


def test_the_nearest_run_time_extent_is_taken(library: ModuleType) -> None:
    kernels = library.index()["kernels"]
    few = json.loads(json.dumps(kernels["oneflow-32"]))
    few["problem"]["rows"] = 4
    kernels["few-rows"] = few
    assert library.find("softmax", rows=9, cols=32) == "few-rows"
    assert library.find("softmax", rows=9000, cols=32) == "oneflow-32"
    with pytest.raises(library.NoKernelError, match="give rows too"):
        library.find("softmax", cols=32)


@pytest.mark.parametrize("file", ["kernel.so", "kernel.json", "load.py"])
def test_damage_is_noticed_when_a_kernel_is_loaded(library: ModuleType, file: str) -> None:
    damaged = library.HERE / "kernels" / "oneflow-32" / file
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(library.DamagedError, match=f"{file} is not what was built"):
        library.load("oneflow-32")
    with pytest.raises(library.DamagedError):
        library.check()
    library.check("oneflow-100")  # the others serve
    damaged.unlink()
    with pytest.raises(library.DamagedError, match="No such file"):
        library.load("oneflow-32")


@pytest.mark.parametrize("edit", [lambda text: text[:-9], lambda text: text.replace("49152", "7")])
def test_a_damaged_index_is_noticed(library: ModuleType, edit: Any) -> None:
    library.INDEX.write_text(edit(library.INDEX.read_text()))
    with pytest.raises(library.DamagedError, match="install the library again"):
        library.load("oneflow-32")
    done = subprocess.run([sys.executable, "-m", library.HERE.name], cwd=library.HERE.parent, capture_output=True)
    assert done.returncode == 1 and done.stderr.decode().startswith("error: ")


def rewrite(file: Path, index: dict[str, Any]) -> None:
    """As whoever alters a library would: with its checksum made anew."""
    file.write_text(json.dumps({**index, "sha256": digest(index)}))


def test_a_hostile_index_is_one_line(library: ModuleType) -> None:
    """Any value at any place is refused, or does no harm to who asks for a kernel."""
    about = json.loads(library.INDEX.read_text())
    about["kernels"] = {"oneflow-32": about["kernels"]["oneflow-32"]}
    del about["operators"]["conv2d_nchw"]
    about["kernels"]["oneflow-32"]["files"] = {
        name: about["kernels"]["oneflow-32"]["files"][name] for name in ("kernel.json", "kernel.so", "load.py")
    }
    refused = 0
    for at, mutant in mutants(about):
        rewrite(library.INDEX, mutant)
        library.index.cache_clear()
        library._loaded.cache_clear()
        try:
            library.index()
            for name, fields in (("oneflow-32", {}), ("softmax", {"rows": 3}), ("conv2d_nchw", {"n": 1})):
                with contextlib.suppress(library.NoKernelError):
                    library.load(name, **fields)
            library.check()
        except library.LibraryError as error:
            refused += 1
            assert str(error).isprintable(), at
    assert refused > 500


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "[" * 100_000, '{"schema": 1}'])
def test_an_index_that_is_none(library: ModuleType, text: str) -> None:
    library.INDEX.write_text(text)
    with pytest.raises(library.DamagedError) as caught:
        library.load("oneflow-32")
    assert str(caught.value).isprintable()
    with pytest.raises(BundleError):
        Library.open(library.HERE.parent)


@pytest.mark.parametrize("folder", ["..", "/tmp", "kernels/../../elsewhere", "kernels/oneflow-100", ""])
def test_a_kernel_outside_its_folder_is_never_loaded(library: ModuleType, folder: str) -> None:
    about = json.loads(library.INDEX.read_text())
    about["kernels"]["oneflow-32"]["folder"] = folder
    rewrite(library.INDEX, about)
    with pytest.raises(library.DamagedError, match="malformed at 'kernels.oneflow-32'"):
        library.load("oneflow-32")


@pytest.mark.parametrize("name", [None, 3, [], "", "\0", ("softmax",)])
def test_a_name_that_is_none(library: ModuleType, name: Any) -> None:
    with pytest.raises(library.NoKernelError):
        library.load(name)


@pytest.mark.parametrize("rows", [0, -1, 2.5, None, "4", True, [4], {}])
def test_an_extent_that_is_none(library: ModuleType, rows: Any) -> None:
    with pytest.raises(library.NoKernelError, match="no kernel of softmax for rows="):
        library.find("softmax", rows=rows, cols=32)
    assert library.find("softmax", rows=np.int64(4), cols=32) == "oneflow-32"


def test_a_library_is_opened_by_its_folder_or_its_package(library: ModuleType) -> None:
    for path in (library.HERE.parent, library.HERE):
        opened = Library.open(path)
        assert opened.home == library.HERE and len(opened.bundles) == 3
    (library.HERE / "loader.py").write_text("print('hello')")
    with pytest.raises(BundleError, match="loader.py is not what was built"):
        Library.open(library.HERE)


def test_another_machine_is_refused(library: ModuleType) -> None:
    """load.py's own reasons come as the library's error."""
    folder = library.HERE / "kernels" / "oneflow-32"
    manifest = json.loads((folder / "kernel.json").read_text())
    manifest["target"]["machine"] = "sparc"
    (folder / "kernel.json").write_text(json.dumps({**manifest, "sha256": digest(manifest)}))
    library.index()["kernels"]["oneflow-32"]["files"]["kernel.json"]["sha256"] = sha256(
        (folder / "kernel.json").read_bytes()
    )
    with pytest.raises(library.LoadError, match="oneflow-32: built for sparc"):
        library.load("oneflow-32")


def test_the_package_as_a_program(moved: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "te_kernels_llvm", *words]
        return subprocess.run(command, cwd=moved, capture_output=True, text=True)

    listed = run("--check").stdout.splitlines()
    assert listed[-1].startswith("te-kernels-llvm 3.1 for llvm: 3 kernels, ") and listed[0].startswith("oneflow-32: ")
    file = moved / "te_kernels_llvm" / "kernels" / CONV / "kernel.s"
    file.write_text("")
    assert "kernel.s is not what was built" in run("--check").stderr


def test_the_wheel_is_installed_and_used(
    written: tuple[Path, str], bare: Path, tmp_path: Path, package_tools: None
) -> None:
    index = json.loads((written[0] / "te_kernels_llvm" / "index.json").read_text())
    wheel = build_wheel(Library(written[0], "te_kernels_llvm", index), tmp_path)
    assert wheel.name.startswith("te_kernels_llvm-3.1-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("te_kernels_llvm-3.1.dist-info/METADATA").decode()
    assert f"Requires-Dist: apache-tvm-ffi=={index['versions']['apache-tvm-ffi']}" in metadata
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--disable-pip-version-check", str(wheel)], check=True)
    (installed,) = venv.glob("lib/python*/site-packages")
    results_of(USE, bare, installed, folder=tmp_path)


def test_a_failure_costs_no_other(host: Arch, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    orders = [Order("oneflow-32", host, tmp_path / "a file"), Order("oneflow-64", host, tmp_path / "there")]
    bad, good = collect(orders, 1)
    assert bad.entry is None and "is a file; --out needs a folder" in bad.why and not bad.skipped
    assert good.entry and (tmp_path / "there" / "kernel.so").is_file()


def test_what_is_not_for_the_target_is_skipped(
    host: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("illegal config: too wide")

    monkeypatch.setattr(collecting, "choose", refuse)
    made = collecting.make(Order("oneflow-32", host, tmp_path / "x"))
    assert made == Made("oneflow-32", why="illegal config: too wide", skipped=True)
    monkeypatch.setattr(collecting, "preset", lambda name: Preset(name, "conv3d", {}))
    assert "conv3d is not in this version" in collecting.make(Order("later", host, tmp_path / "x")).why
    export_all.report(made)
    assert capsys.readouterr().out == "oneflow-32: skipped: illegal config: too wide\n"


def test_run_time_fields(host: Arch) -> None:
    softmax = problem_of("softmax", rows=1, cols=8)
    assert run_time_fields(softmax, operator("softmax").schedule("cpu")) == ["rows"]
    assert run_time_fields(softmax, operator("softmax").schedule("auto")) == []
    conv = preset(CONV).problem()
    assert run_time_fields(conv, operator("conv2d_nchw").schedule("cpu")) == []
    ranged = dataclasses.replace(conv, n_from=9)
    assert run_time_fields(ranged, operator("conv2d_nchw").schedule("cpu")) == ["n"]
    assert run_time_fields(ranged, operator("conv2d_nchw").schedule("tma_wgmma_turned")) == []


def test_a_library_is_never_put_over_something_else(host: Arch, tmp_path: Path) -> None:
    taken = tmp_path / "te-kernels-llvm-1.0"
    taken.mkdir()
    check_destination(taken, "te_kernels_llvm")
    (taken / "thesis.txt").write_text("")
    for force in (False, True):
        with pytest.raises(BundleError, match="is there and not a library"):
            write_library(tmp_path, host, "1.0", lambda _: [], force=force)
    (taken / "te_kernels_llvm").mkdir()
    (taken / "te_kernels_llvm" / "index.json").write_text("{}")
    with pytest.raises(BundleError, match="holds a library; .* pass --force"):
        write_library(tmp_path, host, "1.0", lambda _: [])
    with pytest.raises(UsageError, match="is not a version"):
        write_library(tmp_path, host, "../1", lambda _: [])


def test_a_library_of_nothing_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], host: Arch) -> None:
    with pytest.raises(SchedulesError, match="no kernel was built for llvm: too odd"):
        write_library(tmp_path, host, "1.0", lambda _: [Made("a", why="too odd")])
    assert not list(tmp_path.iterdir())


def test_presets_by_pattern() -> None:
    assert export_all.wanted(["oneflow-3?", "tutorial"]) == ["tutorial", "oneflow-32"]
    assert export_all.wanted([]) == list(export_all.presets())
    with pytest.raises(UnknownNameError, match="did you mean 'oneflow-32'"):
        export_all.wanted(["oneflow-33"])


def test_the_code_of_a_library_needs_nothing_of_this_package() -> None:
    import ast

    import schedules.bundle.package as package

    allowed = {*sys.stdlib_module_names, "tvm_ffi"}
    for file in Path(str(package.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source(file.name))):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert str(node.module).split(".")[0] in allowed


def test_times_are_kept_of_what_runs_here_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--keep is for a machine that llvm:x86-64-v3 runs on"):
        export_all.main(["oneflow-32", "--target", "llvm:x86-64-v3", "--keep", str(tmp_path), "--out", str(tmp_path)])
