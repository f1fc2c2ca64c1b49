"""load.py: a bundle in a process that has tvm_ffi and TVM's runtime library, an empty PATH, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from schedules.build.builder import build
from schedules.build.toolchain import cuda, devices
from schedules.build.toolchain.stub_elf import shared_library
from schedules.bundle.bundle import Bundle, write_bundle
from schedules.bundle.package import launch, loader
from schedules.core.arch import parse_arch
from schedules.core.cpu import cpu_features
from schedules.operators.conv2d_hwcn.definition import HwcnProblem, reference
from schedules.show.doctor import examine
from tests.bare import bare_folder, clean_python, runtime_libraries
from tests.bundle.hostile import mutants
from tests.bundle.package import fake

PROBLEM = HwcnProblem(n=8, h=5, w=4, ci=3, co=6, kh=3, kw=3, pad=(1, 1))
STATES = {state.target: state for state in examine().targets}
needs_cuda = pytest.mark.skipif(not STATES["cuda:sm_90a"].build, reason=STATES["cuda:sm_90a"].note)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(build(PROBLEM, parse_arch("llvm")), tmp_path_factory.mktemp("written") / "bundle").path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A bundle of the test's own."""
    return Path(shutil.copytree(written, tmp_path / "bundle"))


@pytest.fixture(scope="module")
def cuda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(build(PROBLEM, parse_arch("cuda:sm_90a")), tmp_path_factory.mktemp("cuda") / "bundle").path


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(a.shape).astype(a.dtype) for a in PROBLEM.arguments()]
    made[-1][...] = np.nan
    return made


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_folder(tmp_path_factory.mktemp("bare"))


