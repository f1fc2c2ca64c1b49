"""PyTorch on an AMD GPU that is not there: its version, device properties and driver are faked; launches are noted."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.build.builder import build  # noqa: E402
from schedules.build.toolchain import devices  # noqa: E402
from schedules.build.toolchain.devices import LocalDevice  # noqa: E402
from schedules.bundle.bundle import write_bundle  # noqa: E402
from schedules.core.arch import parse_arch  # noqa: E402
from schedules.core.errors import DeviceError  # noqa: E402
from schedules.operators.softmax.definition import SoftmaxProblem  # noqa: E402
from schedules.show.doctor import examine  # noqa: E402
from schedules.torch import kernels as dispatch  # noqa: E402
from tests.bundle.package import fake  # noqa: E402

STATE = next(state for state in examine().targets if state.target == "rocm:gfx90a")
pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler"),
    pytest.mark.skipif(not STATE.build, reason=STATE.note),
]
GPU = torch.device("cuda", 0)
STREAM = 0x5000


class OnGpu(torch.Tensor):
    """Host memory that says it is an AMD GPU's."""

    def __dlpack_device__(self) -> Any:
        return 10, 0


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> OnGpu:
    return torch.zeros(shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch for ROCm with a gfx90a; what it returns reads the launches."""
    told = SimpleNamespace(name="AMD Instinct MI210", gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(devices, "rocm", lambda: (LocalDevice("rocm", told.name, "gfx90a"),))
    forgotten = dispatch.arch_of.cache_clear, dispatch._kernels.clear
    for forget in forgotten:
        forget()
    with fake.driving("rocm", tmp_path, monkeypatch) as launches:
        yield launches
    for forget in forgotten:
        forget()
    kernels.use_bundles()


def test_kernels_are_built_for_the_gpu_and_launched_on_its_stream(rocm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRIVER_KERNELS", "main_kernel=8,8,8")
    assert str(dispatch.arch_of(GPU)) == "rocm:gfx90a"
    for _ in range(2):  # built, then loaded from the folder of kernels
        kernel = dispatch.kernel_for(SoftmaxProblem(4, 1000, dtype="float32"), GPU)
        x, y = on_gpu(9, 1000), on_gpu(9, 1000)
        kernel(x, y)
        (launched,) = rocm()
        assert set(launched["arguments"]) == {x.data_ptr(), y.data_ptr(), 9} and launched["grid"][0] == 9
        dispatch._kernels.clear()
    with pytest.raises(ValueError, match="x has dtype float16, needed float32"):
        kernel.function(on_gpu(9, 1000, dtype=torch.float16), y)


def test_a_call_like_the_last_one_reads_its_own_tensors(rocm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRIVER_KERNELS", "main_kernel=8,8,8")
    kernel = dispatch.kernel_for(SoftmaxProblem(4, 1000, dtype="float32"), GPU).function
    for rows in (3, 3, 5, 3):
        x, y = on_gpu(rows, 1000), on_gpu(rows, 1000)
        kernel(x, y)
        (launched,) = rocm()
        assert set(launched["arguments"]) == {x.data_ptr(), y.data_ptr(), rows} and launched["stream"] == STREAM
    for wrong, said in (
        (on_gpu(1000, 3).T, "x is not contiguous"),
        (on_gpu(3001)[1:].view(3, 1000), "x does not start at a multiple of 16 bytes"),
        (on_gpu(3, 1000, dtype=torch.int32), "x has dtype int32, needed float32"),
    ):
        with pytest.raises(ValueError, match=said):
            kernel(wrong, y)
    assert not rocm()


def test_workspaces_are_pytorchs(rocm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRIVER_KERNELS", "main_kernel=8,8,8;main_kernel_1=8,8,8,8")
    kernel = dispatch.kernel_for(SoftmaxProblem(4, 2**19, dtype="float32"), GPU)
    (space,) = kernel.workspaces
    shape = [2 if axis == space.runtime_axis else extent for axis, extent in enumerate(space.shape)]
    x, y, memory = on_gpu(2, 2**19), on_gpu(2, 2**19), on_gpu(*shape)
    kernel.function(x, y, memory)
    first, second = rocm()
    assert memory.data_ptr() in first["arguments"] and memory.data_ptr() in second["arguments"]


def test_bundles_with_workspaces_serve(rocm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DRIVER_KERNELS", "main_kernel=8,8,8;main_kernel_1=8,8,8,8")
    problem = SoftmaxProblem(4, 65536, dtype="float32")
    write_bundle(build(problem, parse_arch("rocm:gfx90a"), "split"), tmp_path / "split")
    assert [bundle.path.name for bundle in kernels.use_bundles(tmp_path)] == ["split"]
    kernel = dispatch.kernel_for(problem, GPU)
    assert not kernel.workspaces and kernel.made.endswith("split")
    kernel(on_gpu(3, 65536), on_gpu(3, 65536))
    assert [each["symbol"] for each in rocm()] == ["main_kernel", "main_kernel_1"]


def test_a_gpu_without_kernels_is_named(rocm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(name="an old one", gcnArchName="gfx803")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    with pytest.raises(DeviceError, match=r"no kernels for cuda:0 \(gfx803\)"):
        dispatch.arch_of(GPU)
