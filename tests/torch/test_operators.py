"""Which way a call takes: straight to the kernel, or through PyTorch's dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import schedules.torch as kernels  # noqa: E402
from schedules.core.errors import DerivativeError  # noqa: E402
from schedules.torch.operators import custom_operator  # noqa: E402

ways: list[str] = []  # of the calls of `times`


def run(x: Any, y: Any, by: float) -> Any:
    frame, way = sys._getframe(), "straight"
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_filename == torch._ops.__file__:
            way = "dispatcher"
    ways.append(way)
    return x * by if y is None else x * y * by


def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, y, ctx.by = inputs
    ctx.save_for_backward(x, y, output)


def backward(ctx: Any, gradient: Any) -> Any:
    x, y, output = ctx.saved_tensors
    dx = times(gradient, y, ctx.by)
    return dx, None if y is None else times(gradient, x, ctx.by), None


times = custom_operator(
    "test_times",
    "(Tensor x, Tensor? y, float by) -> Tensor",
    run,
    lambda x, y, by: torch.empty_like(x),
    backward,
    keep,
)
OP = torch.ops.schedules.test_times.default


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    ways.clear()
    yield
    ways.clear()


def test_plain_tensors_go_straight_to_the_kernel() -> None:
    x, weight = torch.randn(2, 3), torch.nn.Parameter(torch.randn(2, 3))
    assert torch.equal(times(x, None, 2.0), 2 * x)
    y = times(x, weight, 2.0)
    assert y.requires_grad and torch.equal(y, 2 * x * weight)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with context:
            y = times(x, weight, 2.0)
        assert y.requires_grad == (y.grad_fn is not None) == isinstance(context, torch.autocast)
    assert y.dtype is torch.float32 and ways == ["straight"] * 5


def test_gradients_are_those_of_the_registered_operator() -> None:
    """Of both tensors, of one, twice over a kept graph, and of the gradient itself."""
    x, y = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for function in (times, OP):
        assert torch.autograd.gradcheck(lambda x, y: function(x, y, 3.0), (x, y))  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda x, y: function(x, y, 3.0), (x, y))  # noqa: B023
        z = function(x, y.detach(), 3.0)
        for _ in range(2):
            (dx,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
            assert torch.equal(dx, 3 * y)
        z.backward(torch.ones_like(z))
        assert torch.equal(x.grad, 3 * y) and y.grad is None
        x.grad = None
    assert set(ways) == {"straight", "dispatcher"}


def test_what_was_kept_for_the_gradient_may_not_be_changed() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    y = times(x, None, 3.0)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = times(x, None, 3.0)
    y.sum().backward()
    assert len(packed) == 2 and torch.equal(x.grad, torch.full((2, 3), 3.0))
    checkpointed = torch.utils.checkpoint.checkpoint(lambda x: times(x, None, 2.0).sin(), x, use_reentrant=False)
    assert torch.autograd.grad(checkpointed.sum(), x)[0].shape == x.shape
    assert set(ways) == {"straight"}


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(function)
        return function(*args, **(kwargs or {}))


class SeenFunction(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(function)
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


found: list[Any] = []


@pytest.mark.parametrize("mode", [Seen, SeenFunction, Subclass])
@pytest.mark.parametrize("gradient", [False, True])
def test_modes_and_subclasses_see_the_operator(mode: Any, gradient: bool) -> None:
    found.clear()
    x = torch.randn(2, 3, requires_grad=gradient)
    if mode is Subclass:
        y = times(x.as_subclass(Subclass), None, 2.0)
        assert type(y) is Subclass
    else:
        with mode():
            y = times(x, None, 2.0)
    assert OP in found and ways == ["dispatcher"] and torch.equal(y.as_subclass(torch.Tensor), 2 * x)


def test_tracing_records_the_operator() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    graphs = [make_fx(double)(x), make_fx(double, tracing_mode="fake")(x)]
    graphs.append(torch.export.export(Double(), (x,), strict=False).graph_module)

    def compiler(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.testing.assert_close(torch.compile(double, backend=compiler, fullgraph=True)(x), 2 * x)
    assert [OP in [node.target for node in graph.graph.nodes] for graph in graphs] == [True] * 4


def double(x: Any) -> Any:
    return times(x, None, 2.0)


class Double(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return double(x)


def test_what_is_no_plain_tensor_is_left_to_pytorch() -> None:
    """functorch's transforms, lazily negated tensors, other devices and layouts: as the registered operator does."""
    x, z = torch.randn(4, 3), torch.randn(4, 3)
    cases: dict[str, Any] = {
        "vmap": lambda f: torch.vmap(f)(x),
        "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(x),
        "functionalize": lambda f: torch.func.functionalize(f)(x),
        "negated": lambda f: f(torch.complex(x, z).conj().imag),
        "sparse": lambda f: f(x.to_sparse()),
        "meta": lambda f: f(x.to("meta")).shape,
        "no tensor": lambda f: f(x.numpy()),
    }

    def outcome(case: str, function: Any) -> Any:
        try:
            return cases[case](function)
        except Exception as error:
            return type(error), str(error).split("\n")[0]

    for case in cases:
        wanted, got = outcome(case, lambda x: OP(x, None, 2.0)), outcome(case, double)
        assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted, case
    assert torch.equal(outcome("vmap", double), 2 * x) and torch.equal(outcome("negated", double), -2 * z)
    assert "straight" not in ways


def test_no_forward_derivative() -> None:
    """The registered operator leaves tangents out without a word."""
    x, dx = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(DerivativeError, match="test_times has no forward derivative"):
        torch.func.jvp(double, (x,), (dx,))
    with forward_ad.dual_level():
        assert torch.equal(double(x), 2 * x)
        with pytest.raises(DerivativeError, match="forward derivative"):
            times(x, forward_ad.make_dual(x, dx), 2.0)


def test_below_autograd_no_gradient_is_recorded() -> None:
    """As in the kernel of another operator, which may call with gradients enabled."""
    x = torch.randn(3, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        results = [double(x), OP(x, None, 2.0)]
    assert [y.requires_grad for y in results] == [False, False] and ways == ["straight", "dispatcher"]


def test_profilers_see_the_operator() -> None:
    x = torch.randn(2, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        times(x, None, 2.0)
    assert "schedules::test_times" in [event.key for event in profile.key_averages()]
    assert ways == ["dispatcher"]


def test_another_threads_mode_is_its_own() -> None:
    x = torch.randn(2, 3)
    with Seen(), ThreadPoolExecutor(1) as thread:
        thread.submit(times, x, None, 2.0).result()
    assert ways == ["straight"]


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda x: kernels.softmax(x, scale=0.5, mask=x[0, 0]), "softmax"),
        (lambda x: kernels.dropout_softmax(x, 0.5, 1), "dropout_softmax"),
        (lambda x: kernels.conv2d(x, x), "conv2d_nchw"),
        (lambda x: kernels.conv2d_nhwc(x, x), "conv2d_nhwc"),
        (lambda x: kernels.conv2d_hwcn(x, x), "conv2d_hwcn"),
    ],
)
def test_every_function_takes_both_ways(call: Any, operator: str) -> None:
    x = torch.randn(2, 2, 3, 3)[..., :2].contiguous()
    torch.manual_seed(1)
    straight = call(x)
    torch.manual_seed(1)
    found.clear()
    with Seen():
        dispatched = call(x)
    assert getattr(torch.ops.schedules, operator).default in found
    torch.testing.assert_close(straight, dispatched, rtol=0, atol=0)
