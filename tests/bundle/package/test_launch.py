"""Launches as data, by a driver that is not there, beside what TVM's host code launches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from schedules.build.builder import Built, build
from schedules.build.toolchain import cuda
from schedules.bundle.bundle import source
from schedules.bundle.package.launch import value
from schedules.core.arch import parse_arch
from schedules.core.registry import operator
from tests.bare import bare_folder, clean_python
from tests.bundle.package import fake

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")

CUDA, ROCM = "cuda:sm_90a", "rocm:gfx90a"
SMALL = "n=2 h=6 w=6 ci=32 co=32 kh=3 kw=3 pad=1"
# operator, fields, target, schedule (None: that which is chosen), another extent at run time
CASES = [
    ("softmax", "rows=5 cols=1000 dtype=float16", CUDA, None, 12),
    ("softmax", "rows=3 cols=9000 dtype=float32", CUDA, "split", 7),
    ("softmax", "rows=3 cols=9000 dtype=float32", ROCM, "split", 7),
    ("softmax", "rows=3 cols=100000 dtype=float16 keep=0.9", CUDA, "parts", 4),
    ("softmax", "rows=5 cols=16384 dtype=bfloat16", CUDA, "cluster", 9),
    ("softmax", "rows=5 cols=1000 dtype=bfloat16", ROCM, None, 1),
    ("conv2d_nchw", f"{SMALL} dtype=float16 bias=true", CUDA, "tma_wgmma_turned", None),
    ("conv2d_nchw32", SMALL.replace("n=2", "n=8"), CUDA, None, None),
    ("conv2d_nhwc", f"{SMALL} dtype=float16".replace("n=2", "n=8 n_from=2"), CUDA, "tma_wgmma", 3),
    ("conv2d_nhwc", f"{SMALL} dtype=float32", CUDA, None, None),
    ("conv2d_nhwc", f"{SMALL} dtype=float16", ROCM, "mma", None),
    ("conv2d_hwcn", f"{SMALL} dtype=float32", ROCM, None, None),
    ("conv2d_nchw32", SMALL, ROCM, None, None),
]


def built_as(name: str, fields: str, target: str, schedule: str | None) -> Built:
    problem = operator(name).problem.parse(dict(word.split("=") for word in fields.split()))
    return build(problem, parse_arch(target), schedule, device_code=not target.startswith("cuda"))


LOAD = """
import ctypes, json, os, sys
names = {"__name__": "launch"}
exec(open(sys.argv[1]).read(), names)
fake = {"__name__": "fake"}
exec(open(sys.argv[2]).read(), fake)
Fake = fake["FakeTensor"]
cases = json.load(open(sys.argv[3]))
def loaded(case, code=b"\\x7fELF" + bytes(4) + b"\\4" + bytes(60)):
    os.environ["FAKE_DRIVER_KERNELS"] = case["sizes"]
    return names["Launcher"](case["kind"], case["built_for"], code, case["launches"], case["arguments"])
"""
RUN = """
for case in cases:
    launcher = loaded(case)
    for _ in range(2):
        launcher(*[Fake(**tensor) for tensor in case["tensors"]])
    del launcher
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake.drivers(tmp_path_factory.mktemp("drivers"))


@pytest.fixture(scope="module")
def cases() -> list[tuple[Built, list[dict[str, Any]]]]:
    made = []
    for *words, extent in CASES:
        built = built_as(*words)
        given = fake.tensors(built.schedule.arguments(built.problem), built.arch.kind, extent)
        made.append((built, given))
    return made


