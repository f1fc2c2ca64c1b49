"""PyTorch on an NVIDIA GPU that is not there: its properties and its driver are faked; launches are noted."""

from __future__ import annotations

import functools
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from schedules.bundle.package import launch  # noqa: E402
from schedules.core.errors import ArgumentError  # noqa: E402
from schedules.core.registry import operator  # noqa: E402
from schedules.operators.softmax.definition import SoftmaxProblem  # noqa: E402
from schedules.store import kernels as store  # noqa: E402
from schedules.torch import kernels as dispatch  # noqa: E402
from tests.bundle.package import fake  # noqa: E402

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler")
GPU = torch.device("cuda", 0)
CONVOLUTION = operator("conv2d_nhwc").problem(n=8, h=14, w=14, ci=64, co=64, kh=3, kw=3, pad=1, dtype="float16")
SOFTMAX = SoftmaxProblem(4, 1000, dtype="float32")
SPLIT = SoftmaxProblem(4, 2**21, dtype="float32")


class OnGpu(torch.Tensor):
    """Host memory that says it is the current GPU's."""

    def __dlpack_device__(self) -> Any:
        return 2, torch._C._cuda_getDevice()


def on_gpu(shape: Any, dtype: Any = torch.float32, strides: Any = None) -> Any:
    made = torch.zeros(shape, dtype=dtype)
    return (torch.empty_strided(shape, strides, dtype=dtype) if strides else made).as_subclass(OnGpu)


@pytest.fixture(params=["machine code", "Python"])
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_compiler: None, request: pytest.FixtureRequest) -> Any:
    """PyTorch with two H200s, and what launches; what it returns reads the launches."""
    if request.param == "Python":
        monkeypatch.setattr(store, "_native", lambda disk: None)
    told = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    current = threading.local()

    class Device:
        def __init__(self, index: int) -> None:
            self.index, self.before = index, torch._C._cuda_getDevice()

        def __enter__(self) -> None:
            current.index = self.index

        def __exit__(self, *error: Any) -> None:
            current.index = self.before

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: told.name)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: getattr(current, "index", 0), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x5000 + index, raising=False)
    monkeypatch.setattr(dispatch, "_maker", lambda _, *kind: functools.partial(on_gpu, *kind))
    monkeypatch.setattr(dispatch, "_kernels", {})
    dispatch.arch_of.cache_clear()
    with fake.driving("cuda", tmp_path, monkeypatch) as launches:
        yield launches
    dispatch.arch_of.cache_clear()


