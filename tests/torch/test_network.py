"""Kernels in whole models: what is fused, what is left to PyTorch, and that the numbers are those of the model."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import schedules.torch as kernels  # noqa: E402
from schedules.core.errors import BuildError, ConfigError, UsageError  # noqa: E402
from schedules.torch import graph, network  # noqa: E402
from schedules.torch.convolution import by_pytorch  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")
LAST = torch.channels_last
Forward = Callable[[Any, Any], Any]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's functions in the place of kernels: what is tested is where these are put, and nothing is built."""

    class Kernel:
        made, why = "stand_in", ""

    def convolution(x: Any, filter: Any, bias: Any, residual: Any, *rest: Any) -> Any:
        *steps, activation, last, layout = rest
        if not layout:
            return by_pytorch(x, filter[:, None], bias, residual, *steps, len(filter), activation)
        order = (0, 3, 1, 2) if last else (2, 3, 0, 1) if layout == "hwoi" else (0, 1, 2, 3)
        return by_pytorch(x, filter.permute(order), bias, residual, *steps, activation=activation)

    monkeypatch.setattr(graph, "prepare", lambda problems, device: None)
    monkeypatch.setattr(graph, "kernel_for", lambda problem, device: Kernel())
    monkeypatch.setattr(graph, "convolution", convolution)
    monkeypatch.setattr(graph, "softmax", lambda x, scale: torch.softmax(scale * x, -1))


def random(*shape: int) -> Any:
    return torch.randn(shape)


class Layers(nn.Module):
    """Two convolutions and a batch norm that has seen data, in the order that `forward` calls them."""

    def __init__(self, forward: Forward, **options: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1, **options), nn.Conv2d(4, 4, 1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)
        nn.init.normal_(self.norm.weight)
        self.run = forward

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def close(model: Any, optimized: Any, *inputs: Any) -> None:
    with torch.no_grad():
        wanted = model(*[x.clone() for x in inputs])
    torch.testing.assert_close(optimized(*[x.clone() for x in inputs]), wanted, rtol=1e-4, atol=1e-5)


def layers_of(model: Any, x: Any, **options: Any) -> list[str]:
    """What is in each kernel that serves the model, whose numbers stay."""
    optimized = kernels.optimize(model, x, **options)
    assert not optimized.report.notes
    close(model, optimized, x)
    return [row.layer.split(" ", 4)[-1].removesuffix(", float32") for row in optimized.report.replaced]


FUSED: dict[str, tuple[Forward, list[str]]] = {
    "batch norm, in-place relu": (
        lambda m, x: F.relu(m.norm(m.a(x)), inplace=True), ["3x3 + batch norm + relu"]
    ),
    "residual": (
        lambda m, x: (m.norm(m.a(x)) + x).relu(), ["3x3 + batch norm + residual + relu"]
    ),
    "added in place": (lambda m, x: m.a(x).add_(x), ["3x3 + residual"]),
    "of two branches one adds the other": (
        lambda m, x: torch.relu(m.norm(m.a(x)) + m.b(x)), ["3x3 + batch norm + residual + relu", "1x1"]
    ),
    "relu6": (lambda m, x: F.relu6(m.a(x)), ["3x3 + relu6"]),
    "hardtanh": (lambda m, x: F.hardtanh(m.a(x), 0, 6, inplace=True), ["3x3 + relu6"]),
    "clamp": (lambda m, x: m.a(x).clamp(min=-0.5, max=1), ["3x3 + clamp:-0.5:1"]),
    "clamp from below": (lambda m, x: m.a(x).clamp_(min=0), ["3x3 + relu"]),
    "silu": (lambda m, x: F.silu(m.a(x), inplace=True), ["3x3 + silu"]),
    "hardswish": (lambda m, x: F.hardswish(m.a(x)), ["3x3 + hardswish"]),
    "gelu": (lambda m, x: F.gelu(m.b(F.gelu(m.a(x), approximate="tanh"))), ["3x3 + gelu_tanh", "1x1 + gelu"]),
    "shared": (lambda m, x: m.a(m.a(x).relu()).relu(), ["3x3 + relu", "3x3 + relu"]),
}  # fmt: skip
APART: dict[str, tuple[Forward, list[str]]] = {
    "two users": (lambda m, x: (y := m.a(x)).relu() + y, ["3x3"]),
    "added to itself": (lambda m, x: (y := m.a(x)) + y, ["3x3"]),
    "residual with broadcasting": (lambda m, x: m.a(x) + x.mean((2, 3), keepdim=True), ["3x3"]),
    "a number": (lambda m, x: m.a(x) + 1, ["3x3"]),
    "alpha": (lambda m, x: torch.add(m.a(x), x, alpha=2), ["3x3"]),
    "activation before the addition": (lambda m, x: m.a(x).relu() + x, ["3x3 + relu"]),
    "a view sees what is written": (lambda m, x: (y := m.a(x), z := y.flatten(1), y.relu_(), z)[-1], ["3x3"]),
    "its input is written between": (lambda m, x: (z := x * 1, y := m.a(z), z.zero_(), y + x)[-1], ["3x3"]),
    "another dtype": (lambda m, x: m.a(x) + x.double(), ["3x3"]),
}


