"""examples/cpp: built with CMake, and run on bundles in a process without Python."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from schedules.build.builder import build
from schedules.bundle.bundle import write_bundle
from schedules.core.arch import Arch, parse_arch
from schedules.core.problem import Problem
from schedules.operators.conv2d_nhwc.definition import NhwcProblem
from schedules.operators.softmax.definition import SoftmaxProblem
from schedules.show.doctor import examine
from tests.bundle.package import fake

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


SMALL: dict[str, Any] = dict(h=6, w=6, ci=32, co=32, kh=3, kw=3, pad=(1, 1), dtype="float16")
CASES = [
    (SoftmaxProblem(rows=3, cols=9000, dtype="float32"), "cuda:sm_90a", "split", 7),
    (SoftmaxProblem(rows=3, cols=9000, dtype="float32"), "rocm:gfx90a", "split", 7),
    (SoftmaxProblem(rows=5, cols=16384, dtype="float16"), "cuda:sm_90a", "cluster", 2),
    (NhwcProblem(n=8, n_from=2, **SMALL), "cuda:sm_90a", "tma_wgmma", 3),
    (NhwcProblem(n=2, **SMALL), "rocm:gfx90a", "mma", None),
]
STATES = {state.target: state for state in examine().targets}


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with launch_cuda, launch_hip and the drivers that they run with."""
    if not shutil.which("g++"):
        pytest.skip("no g++; install it")
    folder = fake.drivers(tmp_path_factory.mktemp("launchers"))
    nvidia = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (nvidia.submodule_search_locations or [])] if nvidia else []
    headers = [str(root / "cu13/include") for root in roots]
    for name, driver, includes in (
        ("launch_cuda", "libcuda.so.1", headers),
        ("launch_hip", "libamdhip64.so", [str(fake.HERE)]),
    ):
        command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", *(f"-isystem{each}" for each in includes)]
        made = [str(SOURCE / f"{name}.cpp"), str(folder / driver), "-o", str(folder / name)]
        done = subprocess.run([*command, *made], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("problem", "target", "schedule", "extent"), CASES, ids=lambda value: str(value)[:24])
def test_launches_what_tvm_launches(
    launchers: Path, tmp_path: Path, problem: Problem, target: str, schedule: str, extent: int | None
) -> None:
    if not STATES[target].build:
        pytest.skip(STATES[target].note)
    built = build(problem, parse_arch(target), schedule)
    folder = write_bundle(built, tmp_path / "bundle").path
    arguments = built.schedule.arguments(problem)
    given = fake.tensors(arguments, built.arch.kind, extent)
    (wanted,) = fake.recorded([(built, given)], tmp_path)
    fills = {}  # the byte that a tensor is full of, by its address; workspaces are not told apart
    for at, (tensor, argument) in enumerate(zip(given, arguments, strict=True)):
        fills[tensor["address"]] = 0 if argument.output else at + 1
        if not argument.output:
            count = np.dtype(argument.dtype).itemsize * math.prod(tensor["shape"])
            (tmp_path / argument.name).write_bytes(bytes([at + 1]) * count)
    program = launchers / ("launch_cuda" if built.arch.kind == "cuda" else "launch_hip")
    environment = {
        "LD_LIBRARY_PATH": str(launchers),
        "FAKE_DRIVER_LOG": str(tmp_path / "log"),
        "FAKE_DRIVER_KERNELS": fake.sizes_text(wanted["sizes"]),
    }
    words = [str(program), str(folder), *(str(tmp_path / argument.name) for argument in arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in fake.noted(tmp_path / "log") if isinstance(line, dict)]
    launches = [line for line in lines if "symbol" in line]
    first = [line["first"] for line in lines if "first" in line]
    assert first == [
        [-1 if isinstance(each, list) or each < 1 << 33 else fills.get(each, 0) for each in launch["arguments"]]
        for launch in wanted["launches"]
    ]
    assert numbered(launches) == numbered(wanted["launches"])
    output, tensor = arguments[-1], given[-1]
    assert (tmp_path / output.name).stat().st_size == np.dtype(output.dtype).itemsize * math.prod(tensor["shape"])
    (tmp_path / arguments[0].name).write_bytes(bytes(1002))
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "has 1002 bytes, needed" in done.stderr
    done = subprocess.run(words, env={**environment, "FAKE_DRIVER_FAIL": "load"}, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def numbered(launches: Sequence[Mapping[str, Any]]) -> list[Any]:
    """`launches` with numbers of their own in place of addresses: this program's memory lies elsewhere."""
    return fake.anonymous(launches, [])


@pytest.mark.gpu
def test_runs_on_a_gpu(program: Path, tmp_path: Path, gpu: Arch) -> None:
    spec = importlib.util.find_spec("nvidia")  # libcudart of NVIDIA's wheel, if it is not the system's
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    search = [*(str(root / "cu13/lib") for root in roots), os.environ.get("LD_LIBRARY_PATH", "")]
    folder = write_bundle(build(PROBLEM, gpu), tmp_path / "cuda").path
    done = run(program, folder, 1000, LD_LIBRARY_PATH=os.pathsep.join(search))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1000 x 33 on cuda")
