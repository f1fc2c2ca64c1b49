"""PyTorch's streams, CUDA graphs and devices: on a GPU only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.core.errors import ArgumentError, UsageError  # noqa: E402
from schedules.operators.softmax.definition import SoftmaxProblem  # noqa: E402
from schedules.store import kernels as store  # noqa: E402
from schedules.torch import kernels as dispatch  # noqa: E402
from schedules.torch import operators  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU, or a PyTorch without CUDA"),
]
BUSY = 200_000_000  # cycles: a tenth of a second and more


def random(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("cols", [7, 1000, 1023, 65536, 2**21])
def test_softmax_with_gradients(cols: int) -> None:
    """Rows for each kind of schedule: of few rows, 2**21 columns are split on any GPU, with a workspace."""
    x = random(5, cols).requires_grad_()
    dy = random(5, cols)
    for ours, theirs in ((kernels.softmax, torch.softmax), (kernels.log_softmax, torch.log_softmax)):
        y, wanted = ours(x), theirs(x.float(), -1)
        torch.testing.assert_close(y.float(), wanted, rtol=2e-3, atol=1e-5)
        (dx,) = torch.autograd.grad(y, x, dy)
        (expected,) = torch.autograd.grad(wanted, x, dy.float())
        torch.testing.assert_close(dx, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_the_benchmark_mode_serves_is_right(
    memory_format: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In graphs and streams as well."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "_kernels", {})
    kernels.use_bundles()
    data, filter = (random(*shape, dtype=dtype) for shape in ((3, 64, 15, 14), (40, 64, 3, 3)))
    data, filter = data.to(memory_format=memory_format), filter.to(memory_format=memory_format) / 24
    with torch.cuda.stream(torch.cuda.Stream()):
        found = kernels.conv2d(data, filter, None, 1, 1)
        torch.cuda.synchronize()
    wanted = torch.nn.functional.conv2d(data.double(), filter.double(), None, 1, 1)
    allowed = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=allowed, atol=allowed)
    (kernel,) = dispatch._kernels.values()
    assert "that were timed here" in kernel.why
    kernels.use_bundles()


def test_dropout_and_mask() -> None:
    x, mask = random(6, 100, dtype=torch.float32).requires_grad_(), random(100, dtype=torch.float32)
    y = kernels.dropout_softmax(x, 0.5, scale=0.25, mask=mask)
    kept = y != 0
    assert 0.35 < kept.double().mean() < 0.65
    wanted = torch.softmax(0.25 * x + mask, -1) * kept * 2
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-6)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0], rtol=1e-4, atol=1e-6
    )


def test_dropout_draws_what_pytorchs_generator_would() -> None:
    """Of one seed and offset: the first word of a counter is torch.rand's of the thread with its number."""
    torch.manual_seed(77)
    torch.rand(5, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = torch.tensor([generator.initial_seed(), generator.get_offset()], device="cuda")
    uniform = torch.rand(64 * 256, device="cuda")
    kept = kernels.dropout_softmax(random(64, 1024, dtype=torch.float32), 0.25, drop=state) != 0
    assert torch.equal(kept.view(-1)[::4], uniform <= 0.75)


def test_a_captured_dropout_draws_anew() -> None:
    x, state = random(64, 100).requires_grad_(), torch.tensor([5, 0], device="cuda")

    def step(drop: Any = None) -> Any:
        y = kernels.dropout_softmax(x, 0.5, drop=drop)
        return y, torch.autograd.grad(y.sum(), x)[0]

    step(), step(state)
    torch.cuda.synchronize()
    graph, own = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    with torch.cuda.graph(own):
        ours, _ = step(state)
        state[1] += 4
    seen = []
    for seed in (11, None, 11):
        if seed:
            torch.manual_seed(seed)
        graph.replay()
        seen.append((y.clone(), dx.clone()))
    assert not torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][0], seen[2][0]) and torch.equal(seen[0][1], seen[2][1])
    state.copy_(torch.tensor([5, 0]))
    for offset in (0, 4, 8):
        own.replay()
        again = kernels.dropout_softmax(x, 0.5, drop=torch.tensor([5, offset], device="cuda"))
        assert torch.equal(ours, again)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution(channels_last: bool) -> None:
    """NCHW makes channels-last copies in workspaces."""
    x, weight, bias = random(2, 32, 9, 9), random(48, 32, 3, 3), random(48)
    wanted = torch.nn.functional.conv2d(x.float(), weight.float(), bias.float(), padding=1).relu()
    if channels_last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    y = kernels.conv2d(x, weight, bias, padding=1, activation="relu")
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-1)


def test_inputs_at_odd_addresses_and_of_other_devices() -> None:
    x = random(9, 33)[1:]
    kernels.softmax(random(8, 33))  # after a call that is alike but for the address
    assert x.data_ptr() % dispatch.VECTOR_BYTES
    torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1), rtol=2e-3, atol=1e-5)
    with pytest.raises(ArgumentError, match="mask lies on llvm"):
        kernels.softmax(x, mask=torch.zeros(33, dtype=torch.float16))


