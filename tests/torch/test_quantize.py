"""int8 in whole models: what is put into it, how near the numbers stay, and that nothing that runs in eager fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import schedules.torch as kernels  # noqa: E402
from schedules.core.errors import ArgumentError, UsageError  # noqa: E402
from schedules.core.registry import operator_of  # noqa: E402
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem  # noqa: E402
from schedules.torch import convolution, packed  # noqa: E402
from schedules.torch import kernels as dispatch  # noqa: E402

quantize: Any = sys.modules["schedules.torch.quantize"]
pytestmark = pytest.mark.usefixtures("fresh")
LAST = torch.channels_last
Forward = Callable[[Any, Any], Any]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operators' references in the place of kernels: what is tested is what is put where, and nothing is built."""

    class Kernel:
        made, why = "stand_in", ""

        def __init__(self, problem: Any) -> None:
            self.problem = problem
            ASKED.add(problem)

        def launch(self, device: Any, made: tuple[Any, Any]) -> Callable[..., Any]:
            shape, dtype = made

            def call(*inputs: Any) -> Any:
                arguments = self.problem.arguments()
                assert [tuple(t.shape) for t in inputs] == [a.shape for a in arguments[:-1]]
                assert tuple(shape) == arguments[-1].shape
                found = operator_of(self.problem).reference(self.problem, [t.numpy() for t in inputs])[0]
                return torch.from_numpy(np.broadcast_to(found.values, shape).copy()).to(dtype)

            return call

    def kernel_for(problem: Any, device: Any) -> Kernel:
        return Kernel(problem)

    for module in (convolution, packed, quantize):
        monkeypatch.setattr(module, "kernel_for", kernel_for)
    monkeypatch.setattr(quantize, "prepare", lambda problems, device: None)
    ASKED.clear()
    for forget in dispatch._forgetting:  # what was built before serves none of these
        forget()
    yield
    for forget in dispatch._forgetting:
        forget()


ASKED: set[Any] = set()  # of the stand-in


def random(*shape: int) -> Any:
    return torch.randn(shape)