PROLOGUE = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
assert importlib.util.find_spec("tvm") is None and importlib.util.find_spec("schedules") is None
spec = importlib.util.spec_from_file_location("load", sys.argv[2] + "/load.py")
load = importlib.util.module_from_spec(spec)
spec.loader.exec_module(load)
"""


def clean_run(code: str, bare: Path, bundle: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return clean_python(PROLOGUE + code, bare, bundle, **environment)


@pytest.mark.parametrize("offset", [0, 4, 16])
def test_llvm_bundle_runs_in_a_clean_process(folder: Path, bare: Path, tmp_path: Path, offset: int) -> None:
    """On arrays that start `offset` bytes past a multiple of 64: NumPy's own promise 16."""
    data, weight, out = arrays()
    np.savez(tmp_path / "arrays.npz", data=data, weight=weight, out=out)
    code = f"""
import numpy as np
def shifted(array):
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + {offset}
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
given = np.load({str(tmp_path / "arrays.npz")!r})
data, weight, out = (shifted(given[name]) for name in ("data", "weight", "out"))
load.load()(data, weight, out)
np.save({str(tmp_path / "out.npy")!r}, out)
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
    library = folder / "kernel.so"
    library.write_bytes(library.read_bytes()[:-100])
    done = clean_run("load.load()", bare, folder, TVM_LIBRARY_PATH=runtime_libraries())
    assert "kernel.so is not what was built" in done.stderr.strip().splitlines()[-1]


@pytest.mark.skipif(cpu_features() is None, reason="this system does not list its CPU's features")
def test_clean_process_refuses_another_cpu(folder: Path, bare: Path) -> None:
    rewrite(folder, target={"cpu_features": ["avx4096"]})
    done = clean_run("load.load()", bare, folder, TVM_LIBRARY_PATH=runtime_libraries())
    assert "this one lacks avx4096" in done.stderr.strip().splitlines()[-1]


def test_load_py_as_a_script_says_what_the_kernel_is(folder: Path) -> None:
    done = subprocess.run([sys.executable, str(folder / "load.py")], env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "schedule cpu, built for llvm",
        "in  data float32 5 4 3 8",
        "in  filter float32 3 3 3 6",
        "out output float32 5 4 6 8",
    ]


def run_as_a_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(folder / "load.py"), *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda folder: (folder / "kernel.json").unlink(), 2, "it has no kernel.json"),
        (lambda folder: (folder / "kernel.json").write_text("[" * 10_000), 2, "cannot be read"),
        (lambda folder: (folder / "kernel.so").unlink(), 2, "kernel.so cannot be read"),
        (lambda folder: (folder / "kernel.so").write_bytes(b""), 2, "kernel.so is not what was built"),
        (lambda folder: rewrite(folder, target={"machine": "sparc"}), 1, "built for sparc"),
    ],
)
def test_a_damaged_bundle_as_a_script(folder: Path, spoil: Callable[[Path], object], code: int, said: str) -> None:
    spoil(folder)
    done = run_as_a_script(folder)
    assert done.returncode == code and said in done.stderr
    assert done.stderr.startswith("load.py: error: ") and len(done.stderr.splitlines()) == 1


def test_a_script_that_is_called_wrongly(folder: Path) -> None:
    done = run_as_a_script(folder, "--help me")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_the_script_with_one_line(folder: Path) -> None:
    """While it loads, at once and a little later."""
    wait = "import time; time.sleep(30)"
    (folder / "tvm_ffi.py").write_text(f"open({str(folder / 'loading')!r}, 'w').close()\n{wait}")
    with subprocess.Popen([sys.executable, str(folder / "load.py")], stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "loading").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130 and process.stderr and process.stderr.read() == "load.py: interrupted\n"


def rewrite(folder: Path, **changes: Any) -> None:
    """With fields changed, of an object inside too, and the checksum made anew."""
    manifest = json.loads((folder / "kernel.json").read_text())
    for name, value in changes.items():
        manifest[name] = {**manifest[name], **value} if isinstance(value, dict) else value
    (folder / "kernel.json").write_text(json.dumps({**manifest, "sha256": loader.digest(manifest)}))


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("at", "spoil", "reason"),
    [
        (0, lambda x: None, "Mismatched type on argument #0"),
        (0, lambda x: x.tolist(), "argument #0"),
        (0, lambda x: "x", "argument #0"),
        (0, lambda x: x[..., :-1].copy(), "argument #0 .* expected"),
        (0, lambda x: x.astype("float64"), "dtype .*expected float32"),
        (0, lambda x: np.asfortranarray(x), "argument #0 .*expected"),
        (0, lambda x: x[::-1], "argument #0 .*expected"),
        (0, lambda x: x.astype(ml_dtypes.bfloat16), "as a tensor of PyTorch or TVM"),
        (0, read_only, "pass what can be written"),
        (2, read_only, "pass what can be written"),
    ],
)
def test_wrong_tensors_raise_before_anything_runs(
    written: Path, at: int, spoil: Callable[[Any], Any], reason: str
) -> None:
    tensors: list[Any] = arrays()
    out = tensors[-1]
    tensors[at] = spoil(tensors[at])
    with pytest.raises(loader.ArgumentError, match=reason) as caught:
        loader.load(written)(*tensors)
    assert np.isnan(out).all() and str(caught.value).isprintable()


def test_too_few_tensors(written: Path) -> None:
    with pytest.raises(loader.ArgumentError, match="Expected 3 arguments"):
        loader.load(written)(*arrays()[1:])


def test_a_misaligned_tensor_of_a_gpu_is_refused() -> None:
    class OnGpu:
        def data_ptr(self) -> int:
            return 1028

    kernel = loader.Kernel("k", "softmax", {}, "warp", {}, ({"name": "x"},), {"kind": "cuda"}, pytest.fail)
    with pytest.raises(loader.ArgumentError, match="x does not start at a multiple of 16 bytes"):
        kernel(OnGpu())


def test_what_fails_as_it_runs_is_one_line() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA: out of\n  memory")

    kernel = loader.Kernel("k", "softmax", {}, "warp", {}, (), {"kind": "cuda"}, fail)
    with pytest.raises(loader.KernelError, match="k failed: CUDA: out of memory"):
        kernel()


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
    main(*[tvm_ffi.from_dlpack(OnGpu(argument["shape"])) for argument in load.manifest()["arguments"]])
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
    last = done.stderr.strip().splitlines()[-1]
    assert "LoadError: libcuda.so.1 does not load" in last and "install NVIDIA's driver" in last


@needs_cuda
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_cuda_bundle_runs_by_the_driver_where_tvm_is_not(cuda_folder: Path, bare: Path, tmp_path: Path) -> None:
    fake.drivers(tmp_path)
    code = """