@pytest.mark.parametrize("case", FUSED)
def test_what_follows_a_convolution_is_in_its_epilogue(case: str, stand_in: None) -> None:
    forward, wanted = FUSED[case]
    assert layers_of(Layers(forward).eval(), random(1, 4, 6, 5)) == wanted


@pytest.mark.parametrize("case", ["batch norm, in-place relu", "residual", "added in place", "hardtanh", "gelu"])
def test_what_torch_exported_is_read_too(case: str, stand_in: None) -> None:
    forward, wanted = FUSED[case]
    model, x = Layers(forward).eval(), random(1, 4, 6, 5)
    exported = torch.export.export(model, (x,)).module()
    assert "gradients are recorded" in kernels.optimize(exported, x).report.rows[0].why  # it has no eval()
    with torch.no_grad():
        assert layers_of(exported, x) == wanted
    assert kernels.problems(exported, x) == kernels.problems(model, x)


@pytest.mark.parametrize("case", APART)
def test_what_a_kernel_cannot_hold_stays_apart(case: str, stand_in: None) -> None:
    forward, wanted = APART[case]
    assert layers_of(Layers(forward).eval(), random(1, 4, 6, 5)) == wanted


def test_kernels_compute_what_the_model_does() -> None:
    """Both formats, by real kernels."""
    model = Layers(lambda m, x: m.b(torch.relu(m.norm(m.a(x)) + x)).sum((2, 3))).eval()
    x = random(2, 4, 7, 6)
    for memory_format in (torch.contiguous_format, LAST):
        optimized = kernels.optimize(model.to(memory_format=memory_format), x.to(memory_format=memory_format))
        assert not optimized.report.notes and len(optimized.report.replaced) == 2
        close(model, optimized, x.to(memory_format=memory_format))


def test_each_channel_may_be_a_group() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), nn.ReLU6()).eval()
    for memory_format in (torch.contiguous_format, LAST):
        x = random(2, 4, 7, 6).to(memory_format=memory_format)
        optimized = kernels.optimize(model, x)
        assert [row.layer.split(" + ", 1)[1] for row in optimized.report.replaced] == ["batch norm + relu6, float32"]
        close(model, optimized, x)
        assert optimized(x).is_contiguous(memory_format=memory_format)
        y = kernels.conv2d(x, model[0].weight.detach(), model[0].bias.detach(), padding=1, groups=4)
        torch.testing.assert_close(y, model[0](x).detach(), rtol=1e-4, atol=1e-5)


def test_formats_are_kept_or_chosen(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.a(x)).eval(), random(1, 4, 6, 5)
    found = kernels.problems(model, x), kernels.problems(model, x, memory_format=LAST)
    assert [type(problem).__name__ for problems in found for problem in problems] == ["NchwProblem", "NhwcProblem"]
    assert kernels.optimize(model, x)(x).is_contiguous()
    for optimized, given in (
        (kernels.optimize(model, x, memory_format=LAST), x),
        (kernels.optimize(model.to(memory_format=LAST), x), x),
    ):
        assert optimized(given).is_contiguous(memory_format=LAST)


