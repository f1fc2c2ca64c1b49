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
bound: list[Any] = []  # its arguments where they were like none before


def bind(x: Any, y: Any, by: float) -> Any:
    bound.append((x, y, by))

    def run(x: Any, y: Any = None) -> Any:
        assert x.is_contiguous()
        frame, files = sys._getframe(), set()
        while frame := frame.f_back:  # type: ignore[assignment]
            files.add(frame.f_code.co_filename)
        ways.append("dispatcher" if torch._library.autograd.__file__ in files else "straight")
        return x * by if y is None else x * y * by

    return run


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
    bind,
    lambda x, y, by: (x.shape, y is None, by),
    lambda x, y, by: torch.empty_like(x),
    backward,
    keep,
)
OP = torch.ops.schedules.test_times.default


def by_dispatcher(x: Any, y: Any, by: float) -> Any:
    """The registered operator as PyTorch has it: arguments by name are none of a short way's."""
    return OP(x=x, y=y, by=by)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    kernels.use_bundles()  # forgets what calls were like
    ways.clear()
    bound.clear()
    yield


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
    for function in (times, by_dispatcher):
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
    assert OP in found and torch.equal(y.as_subclass(torch.Tensor), 2 * x)
    assert y.requires_grad is gradient


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


def test_tracing_sees_the_copy_of_a_strided_tensor() -> None:
    """Inductor lets what makes a tensor write it as it is wanted; in the kernel it is a copy after that."""
    for x, copies in ((torch.randn(4, 3), []), (torch.randn(3, 4).t(), [torch.ops.aten.clone.default])):
        traced = make_fx(double, tracing_mode="fake")(x)
        assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [*copies, OP]


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
        wanted, got = outcome(case, lambda x: by_dispatcher(x, None, 2.0)), outcome(case, double)
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
    assert [y.requires_grad for y in results] == [False, False] and ways == ["straight", "straight"]


def test_profilers_see_the_operator() -> None:
    x = torch.randn(2, 3)
    times(x, None, 2.0)
    ways.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        times(x, None, 2.0)
    assert "schedules::test_times" in [event.key for event in profile.key_averages()]
    assert ways == ["dispatcher"]


def test_calls_like_one_before_go_the_same_way() -> None:
    """Of other tensors too, and by the registered operator, as code that was compiled calls it."""
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    with torch.no_grad():
        times(x, y, 2.0)
        for function in (times, OP):
            assert torch.equal(function(y, x + 1, 2.0), y * (x + 1) * 2)
        assert len(bound) == 1 and ways == ["straight"] * 3
        assert torch.equal(OP(x=x, y=y, by=2.0), x * y * 2) and ways.pop() == "dispatcher"
        compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
        compiled(x)
        ways.clear()
        assert torch.equal(compiled(y), 2 * y) and ways == ["straight"]


OTHERS: dict[str, Any] = {
    "option": lambda x: (x, None, 3.0),
    "shape": lambda x: (x[:1], None, 2.0),
    "strides": lambda x: (x.t().contiguous().t(), None, 2.0),
    "dtype": lambda x: (x.double(), None, 2.0),
    "second": lambda x: (x, x + 1, 2.0),
    "twice": lambda x: (x, x, 2.0),
    "class": lambda x: (torch.nn.Parameter(x, requires_grad=False), None, 2.0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_are_not_taken_for_those_before(other: str) -> None:
    x = torch.randn(2, 3)
    times(x, None, 2.0)
    for function in (times, OP, times, by_dispatcher):
        first, second, by = OTHERS[other](x)
        wanted = first * by if second is None else first * second * by
        assert torch.equal(function(first, second, by), wanted) and torch.equal(times(x, None, 2.0), 2 * x)
    assert len(bound) == 3  # by the dispatcher, autograd is left out
    assert torch.equal(times(x, x + 1, 2.0), x * (x + 1) * 2)  # not one tensor twice


def test_what_changed_since_a_call_is_heeded() -> None:
    """A gradient asked for, a mode, a transform, a tangent, a lazy negation: each takes its way, and then not again."""
    x, z = torch.randn(2, 3), torch.randn(2, 3)
    for _ in range(2):
        for leaf in (x, x.clone().requires_grad_()):
            with torch.no_grad():
                assert not times(leaf, None, 2.0).requires_grad
            assert times(leaf, None, 2.0).requires_grad is leaf.requires_grad
        with torch.inference_mode():
            assert times(x, None, 2.0).is_inference() and times(x.clone(), None, 2.0).is_inference()
        found.clear()
        with Seen():
            times(x, None, 2.0)
        with SeenFunction():
            times(x, None, 2.0)
        assert found.count(OP) == 2
        assert torch.equal(torch.vmap(lambda z: times(x, None, 2.0) + z)(z[None]), (2 * x + z)[None])
        assert torch.equal(torch.vmap(double)(x[None]), 2 * x[None])
        with forward_ad.dual_level(), pytest.raises(DerivativeError):
            times(forward_ad.make_dual(x, z), None, 2.0)
        assert torch.equal(double(torch.complex(x, z).conj().imag), -2 * z)
        assert OP in [node.target for node in make_fx(double, tracing_mode="symbolic")(x).graph.nodes]


def test_bundles_in_use_change_what_is_called() -> None:
    x = torch.randn(2, 3)
    for count in (1, 2):
        times(x, None, 2.0)
        times(x, None, 2.0)
        assert len(bound) == count
        kernels.use_bundles()


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


def test_no_operator_has_arguments_by_default() -> None:
    """Code that inductor wrote gives them by name, and goes by the dispatcher then."""
    found = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("schedules::")]
    assert len(found) > 10
    assert not [schema.name for schema in found if any(given.has_default_value() for given in schema.arguments)]