class Layers(nn.Module):
    """What `forward` calls in some order."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 1, bias=False)
        self.deep, self.norm = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=4)
        self.c, self.fc = nn.Conv2d(12, 40, 3, stride=2), nn.Linear(40, 5)
        self.flat, self.more = nn.Linear(12 * 8 * 8, 7), nn.Linear(7, 3)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)
        nn.init.normal_(self.norm.weight)
        self.run = forward

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def pooled(y: Any) -> Any:
    return F.adaptive_avg_pool2d(y, 1)


# what is in int8, and what is done at the border
QUANTISED: dict[str, tuple[Forward, list[str], list[str]]] = {
    "a chain": (
        lambda m, x: m.fc(torch.flatten(pooled(m.c(F.relu(m.norm(m.b(F.relu(m.a(x))))))), 1)),
        ["12 3x3 + relu", "12 1x1 + batch norm + relu", "40 3x3 stride 2", "average pooling 3x3", "linear -> 5"],
        ["packed"],
    ),
    "a residual": (
        lambda m, x: m.c(F.relu(m.b(y := F.relu(m.a(x))) + y)),
        ["12 3x3 + relu", "12 1x1 + residual + relu", "40 3x3 stride 2"], ["packed"],
    ),
    "a residual in floating point": (
        lambda m, x: m.c(m.b(m.a(x)) + m.a(x).sin()),
        ["12 3x3", "12 1x1 + residual", "12 3x3", "40 3x3 stride 2"], ["packed"],
    ),
    "pooled and added": (
        lambda m, x: m.c(F.relu(F.max_pool2d(y := m.a(x), 2) + F.avg_pool2d(y, 2))),
        ["12 3x3", "max pooling 2x2", "average pooling 2x2", "add + relu", "40 3x3 stride 2"], ["packed"],
    ),
    "other activations": (
        lambda m, x: m.c(F.hardswish(m.b(F.relu6(m.a(x))))),
        ["12 3x3 + relu6", "12 1x1 + hardswish", "40 3x3 stride 2"], ["packed"],
    ),
    "a residual before another activation": (
        lambda m, x: m.c(F.silu(m.b(y := m.a(x)) + y)),
        ["12 3x3", "12 1x1 + residual", "40 3x3 stride 2"], ["packed", "unpacked"],
    ),
    "linear layers of images": (
        lambda m, x: m.more(F.dropout(F.relu(m.flat(m.b(m.a(x)).reshape(x.size(0), -1))), training=False)),
        ["12 3x3", "12 1x1", "linear -> 7 + relu", "linear -> 3"], ["packed"],
    ),
    "a mean": (
        lambda m, x: m.fc(m.c(m.a(x)).mean((2, 3))),
        ["12 3x3", "40 3x3 stride 2", "average pooling 3x3", "linear -> 5"], ["packed"],
    ),
    "groups between": (lambda m, x: m.c(m.grouped(m.a(x))), ["12 3x3", "40 3x3 stride 2"], ["packed"]),
    "depthwise": (
        lambda m, x: m.c(F.relu(F.relu6(m.norm(m.deep(y := m.a(x)))) + y)),
        ["12 3x3", "12 3x3 groups 12 + batch norm + relu6", "add + relu", "40 3x3 stride 2"], ["packed"],
    ),
    "read twice": (
        lambda m, x: m.c(torch.cat([y := m.a(x), y.sigmoid()])[:2] + m.b(y)),
        ["12 3x3", "12 1x1 + residual", "40 3x3 stride 2"], ["packed", "unpacked"],
    ),
    "written in place": (
        lambda m, x: m.c((y := m.a(x), z := m.b(y), y.mul_(0.5), z + y)[-1]),
        ["12 3x3", "12 1x1", "40 3x3 stride 2"], ["packed", "unpacked"],
    ),
    "no data": (lambda m, x: m.b(m.a(x * 0)), ["12 3x3", "12 1x1"], ["packed"]),
}  # fmt: skip


def in_words(report: Any) -> list[str]:
    """The layers that are in int8, without the sizes of what they read."""
    found = [row.layer.removesuffix(", int8") for row in report.rows if row.layer.endswith(", int8")]
    return [re.sub(r"^conv2d \S+ -> |(?<=pooling )\S+ |(?<=linear )\S+ |(?<=add )\S+ ", "", text) for text in found]


@pytest.mark.parametrize("case", QUANTISED)
def test_what_is_put_into_int8(case: str, stand_in: None) -> None:
    forward, wanted, border = QUANTISED[case]
    model, batches = Layers(forward).eval(), [random(2, 3, 8, 8) for _ in range(2)]
    with torch.no_grad():
        expected = model(batches[0].clone())
    quantised = kernels.quantize(model, batches, rest="eager")
    report = quantised.report
    assert in_words(report) == wanted
    assert [note.split()[0] for note in report.notes] == border, report
    with torch.no_grad():
        got = quantised(batches[0].clone())
    stems = [p.ci for p in ASKED if isinstance(p, Nchw32Problem) and (p.h, p.kh) == (8, 3)]
    assert 3 in stems or not wanted or "3x3" not in wanted[0], stems  # an image's own channels, not its group's
    error = float((got - expected).norm() / expected.norm())
    assert got.shape == expected.shape and got.dtype == expected.dtype and error < 0.05, (error, str(report))
    assert all(float(row.why.split()[1].rstrip("%;")) < 8 for row in report.rows if row.why.startswith("error"))


def test_what_torch_exported_is_put_into_int8(stand_in: None) -> None:
    forward, wanted, border = QUANTISED["a chain"]
    model, x = Layers(forward).eval(), random(2, 3, 8, 8)
    with torch.no_grad():
        report = kernels.quantize(torch.export.export(model, (x,)).module(), [x], rest="eager").report
    assert (in_words(report), [note.split()[0] for note in report.notes]) == (wanted, border)


def test_what_stays_is_named(stand_in: None) -> None:
    model = Layers(lambda m, x: m.fc(pooled(m.c(F.elu(m.grouped(m.a(x))))).flatten(1)).softmax(-1)).eval()
    report = kernels.quantize(model, [random(2, 3, 8, 8)], rest="eager").report
    text = str(report)
    assert "in floating point: 4 groups" in text and "packed at the border: l_x_, elu" in text
    given = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    text = str(kernels.quantize(given, [random(3, 4)], rest="eager").report)
    assert text.count("in floating point: what it reads is not in int8") == 2
    assert "linear 3x4 -> 4," in text and "linear 3x4 -> 2," in text


def test_whatever_runs_in_eager_runs(stand_in: None) -> None:
    """Without layers, of other dtypes, in training, with control flow, with gradients, of no images."""
    x = random(2, 3, 8, 8)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    for model, data in (
        (plain, x),
        (Layers(lambda m, x: m.b(m.a(x))).double().eval(), x.double()),
        (Layers(lambda m, x: m.b(m.norm(m.b(m.a(x)) * 1).relu())), x),
        (Layers(lambda m, x: m.b(m.a(x) if x.sum() > 1e6 else m.a(-x))).eval(), x),
        (Layers(lambda m, x: m.a(x)[0, 0, 0, 0].item()).eval(), x),
        (Layers(lambda m, x: m.b(m.a(x))).eval(), x.to(memory_format=LAST)),
    ):
        with torch.no_grad():
            quantised = kernels.quantize(model, [data], rest="eager")
            wanted, got = (np.asarray(each(data)) for each in (model, quantised))
        np.testing.assert_allclose(got, wanted, atol=0.1 + 0.05 * np.abs(wanted).max())
    model = Layers(lambda m, x: m.b(m.a(x))).eval()
    quantised = kernels.quantize(model, [x], rest="eager")
    torch.testing.assert_close(quantised(x.clone().requires_grad_()).grad_fn is not None, True)
    assert quantised(x[:0]).shape == (0, 12, 8, 8) and quantised(random(1, 3, 9, 5)).shape == (1, 12, 9, 5)


def test_parameters_that_change_are_taken_anew(stand_in: None) -> None:
    model, x = Layers(lambda m, x: m.b(m.a(x))).eval(), random(2, 3, 8, 8)
    quantised = kernels.quantize(model, [x], rest="eager")
    with torch.no_grad():
        model.b.weight.mul_(0.5)
        error = (quantised(x) - model(x)).norm() / model(x).norm()
    assert error < 0.03


def test_percentiles_and_bad_input(stand_in: None) -> None:
    """One outlier does not cost the others their bits."""
    model, x = Layers(lambda m, x: m.b(m.a(x))).eval(), random(4, 3, 8, 8)
    x[0, 0, 0, 0] = 1000
    errors = []
    for percentile in (100, 95):
        quantised = kernels.quantize(model, [x, x], percentile=percentile, rest="eager")
        with torch.no_grad():
            errors.append(float((quantised(x[1:]) - model(x[1:])).norm() / model(x[1:]).norm()))
    assert errors[1] < 0.2 < 0.4 < errors[0]
    with pytest.raises(UsageError, match="there are no batches"):
        kernels.quantize(model, [])
    with pytest.raises(UsageError, match="percentile=0 is not over 0 and up to 100"):
        kernels.quantize(model, [x], percentile=0)


def test_scales_of_packing_are_positive(stand_in: None) -> None:
    image, data = random(1, 3, 4, 4), torch.ones(1, 1, 4, 4, 32, dtype=torch.int8)
    for bad in (torch.zeros(1), torch.tensor([float("nan")]), torch.tensor([-1.0])):
        for call in (
            lambda scale: kernels.pack_nchw32(image, scale),
            lambda scale: kernels.unpack_nchw32(data, 3, scale),
            lambda scale: kernels.pool2d_nchw32(data, 2, kind="average", alpha=scale),
        ):
            with pytest.raises(ArgumentError, match="not positive and finite"):
                call(bad)


def test_scales_may_be_fake(stand_in: None) -> None:
    """What is left of a model is traced by its compiler, with tensors that have no values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def network(x: Any, scale: Any) -> Any:
        y = kernels.pack_nchw32(x, scale)
        y = kernels.pool2d_nchw32(y, 2, kind="average", alpha=scale, residual=y[:, :, ::2, ::2], gamma=scale)
        return kernels.unpack_nchw32(y, 3, scale)

    x, scale = random(1, 3, 4, 4), torch.tensor([0.25])
    traced = make_fx(network, tracing_mode="fake")(x, scale)
    assert torch.equal(traced(x, scale), network(x, scale))
    with pytest.raises(ArgumentError, match="not positive and finite"):
        traced(x, -scale)