import importlib.util
spec = importlib.util.spec_from_file_location("tensor", sys.argv[3])
tensor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tensor)
kernel = load.load()
kernel(*[tensor.FakeTensor(n + 1 << 36, a["shape"], a["dtype"], 2) for n, a in enumerate(kernel.arguments)])
try:
    kernel(*[tensor.FakeTensor(16, a["shape"], "float16", 2) for a in kernel.arguments])
except load.ArgumentError as error:
    print(error)
"""
    done = clean_python(
        PROLOGUE + code,
        bare,
        cuda_folder,
        fake.HERE / "tensor.py",
        LD_LIBRARY_PATH=str(tmp_path),
        FAKE_DRIVER_LOG=str(tmp_path / "log"),
        FAKE_DRIVER_KERNELS="main_kernel=8,8,8",
    )
    assert (done.returncode, done.stdout) == (0, "data has dtype float16, needed float32\n"), done.stderr
    (launched,) = [line for line in fake.noted(tmp_path / "log") if "symbol" in line]
    assert set(launched["arguments"]) == {1 << 36, 2 << 36, 3 << 36}


LAUNCHES = {
    "sizes": {"rows": ["x", 0]},
    "workspaces": [{"name": "partials", "bytes": ["*", "rows", 784]}],
    "maps": {
        "a_map": {
            **{"buffer": "x", "type": 6, "dims": [8, "rows"], "strides": [16], "box": [8, 1]},
            **{"element_strides": [1, 1], "interleave": 0, "swizzle": 0, "promotion": 0, "fill": 0},
        }
    },
    "kernels": [
        {
            **{"symbol": "main_kernel", "grid": [["*", "rows", 98], 1, 1], "block": [256, 1, 1], "cluster": [1, 1, 1]},
            **{"shared": 0, "dependent": False, "cooperative": False},
            "arguments": [{"buffer": "partials"}, {"map": "a_map"}, {"value": "rows", "dtype": "int64"}],
        }
    ],
}


def test_hostile_launches_are_one_line(folder: Path) -> None:
    """Any value at any place is refused, or is one that can be launched."""
    file = folder / "kernel.json"
    manifest = json.loads(file.read_text())
    manifest["target"]["kind"], manifest["files"]["kernel.cubin"] = "cuda", "0" * 64
    manifest["arguments"] = [{"name": "x", "shape": [5, 8], "dtype": "float32", "output": True, "runtime_axis": 0}]
    refused = 0
    for at, mutant in [((), LAUNCHES), *mutants(LAUNCHES)]:
        changed = {**manifest, "launches": mutant}
        try:
            file.write_text(json.dumps({**changed, "sha256": loader.digest(changed)}))
            launches = loader.manifest(folder)["launches"]
        except loader.DamagedError as error:
            refused += 1
            assert str(error).isprintable() and at, at
            continue
        except (ValueError, RecursionError):  # no JSON has it
            continue
        launch.plan(launches, ["x"], {name: 3 for name in launches["sizes"]})
    assert refused > 300


@pytest.mark.gpu
@pytest.mark.skipif(not devices.cuda(), reason="no CUDA GPU here")
def test_cuda_bundle_runs_on_its_gpu(bare: Path, tmp_path: Path) -> None:
    import tvm

    arch = devices.cuda()[0].newest_arch()
    if arch is None:
        pytest.skip(f"no target for compute capability {devices.cuda()[0].capability}")
    written = write_bundle(build(PROBLEM, arch), tmp_path / "bundle")
    data, weight, out = arrays()
    tensors = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in (data, weight, out)]
    Bundle.open(written.path).load()(*tensors)
    wanted = reference(PROBLEM, [data, weight])[0].values
    np.testing.assert_allclose(tensors[-1].numpy(), wanted, rtol=1e-4, atol=1e-4)
    done = clean_run(
        "load.load()",
        bare,
        written.path,
        TVM_LIBRARY_PATH=runtime_libraries(),
        LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""),
    )
    assert done.returncode == 0, done.stderr