def test_what_is_left_to_pytorch_is_told() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
            self.norm = nn.BatchNorm2d(4)
            self.up = nn.ConvTranspose2d(4, 4, 2)
            self.even = nn.Conv2d(4, 4, 2, padding="same")

        def forward(self, x: Any) -> Any:
            y = self.even(self.up(F.relu(self.norm(self.grouped(x))))).flatten(2)
            y = F.scaled_dot_product_attention(y, y, y).softmax(1)
            return F.conv2d(y[..., None].double(), torch.eye(4).double()[..., None, None])

    model, x = Model().eval(), random(1, 4, 5, 6)
    optimized = kernels.optimize(model, x)
    close(model, optimized, x)
    rows = optimized.report.rows
    assert [(row.module, row.why) for row in rows[:3]] == [
        ("grouped", "2 groups"),
        ("up", "transposed"),
        ("even", "padding is not the same on both sides"),
    ]
    assert [row.why for row in rows[3:]] == ["PyTorch's fused attention", "dim=1 is not the last axis", "dtype float64"]
    assert not optimized.report.replaced and "batch norm" in rows[0].layer
    assert "0 of 6 layers by our kernels" in str(optimized.report)


def test_layers_are_named_by_their_sizes(stand_in: None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.up = nn.Conv1d(4, 6, 5, stride=2), nn.ConvTranspose2d(4, 6, (2, 1))
            self.deep = nn.Conv2d(4, 4, (3, 1), groups=4)

        def forward(self, x: Any) -> Any:
            return self.line(x.flatten(2)).sum() + self.up(self.deep(x)).sum()

    rows = kernels.optimize(Model().eval(), random(1, 4, 6, 5)).report.rows
    assert sorted((row.layer, row.why) for row in rows) == [
        ("conv1d 1x4x30 -> 6 5 stride 2, float32", "not of images"),
        ("conv2d 1x4x6x5 -> 4 3x1 groups 4, float32", ""),
        ("conv_transpose2d 1x4x4x5 -> 6 2x1, float32", "transposed"),
    ]


def test_control_flow_is_kept(stand_in: None) -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.a(x).relu()
        return m.b(y) if y.sum() > 0 else m.b(y - 1)

    model = Layers(forward).eval()
    optimized = kernels.optimize(model, random(1, 4, 6, 5))
    assert [row.module for row in optimized.report.replaced] == ["a", "b"]
    assert any("not captured" in note for note in optimized.report.notes)
    with torch.no_grad():
        for bias in (5.0, -5.0):
            model.a.bias.fill_(bias)
            close(model, optimized, random(1, 4, 6, 5))


def test_parameters_that_change_are_taken_anew(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.norm(m.a(x))).eval(), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x)
    with torch.no_grad():
        model.a.weight.mul_(2)
        close(model, optimized, x)
        optimized.load_state_dict(Layers(lambda m, x: x).state_dict())
        close(model, optimized, x)
        model.a.weight = nn.Parameter(random(4, 4, 3, 3))
        close(model, optimized, x)


def test_training_is_pytorchs(stand_in: None) -> None:
    """Of convolutions; batch norm in training is not folded."""
    model, x = Layers(lambda m, x: m.norm(m.a(x))), random(2, 4, 6, 5)
    optimized = kernels.optimize(model, x)
    assert "gradients are recorded" in optimized.report.rows[0].why
    wanted = torch.autograd.grad(model(x).square().sum(), model.a.weight)
    torch.testing.assert_close(torch.autograd.grad(optimized(x).square().sum(), model.a.weight), wanted)
    assert not optimized.eval()(x).requires_grad
    image = x.clone().requires_grad_()
    close(model.eval(), optimized, x)
    assert torch.autograd.grad(optimized(image).sum(), image)[0].shape == x.shape