class Residual(nn.Module):
    def __init__(self, ci: int, co: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(ci, co, 3, stride, 1, bias=False), nn.Conv2d(co, co, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(co), nn.BatchNorm2d(co)])
        self.short = nn.Sequential(nn.Conv2d(ci, co, 1, stride, bias=False), nn.BatchNorm2d(co))

    def forward(self, x: Any) -> Any:
        return F.relu(self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))) + self.short(x))


class Inverted(nn.Module):
    """A block of MobileNetV2: wider, each channel by itself, narrower."""

    def __init__(self, ci: int, co: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = 2 * ci
        convs = nn.Conv2d(ci, wide, 1), nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide)
        layers = [part for conv in convs for part in (conv, nn.BatchNorm2d(wide), nn.ReLU6())]
        self.layers, self.adds = nn.Sequential(*layers, nn.Conv2d(wide, co, 1), nn.BatchNorm2d(co)), ci == co

    def forward(self, x: Any) -> Any:
        return x + self.layers(x) if self.adds else self.layers(x)


def digits(count: int, seed: int) -> tuple[Any, Any]:
    """Ten figures of 6 x 6, moved, scaled and in noise, on images of 8 x 8, and which they are."""
    figures = np.random.default_rng(7).standard_normal((10, 6, 6))
    r = np.random.default_rng(seed)
    which, images = r.integers(10, size=count), r.standard_normal((count, 1, 8, 8))
    places, sizes = r.integers(3, size=(count, 2)), r.uniform(1.4, 2.6, count)
    for image, kind, (y, x), size in zip(images, which, places, sizes, strict=True):
        image[0, y : y + 6, x : x + 6] += size * figures[kind]
    return torch.from_numpy(images.astype(np.float32)), torch.from_numpy(which)


