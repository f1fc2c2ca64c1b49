"""examples/cpp: built with CMake, and run on bundles in a process without Python."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tvm

from schedules.build.builder import build
from schedules.bundle.bundle import write_bundle
from schedules.core.arch import Arch
from schedules.operators.softmax.definition import SoftmaxProblem

SOURCE = Path(__file__).resolve().parents[2] / "examples/cpp"
LIBRARIES = str(Path(tvm.__file__).parent / "lib")
PROBLEM = SoftmaxProblem(rows=5, cols=33, dtype="float32", scale=0.5)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("cmake") or not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no cmake or no C++ compiler; install cmake and g++")
    out = tmp_path_factory.mktemp("cpp")
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(out), f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(out)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return out / "run_softmax"


@pytest.fixture
def bundle(tmp_path: Path, host: Arch) -> Path:
    return write_bundle(build(PROBLEM, host), tmp_path / "bundle").path


def run(program: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"TVM_LIBRARY_PATH": LIBRARIES, **environment}
    return subprocess.run([program, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=60)


def test_runs_any_number_of_rows(program: Path, bundle: Path) -> None:
    for rows, arguments in ((5, ()), (19, (19,))):
        done = run(program, bundle, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{rows} x 33 on cpu: largest relative error"), done.stdout


def test_a_wrong_result_is_noticed(program: Path, bundle: Path) -> None:
    manifest = json.loads((bundle / "kernel.json").read_text())
    manifest["problem"]["scale"] = 0.5001
    (bundle / "kernel.json").write_text(json.dumps(manifest))
    done = run(program, bundle)
    assert done.returncode == 1 and "wrong result" in done.stderr


def test_says_what_is_missing(program: Path, bundle: Path, tmp_path: Path, host: Arch) -> None:
    half = write_bundle(build(SoftmaxProblem(rows=2, cols=8), host), tmp_path / "half").path
    for arguments, environment, text in (
        ((tmp_path,), {}, "is not a bundle"),
        ((half,), {}, "not a plain softmax of float32"),
        ((bundle,), {"TVM_LIBRARY_PATH": str(tmp_path)}, "set TVM_LIBRARY_PATH"),
        ((bundle, "many"), {}, "many is not a number of rows"),
    ):
        done = run(program, *arguments, **environment)
        assert done.returncode == 1 and text in done.stderr, done.stderr
    assert run(program).returncode == 2


@pytest.mark.gpu
def test_runs_on_a_gpu(program: Path, tmp_path: Path, gpu: Arch) -> None:
    spec = importlib.util.find_spec("nvidia")  # libcudart of NVIDIA's wheel, if it is not the system's
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    search = [*(str(root / "cu13/lib") for root in roots), os.environ.get("LD_LIBRARY_PATH", "")]
    folder = write_bundle(build(PROBLEM, gpu), tmp_path / "cuda").path
    done = run(program, folder, 1000, LD_LIBRARY_PATH=os.pathsep.join(search))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1000 x 33 on cuda")