def made(problem: Any, device: Any, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The kernel, and its launch with one output."""
    kernel = dispatch.kernel_for(problem, device)
    assert (kernel.function.native is None) == (store._native.__name__ == "<lambda>")
    sizes = {}
    for each in kernel.function.launches["kernels"]:
        sizes[each["symbol"]] = [128 if "map" in passed else 8 for passed in each["arguments"]]
    patch.setenv("FAKE_DRIVER_KERNELS", fake.sizes_text(sizes))
    result = problem.arguments()[-1]
    return kernel, kernel.launch(device, (result.shape, dispatch.DTYPES[result.dtype]))


def images() -> tuple[Any, Any]:
    return on_gpu((8, 14, 14, 64), torch.float16), on_gpu((64, 3, 3, 64), torch.float16)


def mapped(launched: dict[str, Any]) -> set[int]:
    """The addresses that the tensor maps of a launch have."""
    return {passed[0] for passed in launched["arguments"] if isinstance(passed, list)}


def test_a_tensor_map_is_of_the_tensor_that_is_given(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of addresses in any order, more of them than are remembered, also of memory that was freed and given again."""
    monkeypatch.setattr(launch, "CALLS", 3)
    encoded: list[str] = []
    call = launch.Driver.__call__
    monkeypatch.setattr(launch.Driver, "__call__", lambda self, name, *a: encoded.append(name) or call(self, name, *a))
    kernel, run = made(CONVOLUTION, GPU, monkeypatch)
    assert kernel.made.startswith("tma_wgmma") and kernel.function.launches["maps"]
    several, weight = [images()[0] for _ in range(5)], images()[1]
    for number in (0, 1, 0, 0, 2, 3, 4, 0, 1, 1):
        x = several[number]
        y = run(x, weight)
        (launched,) = cuda()
        assert launched["stream"] == 0x5000 and launched["device"] == 0
        assert {x.data_ptr(), weight.data_ptr()} <= mapped(launched) <= {x.data_ptr(), weight.data_ptr(), y.data_ptr()}
    encoded.clear()
    y = run(several[1], weight)
    del y
    run(several[1], weight)
    assert encoded.count("encode") <= 2, "of outputs alone"


def test_a_call_like_others_passes_its_own_addresses(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = made(SOFTMAX, GPU, monkeypatch)
    kept = [on_gpu((4, 1000)) for _ in range(3)]
    for x in (*kept, *kept):
        y = run(x)
        (launched,) = cuda()
        assert set(launched["arguments"]) == {x.data_ptr(), y.data_ptr(), 4}
    odd = on_gpu(4001)[1:].view(4, 1000)
    y = run(odd)  # a copy of it
    (launched,) = cuda()
    assert odd.data_ptr() not in launched["arguments"] and y.data_ptr() in launched["arguments"]
    assert not any(number % launch.VECTOR_BYTES for number in launched["arguments"] if number > 4)


def test_workspaces_are_pytorchs(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has new ones, whatever stream and graph it is for, and gives them back, also where it fails."""
    lent: list[tuple[int, int]] = []
    given_back: list[int] = []

    def take(size: int, stream: int) -> int:
        lent.append((size, stream))
        return 0x7000_0000 + 0x10_0000 * len(lent)

    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", take, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", given_back.append, raising=False)
    kernel, run = made(SPLIT, GPU, monkeypatch)
    (memory,) = kernel.memory(torch.device("cpu"), 4)
    assert memory.shape == (2, 4, kernel.workspaces[0].shape[2]) and memory.dtype is torch.float32
    x = on_gpu((4, 2**21))
    run(x)  # the first looks at tensors
    cuda()
    for _ in range(2):
        y = run(x)
        first, second = ({*launched["arguments"]} for launched in cuda())
        space = 0x7000_0000 + 0x10_0000 * len(lent)
        assert {x.data_ptr(), space} <= first and {space, y.data_ptr()} <= second
    size = -(-memory.numel() * 4 // launch.ALIGNED) * launch.ALIGNED
    assert {*lent} == {(size, 0x5000)} and len(given_back) == len({*given_back}) == len(lent)
    passed: list[int] = []
    two = [((3,), torch.float32), ((4,), torch.int8)]
    dispatch._lent(lambda stream, *addresses: passed.extend(addresses) or 0, two)(0, 16)  # type: ignore[func-returns-value]
    assert passed == [16, given_back[-1], given_back[-1] + launch.ALIGNED] and lent[-1] == (2 * launch.ALIGNED, 0)

    def failing(*_: int) -> int:
        raise ArgumentError("no")

    with pytest.raises(ArgumentError):
        dispatch._lent(failing, [((3,), torch.float32)])(0)
    assert len(given_back) == len(lent)


def test_views_need_not_be_made(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels last, as PyTorch has them, are the same memory."""
    _, run = made(CONVOLUTION, GPU, monkeypatch)
    like = run(*images()).permute(0, 3, 1, 2)
    cuda()
    x, weight = (tensor.permute(0, 3, 1, 2) for tensor in images())
    y = run.making(like)(x, weight)
    assert (y.shape, y.stride(), y.dtype) == (like.shape, like.stride(), like.dtype)
    (launched,) = cuda()
    assert {x.data_ptr(), weight.data_ptr()} <= mapped(launched)
    passed = {each for each in launched["arguments"] if isinstance(each, int)} | mapped(launched)
    assert y.data_ptr() in passed


def test_another_device_is_made_the_current_one(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.device("cuda", 1)
    _, here = made(SOFTMAX, GPU, monkeypatch)
    with torch.cuda.device(1):
        _, there = made(SOFTMAX, other, monkeypatch)
    x = on_gpu((4, 1000))
    for run, place in ((here, 0), (there, 1), (here, 0)):
        run(x)
        (launched,) = cuda()
        assert (launched["device"], launched["stream"]) == (place, 0x5000 + place)
        assert torch._C._cuda_getDevice() == 0


def test_threads_do_not_mix_their_calls(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """New threads have no device of the driver's yet."""
    _, run = made(CONVOLUTION, GPU, monkeypatch)
    monkeypatch.setattr(sys, "setswitchinterval", sys.setswitchinterval)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            given = list(threads.map(lambda _: images(), range(4)))
            made_by = list(threads.map(lambda pair: [run(*pair) for _ in range(40)], given))
    finally:
        sys.setswitchinterval(before)
    launches = cuda()
    pairs = [{x.data_ptr(), weight.data_ptr()} for x, weight in given]
    assert len(launches) == 160 == sum(map(len, made_by))
    for launched in launches:
        assert sum(pair <= mapped(launched) for pair in pairs) == 1
    for pair in pairs:
        assert sum(pair <= mapped(launched) for launched in launches) == 40


def test_tensors_that_do_not_fit_are_named(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = made(SOFTMAX, GPU, monkeypatch)
    with pytest.raises(ArgumentError, match=r"x has shape \(4, 999\), needed \(4, 1000\)"):
        run(on_gpu((4, 999)))
    with pytest.raises(ArgumentError, match="x lies on llvm"):
        run(torch.zeros(4, 1000))
    assert not cuda()
    run(on_gpu((4, 1000)))
    assert len(cuda()) == 1


def test_a_failed_launch_is_an_error_and_the_next_one_runs(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = made(SOFTMAX, GPU, monkeypatch)
    run(on_gpu((4, 1000)))
    cuda()
    monkeypatch.setenv("FAKE_DRIVER_FAIL", "launch")
    with pytest.raises(launch.KernelError, match=r"cuLaunchKernelEx failed \(209"):
        run(on_gpu((4, 1000)))
    monkeypatch.delenv("FAKE_DRIVER_FAIL")
    run(on_gpu((4, 1000)))
    assert len(cuda()) == 1