@pytest.mark.parametrize("cols", [1000, 2**21])
def test_the_current_stream_is_used(cols: int) -> None:
    """Each stream waits long before it writes x: a launch elsewhere, or memory shared by both, would show."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:  # builds the kernel, and leaves memory of each stream to PyTorch's allocator
        with torch.cuda.stream(stream):
            kernels.softmax(random(4, cols))
    inputs = [torch.zeros(4, cols, dtype=torch.float16, device="cuda") for _ in streams]
    data = [random(4, cols) for _ in streams]
    torch.cuda.synchronize()
    outputs = []
    for stream, x, values in zip(streams, inputs, data, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY)
            x.copy_(values)
            outputs.append(kernels.softmax(x))
    assert not any(stream.query() for stream in streams), "the calls waited for the device"
    torch.cuda.synchronize()
    for y, values in zip(outputs, data, strict=True):
        torch.testing.assert_close(y, torch.softmax(values, -1), rtol=2e-3, atol=1e-6)


def test_gradients_are_computed_on_the_stream_of_the_forward_pass() -> None:
    """By a thread of PyTorch's, which sets it."""
    x, values, dy = random(4, 1000).requires_grad_(), random(4, 1000), random(4, 1000)
    torch.autograd.grad(kernels.softmax(x), x, dy)  # builds the kernels
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
        with torch.no_grad():
            x.copy_(values)
        y = kernels.softmax(x)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert not stream.query(), "the calls waited for the device"
    torch.cuda.synchronize()
    wanted = torch.softmax(values.float(), -1)
    torch.testing.assert_close(y.float(), wanted, rtol=2e-3, atol=1e-5)
    expected = wanted * (dy - (wanted * dy).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.float(), expected, rtol=2e-2, atol=2e-2)


def test_calls_go_straight_to_the_kernel() -> None:
    x = random(4, 100)
    assert operators._nothing_between((x, x))
    assert not operators._nothing_between((x, x.cpu()))
    with torch.inference_mode():
        assert operators._nothing_between((random(4, 100),))


@pytest.mark.parametrize("cols", [1000, 2**21])
def test_graphs_replay_on_new_data(cols: int) -> None:
    """Forward, backward and a convolution in one CUDA graph."""
    x, weight = random(4, cols), random(8, 8, 3, 3)
    image, dy = random(1, 8, 10, 10), random(4, cols)

    def step() -> tuple[Any, ...]:
        leaf = x.detach().requires_grad_()
        y = kernels.softmax(leaf)
        return y, torch.autograd.grad(y, leaf, dy)[0], kernels.conv2d(image, weight)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(2):
        for tensor in (x, image, dy):
            tensor.normal_()
        graph.replay()
        kernels.softmax(random(4, cols))  # a call beside the graph has memory of its own
        y = torch.softmax(x.float(), -1)
        wanted = y, y * (dy - (y * dy).sum(-1, keepdim=True)), torch.nn.functional.conv2d(image.float(), weight.float())
        for got, expected in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_model_with_kernels_in_a_graph(rest: str) -> None:
    """In half precision, channels last whatever the model is, and new parameters before the next capture."""
    layers = torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1)
    model, x = torch.nn.Sequential(*layers).half().cuda().eval(), random(2, 8, 10, 9)
    optimized = kernels.optimize(model, x, rest=rest)
    assert len(optimized.report.replaced) == 2 and not optimized.report.notes
    for _ in range(2):
        y = optimized(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = optimized(x)
        x.normal_()
        graph.replay()
        with torch.no_grad():
            torch.testing.assert_close(captured, model(x), rtol=2e-2, atol=2e-2)
            model[0].weight.mul_(0.5)


def test_nchw_filters_are_packed_once() -> None:
    model, x = torch.nn.Conv2d(16, 32, 3, padding=1).half().cuda().eval(), random(2, 16, 12, 12)
    optimized = kernels.optimize(model, x, memory_format=torch.preserve_format, rest="eager")
    (problem,) = optimized.report.problems
    assert problem.filter_layout == "hwoi"
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=2e-2, atol=2e-2)


def test_nothing_is_built_in_a_capture() -> None:
    x = random(3, 777)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UsageError, match="call it once before"), torch.cuda.graph(graph):
        kernels.softmax(x)


def test_compiled_with_cuda_graphs() -> None:
    compiled = torch.compile(lambda x: kernels.softmax(x * 2) + 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = random(6, 100, dtype=torch.float32)
        torch.testing.assert_close(compiled(x).clone(), torch.softmax(x * 2, -1) + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
def test_each_device_has_its_kernels() -> None:
    x = random(4, 100).to("cuda:1")
    torch.testing.assert_close(kernels.softmax(x), torch.softmax(x, -1), rtol=2e-3, atol=1e-5)
    assert torch.cuda.current_device() == 0


def test_records_of_this_device_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCHEDULES_CACHE", str(tmp_path))
    monkeypatch.setattr(dispatch, "_alone", {})  # of other widths there were enough for a kernel of any
    asked: list[Any] = []
    choose = store.choose
    monkeypatch.setattr(store, "choose", lambda *a, **named: asked.append(named) or choose(*a, **named))
    dispatch.kernel_for(SoftmaxProblem(4, 100), torch.device("cuda", 0))
    assert asked == [{"device": torch.cuda.get_device_name(0)}]