@pytest.fixture(scope="module")
def trained() -> Iterator[Any]:
    """A network of residuals and depthwise convolutions that has learned to tell the figures apart, more or less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run in as many processes as there are cores
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 1, 1)]
    blocks = [Residual(8, 16, 2), Inverted(16, 40, 3, 2), Inverted(40, 40, 5, 1)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))
    optimizer, (images, which) = torch.optim.Adam(model.parameters(), 1e-2), digits(1200, 0)
    for _ in range(3):
        for part in torch.randperm(len(images)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[part]), which[part]).backward()
            optimizer.step()
    yield model.eval()
    torch.set_num_threads(threads)


def test_accuracy_stays(trained: Any) -> None:
    """By real kernels, on images that were not seen."""
    images, which = digits(2000, 1)
    with torch.no_grad():
        quantised = kernels.quantize(trained, digits(400, 2)[0].split(100))
        assert len(quantised.report.replaced) == len(quantised.report.rows) == 13, quantised.report
        got = torch.cat([quantised(part).argmax(1) for part in images.split(100)])
        right, floating = (got == which).sum(), (trained(images).argmax(1) == which).sum()
    assert 0.7 < floating / len(images) < 0.999
    assert abs(right - floating) / len(images) <= 0.005


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU, or a PyTorch without CUDA")
def test_the_same_bits_on_a_gpu(trained: Any) -> None:
    """Of a network quantised on the CPU, in both memory formats."""
    images = digits(100, 1)[0]
    quantised = kernels.quantize(trained, [images], rest="eager")
    with torch.no_grad():
        wanted = quantised(images)
        try:
            quantised.cuda()
            for memory_format in (torch.contiguous_format, LAST):
                got = quantised(images.cuda().contiguous(memory_format=memory_format))
                assert torch.equal(got.cpu(), wanted)
        finally:
            trained.cpu()


def test_what_a_library_needs(stand_in: None) -> None:
    """The problems of a quantised model are those that its calls ask for, and no others."""
    model, x = Layers(QUANTISED["a chain"][0]).eval(), random(2, 3, 8, 8)
    quantised = kernels.quantize(model, [x], rest="eager")
    found = kernels.problems(quantised, x)
    assert [type(problem).__name__ for problem in found].count("PackProblem") == 1
    assert sorted(problem.lanes for problem in found if getattr(problem, "ci", 0) == 3) == [4, 4]  # an image's pixels
    assert sorted(found.values()) == [1] * 6 and all(operator_of(problem).name != "conv2d_nchw" for problem in found)
    asked = {problem.representative() for problem in ASKED}
    assert asked == set(found)