def test_softmax_with_what_is_around_it() -> None:
    class Attention(nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            scores = q @ k.transpose(-1, -2) / 2.0
            first = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
            return F.dropout(first, 0.5, self.training) @ torch.log_softmax(scores, 2)

    model, x = Attention().eval(), random(2, 3, 4)
    optimized = kernels.optimize(model, (x, x))
    assert len(optimized.report.replaced) == 2
    close(model, optimized, x, x)
    trained = kernels.optimize(model.train(), {"q": x, "k": x})
    assert "+ dropout" in trained.report.replaced[0].layer
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(trained(leaf, x).sum(), leaf)[0].abs().sum() > 0


def test_scale_is_in_the_softmax() -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x * 0.25).softmax(-1)

    x = random(3, 10)
    (problem,) = kernels.problems(Model(), x)
    assert problem.scale == 0.25
    close(Model(), kernels.optimize(Model(), x), x)


def test_autocast_is_heeded(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.norm(m.a(x)).relu()).eval(), random(1, 4, 6, 5)
    with torch.autocast("cpu"):
        optimized = kernels.optimize(model, x)
        (row,) = optimized.report.replaced
        assert "bfloat16" in row.layer
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), model(x), rtol=0.05, atol=0.05)


def test_other_sizes_are_served_too() -> None:
    model = Layers(lambda m, x: m.a(x).relu()).eval()
    optimized = kernels.optimize(model, random(1, 4, 6, 5))
    for shape in ((2, 4, 6, 5), (3, 4, 7, 8), (1, 4, 6, 5), (0, 4, 6, 5)):
        close(model, optimized, random(*shape))


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="PyTorch counts all models together"
)
def test_many_models_of_a_class_are_served(stand_in: None) -> None:
    """PyTorch captures a code eight times by default, and then runs it as it is."""
    models = [Layers(lambda m, x: m.a(x).relu()).eval() for _ in range(10)]
    reports = [kernels.optimize(model, random(1, 4, 6, 5)).report for model in models]
    assert all(len(report.replaced) == 1 and not report.notes for report in reports)


def test_softmax_of_any_width_is_served_on_a_cpu() -> None:
    model = nn.Softmax(-1)
    optimized = kernels.optimize(model, random(3, 11))
    for cols in (12, 13, 14, 15):
        close(model, optimized, random(3, cols))
    assert len(optimized.report.replaced) == len(optimized.report.rows) >= 1
    assert optimized.report.rows[-1].layer == "softmax 3x?, float32"


def test_a_size_without_a_kernel_is_pytorchs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*arguments: Any) -> Any:
        raise ConfigError("no config fits")

    model, x = Layers(lambda m, x: m.a(x) + x).eval(), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x, memory_format=LAST)
    monkeypatch.setattr(graph, "in_layout", refuse)
    with caplog.at_level(logging.WARNING, "schedules"):
        close(model, optimized, x)
    assert "is left to PyTorch: no config fits" in caplog.text
    monkeypatch.setattr(graph, "kernel_for", refuse)
    torch._dynamo.reset()
    assert [row.why for row in kernels.optimize(model, x).report.rows] == ["no config fits"]


def test_what_fails_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("a slip")

    monkeypatch.setattr(graph, "settle", broken)
    model, x = Layers(lambda m, x: m.a(x)).eval(), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x)
    assert optimized.report.notes == ["rest=eager failed, the model as it is runs: RuntimeError: a slip"]
    close(model, optimized, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_parameters(copied: Callable[[Any], Any], stand_in: None) -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval(), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x)
    other = copied(optimized)
    with torch.no_grad():
        other[0].weight.mul_(2)
        wanted = other[1](other[0](x))
    torch.testing.assert_close(other(x), wanted, rtol=1e-4, atol=1e-5)
    close(model, optimized, x)
    assert len(other.report.replaced) == 1 and other.report is not optimized.report


def test_what_eager_refuses_is_its_error_and_gives_up_nothing(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.a(x)).eval(), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x)
    with pytest.raises(RuntimeError, match="should be the same"):
        optimized(x.double())
    assert not optimized.report.notes
    torch._dynamo.reset()
    optimized(random(1, 4, 8, 8))
    assert len(optimized.report.replaced) == 2