@pytest.fixture(scope="module")
def recorded(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What TVM launches."""
    return fake.recorded(cases, tmp_path_factory.mktemp("recorded"))


def told(built: Built, given: list[dict[str, Any]], sizes: dict[str, list[int]]) -> dict[str, Any]:
    """A case for RUN."""
    arguments = [
        {"name": a.name, "shape": a.shape, "dtype": a.dtype, "runtime_axis": a.runtime_axis}
        | ({"ranged_axis": a.ranged_axis, "least": a.least} if a.ranged_axis is not None else {})
        for a in built.schedule.arguments(built.problem)
    ]
    what = {"kind": built.arch.kind, "built_for": str(built.arch), "launches": built.launches, "arguments": arguments}
    return {**what, "tensors": list(given), "sizes": fake.sizes_text(sizes)}


def run(
    drivers: Path, folder: Path, cases: list[dict[str, Any]], code: str = RUN, *words: Path, **environment: str
) -> Any:
    (folder / "launch.py").write_text(fake.standing_alone(source("launch.py")))
    (folder / "tensor.py").write_text(fake.standing_alone((fake.HERE / "tensor.py").read_text()))
    (folder / "cases.json").write_text(json.dumps(cases))
    files = [folder / name for name in ("launch.py", "tensor.py", "cases.json")]
    paths = {"LD_LIBRARY_PATH": str(drivers), "FAKE_DRIVER_LOG": str(folder / "log")}
    return clean_python(LOAD + code, *files, *words, **paths, **environment)


def test_the_driver_launches_what_tvm_launches(
    drivers: Path, cases: Any, recorded: list[dict[str, Any]], tmp_path: Path
) -> None:
    every = [told(built, given, each["sizes"]) for (built, given), each in zip(cases, recorded, strict=True)]
    for case, (built, given), wanted in zip(every, cases, recorded, strict=True):
        done = run(drivers, tmp_path, [case])
        assert done.returncode == 0, (str(built.problem), done.stderr)
        lines = fake.noted(tmp_path / "log")
        launches = [line for line in lines if "symbol" in line]
        twice = wanted["launches"] * 2
        assert wanted["launches"] and fake.anonymous(launches, given) == fake.anonymous(twice, given), str(built)
        sizes = {"rows": given[0]["shape"][0]}
        bytes_of = [-(-value(each["bytes"], sizes) // 256) * 256 for each in built.launches["workspaces"]]
        assert [line["allocated"] for line in lines if "allocated" in line] == ([sum(bytes_of)] if bytes_of else [])


def test_cases_have_all_that_launches_can_have(cases: Any) -> None:
    kernels = [kernel for built, _ in cases for kernel in built.launches["kernels"]]
    assert any(kernel["dependent"] for kernel in kernels) and any(kernel["cluster"] != [1, 1, 1] for kernel in kernels)
    assert any(kernel["shared"] > 48 << 10 for kernel in kernels) and any(b.launches["maps"] for b, _ in cases)
    assert {len(built.launches["kernels"]) for built, _ in cases} == {1, 2}
    assert any(built.launches["sizes"] == {"n": ["data", 0]} for built, _ in cases)


SPLIT = 1, 2  # of CASES: with a workspace, for CUDA and ROCm


@pytest.fixture(params=SPLIT, ids=["cuda", "rocm"])
def split(request: pytest.FixtureRequest, cases: Any, recorded: list[dict[str, Any]]) -> dict[str, Any]:
    (built, given), each = cases[request.param], recorded[request.param]
    return told(built, given, each["sizes"])


def test_a_workspace_grows_and_lives_as_long_as_the_kernel(
    drivers: Path, split: dict[str, Any], tmp_path: Path
) -> None:
    """Smaller ones that a graph may have captured stay where they are."""
    code = """
launcher = loaded(cases[0])
for rows in (3, 2, 9, 3):
    launcher(*[Fake(**{**tensor, "shape": [rows, *tensor["shape"][1:]]}) for tensor in cases[0]["tensors"]])
del launcher
"""
    done = run(drivers, tmp_path, [split], code)
    assert done.returncode == 0, done.stderr
    lines = fake.noted(tmp_path / "log")
    bytes_of = [value(split["launches"]["workspaces"][0]["bytes"], {"rows": rows}) for rows in (3, 9)]
    bytes_of = [-(-each // 256) * 256 for each in bytes_of]
    assert [line["allocated"] for line in lines if "allocated" in line] == bytes_of
    assert lines[-3:] == ["freed", "freed", "unloaded"]
    launches = [line for line in lines if "symbol" in line]
    used = [line["arguments"][0] for line in launches if line["symbol"] == "main_kernel"]
    assert used[0] == used[1] != used[2] == used[3]


def test_every_captured_graph_has_a_workspace_of_its_own(drivers: Path, split: dict[str, Any], tmp_path: Path) -> None:
    code = """
launcher = loaded(cases[0])
for graph in ("7", "8", "7", ""):
    os.environ["FAKE_DRIVER_CAPTURE"] = graph
    launcher(*[Fake(**tensor) for tensor in cases[0]["tensors"]])
os.environ["FAKE_DRIVER_CAPTURE"] = "9"
del launcher
"""
    done = run(drivers, tmp_path, [split], code)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = fake.noted(tmp_path / "log")
    assert lines.count("freed") == 3
    lines = [line for line in lines if isinstance(line, dict)]
    used = [line["arguments"][0] for line in lines if line.get("symbol") == "main_kernel"]
    assert used[0] == used[2] and len(set(used)) == 3 == sum("allocated" in line for line in lines)


def test_it_runs_on_the_stream_that_tvms_ffi_uses(drivers: Path, split: dict[str, Any], tmp_path: Path) -> None:
    code = """
launcher = loaded(cases[0])
def call(index=0):
    launcher(*[Fake(**{**tensor, "index": index}) for tensor in cases[0]["tensors"]])
call()
sys.path.insert(0, sys.argv[4])
import tvm_ffi
with tvm_ffi.use_raw_stream(tvm_ffi.device(f"{cases[0]['kind']}:1"), 0x7000):
    call()
    call(1)
call(1)
"""
    done = run(drivers, tmp_path, [split], code, bare_folder(tmp_path))
    assert done.returncode == 0, done.stderr
    launches = [line for line in fake.noted(tmp_path / "log") if "symbol" in line]
    places = [(0, 0), (0, 0), (1, 0x7000), (1, 0)]
    assert [(line["device"], line["stream"]) for line in launches] == [each for each in places for _ in range(2)]


def test_threads_on_one_stream_share_a_workspace_in_turn(drivers: Path, split: dict[str, Any], tmp_path: Path) -> None:
    code = """
import threading
sys.setswitchinterval(1e-6)
launcher = loaded(cases[0])
def call(rows):
    given = [Fake(**{**tensor, "shape": [rows, *tensor["shape"][1:]]}) for tensor in cases[0]["tensors"]]
    for _ in range(40):
        launcher(*given)
threads = [threading.Thread(target=call, args=(rows,)) for rows in (3, 4, 5, 6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = run(drivers, tmp_path, [split], code)
    assert done.returncode == 0 and not done.stderr, done.stderr
    launches = [line for line in fake.noted(tmp_path / "log") if "symbol" in line]
    pairs = list(zip(launches[::2], launches[1::2], strict=True))
    assert len(pairs) == 160
    for first, second in pairs:
        assert (first["symbol"], second["symbol"]) == ("main_kernel", "main_kernel_1")
        assert first["arguments"][-1] == second["arguments"][-1] and first["arguments"][0] in second["arguments"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float16"}, "ArgumentError: x has dtype float16, needed float32"),
        ({"shape": [7, 9001]}, r"ArgumentError: x has shape (7, 9001), needed (7, 9000)"),
        ({"shape": [0, 9000]}, "ArgumentError: x has shape (0, 9000), needed 1 to"),
        ({"shape": [63000]}, "ArgumentError: x has shape (63000,), needed"),
        ({"strides": [1, 7]}, "ArgumentError: x is not contiguous; copy it first"),
        ({"address": 1 << 36 | 8}, "ArgumentError: x does not start at a multiple of 16 bytes; copy it first"),
        ({"place": 1}, "ArgumentError: x does not lie on a"),
        ({"index": 1}, "ArgumentError: tensors lie on devices 1 and 0; move them to one"),
    ],
)
def test_tensors_that_do_not_fit_launch_nothing(
    drivers: Path, split: dict[str, Any], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    split["tensors"][0] = {**split["tensors"][0], **change}
    done = run(drivers, tmp_path, [split])
    assert done.returncode == 1 and done.stderr.splitlines()[-1].removeprefix("launch.").startswith(said), done.stderr
    assert not [line for line in fake.noted(tmp_path / "log") if "symbol" in line]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("loaded(cases[0])(1, 2)", "ArgumentError: x is a int, needed a tensor: of PyTorch, or by DLPack"),
        ("loaded(cases[0])(1)", "ArgumentError: 1 tensors given, 2 needed: x, y"),
        ("os.environ['FAKE_DRIVER_FAIL'] = 'init'; loaded(cases[0])", "LoadError: no "),
        ("os.environ['FAKE_DRIVER_FAIL'] = 'load'; loaded(cases[0])", "(209: no kernel image); device 0 takes no code"),
        ("loaded(cases[0], b'cut' + bytes(40))", "(200: no kernel image); device 0 takes no code"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    drivers: Path, split: dict[str, Any], tmp_path: Path, code: str, said: str
) -> None:
    done = run(drivers, tmp_path, [split], code)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1], done.stderr


def test_without_a_driver_it_is_said_what_to_install(split: dict[str, Any], tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path, [split], "loaded(cases[0])")
    last = done.stderr.splitlines()[-1].removeprefix("launch.")
    if split["kind"] == "rocm" or not cuda.driver_present():
        assert last.startswith("LoadError: lib") and "; install " in last


def test_the_library_of_rocm_from_pip_serves(
    drivers: Path, cases: Any, recorded: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Its wheels have no link of a name without version, and are no place that the linker knows."""
    lib = tmp_path / "_rocm_sdk_core" / "lib"
    lib.mkdir(parents=True)
    (lib.parent / "__init__.py").touch()
    (lib / "libamdhip64.so.10").symlink_to(drivers / "libamdhip64.so")
    (built, given), each = cases[SPLIT[1]], recorded[SPLIT[1]]
    case = told(built, given, each["sizes"])
    done = run(tmp_path, tmp_path, [case], "sys.path.append(os.environ['PIP'])\n" + RUN, PIP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line for line in fake.noted(tmp_path / "log") if "symbol" in line]


def test_arrays_of_the_cuda_array_interface_are_taken(drivers: Path, split: dict[str, Any], tmp_path: Path) -> None:
    code = """
class Array:
    def __init__(self, address, shape, typestr="<f4", strides=None, **_):
        self.__cuda_array_interface__ = dict(
            shape=tuple(shape), typestr=typestr, data=(address, False), strides=strides, version=3
        )
launcher = loaded(cases[0])
launcher(*[Array(**tensor) for tensor in cases[0]["tensors"]])
launcher(*[Array(**tensor, strides=(4, 28)) for tensor in cases[0]["tensors"]])
"""
    done = run(drivers, tmp_path, [split], code)
    assert done.stderr.splitlines()[-1] == "launch.ArgumentError: x is not contiguous; copy it first"
    assert len([line for line in fake.noted(tmp_path / "log") if "symbol" in line]) == 2


FORMULA = ["+", ["max", ["/", "n", 3], 2], ["%", ["-", ["*", "n", 4], ["min", "n", 5]], 7]]


def test_formulas() -> None:
    assert [value(FORMULA, {"n": n}) for n in (1, 7, 100)] == [2 + 3, 2 + 23 % 7, 33 + 395 % 7]
    with pytest.raises(KeyError):
        value(["**", 2, 3], {})
    with pytest.raises(ValueError):
        value([2, 3], {})