def test_a_model_with_kernels_is_optimized_by_its_own_names(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.a(x)).eval(), random(1, 4, 6, 5)
    twice = kernels.optimize(kernels.optimize(model, x), x)
    assert [row.module for row in twice.report.replaced] == ["a"]
    close(model, twice, x)


def test_the_module_is_of_its_class_and_the_old_one_as_it_was(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.a(x)).eval(), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x)
    assert type(optimized) is Layers and optimized.a is model.a and "forward" not in model.__dict__
    assert inspect.signature(optimized.forward) == inspect.signature(model.forward)
    assert list(optimized.state_dict()) == list(model.state_dict())


def test_as_a_backend(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.norm(m.a(x)).relu()).eval(), random(1, 4, 6, 5)
    found: list[Any] = []
    for options in ({"rest": "eager", "freeze": True}, {"rest": "eager"}):
        compiled = torch.compile(model, backend=kernels.backend, options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        found.append(compiled)
    with pytest.raises(Exception, match="rest='none' is not inductor or eager"):
        torch.compile(model, backend=kernels.backend, options={"rest": "none"})(x)
    with pytest.raises(UsageError, match="rest='none'"):
        kernels.optimize(model, x, rest="none")


def test_inductor_takes_what_is_left() -> None:
    """Traced with fake tensors, as the operator, and in the format that it has."""
    pytest.importorskip("torch._inductor.cpp_builder")
    from schedules.torch.network import has_compiler

    if not has_compiler({"cpu"}):
        pytest.skip("no compiler of C++")
    model, x = Layers(lambda m, x: m.b(m.a(x).relu()).sigmoid() * 2).eval().to(memory_format=LAST), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x.to(memory_format=LAST), rest="inductor")
    assert not optimized.report.notes and len(optimized.report.replaced) == 2
    close(model, optimized, x.to(memory_format=LAST))


def test_inductor_gets_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter whose folded form a kernel has; that is made anew all the same when the parameter changes."""
    from torch._inductor import compile_fx

    taken: list[int] = []

    def compiled(module: Any, examples: Any, **_: Any) -> Any:
        assert len([node for node in module.graph.nodes if node.op == "placeholder"]) == len(examples)
        taken.append(len(examples))
        return module.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    model = Layers(lambda m, x: torch.nn.functional.linear(m.b(m.a(x)), m.last)).eval()
    model.last, x = torch.nn.Parameter(random(7, 5)), random(1, 4, 6, 5)
    optimized = kernels.optimize(model, x, rest="inductor")
    assert taken == [2] and len(optimized.report.replaced) == 2  # data, and the filter that no kernel has
    close(model, optimized, x)
    with torch.no_grad():
        model.a.weight.mul_(2)
        model.last.mul_(3)
    close(model, optimized, x)
    assert taken == [2]


def test_kernels_are_built_while_inductor_compiles(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
    """One that then cannot be built is PyTorch's, after another compilation."""
    order: list[str] = []
    compiling = threading.Event()
    find = graph.kernel_for

    def kernel(problem: Any, device: Any) -> Any:
        assert compiling.wait(30)
        order.append("built")
        if problem.kh == 1:
            raise BuildError("no room")
        return find(problem, device)

    def compiled(self: Any, module: Any, *_: Any) -> Any:
        order.append("compiled")
        compiling.set()
        return module.forward

    monkeypatch.setattr(graph, "kernel_for", kernel)
    monkeypatch.setattr(network.Backend, "_compiled", compiled)
    for body, compilations, served in (
        (lambda m, x: m.norm(m.a(x)).relu(), 1, 1),
        (lambda m, x: m.b(m.norm(m.a(x)).relu()), 2, 1),
    ):
        order.clear()
        compiling.clear()
        model, x = Layers(body).eval(), random(1, 4, 6, 5)
        optimized = kernels.optimize(model, x, rest="inductor")
        assert order[0] == "compiled" and order.count("compiled") == compilations
        assert len(optimized.report.replaced) == served and len(optimized.report.rows) == compilations
        assert ("no room" in str(optimized.report)) == (compilations == 2) and not optimized.report.notes
        close(model, optimized, x)
