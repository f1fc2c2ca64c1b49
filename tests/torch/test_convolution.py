from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.core.errors import ArgumentError, DerivativeError, ProblemError  # noqa: E402
from schedules.operators.conv2d_nchw.packing import pack_filter  # noqa: E402
from schedules.operators.conv2d_nchw32.definition import Nchw32Problem, inputs, reference  # noqa: E402
from schedules.torch import convolution  # noqa: E402

OPS = torch.ops.schedules
LAST = torch.channels_last


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    kernel=st.tuples(*[st.integers(1, 3)] * 2),
    stride=st.tuples(*[st.integers(1, 2)] * 2),
    dilation=st.integers(1, 2),
    channels_last=st.booleans(),
    bias=st.booleans(),
)
@settings(max_examples=6)
def test_conv2d_in_both_formats(
    sizes: tuple[int, int, int], kernel: Any, stride: Any, dilation: int, channels_last: bool, bias: bool
) -> None:
    n, ci, co = sizes
    x, weight = random(n, ci, 7, 6), random(co, ci, *kernel, seed=1)
    terms = random(co, seed=2) if bias else None
    wanted = torch.nn.functional.conv2d(x, weight, terms, stride, 1, dilation).relu()
    if channels_last:
        x, weight = x.to(memory_format=LAST), weight.to(memory_format=LAST)
    y = kernels.conv2d(x, weight, terms, stride, 1, dilation, activation="relu")
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    assert y.is_contiguous(memory_format=LAST if channels_last and not x.is_contiguous() else torch.contiguous_format)


def test_images_of_one_pixel_are_channels_last_too() -> None:
    x, weight, added = random(3, 5, 1, 1), random(6, 5, 1, 1, seed=1), random(3, 6, 1, 1, seed=2)
    y = kernels.conv2d(x, weight, residual=added)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, weight) + added, rtol=1e-4, atol=1e-4)
    assert y.is_contiguous() and y.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=["nchw", "last"])
def test_a_call_like_one_before_goes_to_its_kernel_with_the_same_views(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, resolved = convolution._as_pytorch, []
    monkeypatch.setattr(convolution, "_as_pytorch", lambda *given: resolved.append(given) or true(*given))
    weight, bias = random(4, 3, 3, 2, seed=1).to(memory_format=form), random(4, seed=2)

    def same(seed: int, added_form: Any = form, **options: Any) -> None:
        x, added = random(2, 3, 6, 5, seed=seed).to(memory_format=form), random(2, 4, 6, 4, seed=seed)
        added = added.to(memory_format=added_form)
        y = kernels.conv2d(x, weight, bias, 1, (1, 0), residual=added, **options)
        wanted = torch.nn.functional.conv2d(x, weight, bias, 1, (1, 0)) + added
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        assert y.is_contiguous(memory_format=form) and y.stride() == wanted.to(memory_format=form).stride()

    for seed in range(3):
        same(seed)
    assert len(resolved) == 1
    for seed in range(2):
        same(seed, LAST if form is torch.contiguous_format else torch.contiguous_format)
    assert len(resolved) == 2
    with torch.profiler.profile():
        same(5)
    assert len(resolved) == 3
    x = random(2, 3, 6, 5).to(memory_format=form)
    for _ in range(2):  # "same" pads x on one side here: its copy is no view
        y = kernels.conv2d(x, weight, bias, padding="same")
        wanted = torch.nn.functional.conv2d(x, weight, bias, padding="same")
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    assert len(resolved) == 5


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu6": torch.nn.functional.relu6,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "hardswish": torch.nn.functional.hardswish,
    "clamp:-1:0.5": lambda y: y.clamp(-1, 0.5),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_are_those_of_pytorch(activation: str) -> None:
    x, weight, bias, residual = random(2, 3, 6, 5), random(4, 3, 3, 3, seed=1), random(4, seed=2), random(2, 4, 6, 5)
    wanted = ACTIVATIONS[activation](torch.nn.functional.conv2d(x, weight, bias, padding=1) + residual)
    for each in (x, x.to(memory_format=LAST)):
        y = kernels.conv2d(each, weight, bias, padding=1, residual=residual, activation=activation)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    turned = [tensor.permute(2, 3, 1, 0) for tensor in (x, weight, residual)]
    y = kernels.conv2d_hwcn(*turned[:2], padding=1, bias=bias, residual=turned[2], activation=activation)
    torch.testing.assert_close(y.permute(3, 2, 0, 1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 3, 3, 3), {"padding": "same", "stride": (1,)}),
        ((4, 3, 3, 2), {"padding": "same", "dilation": (2, 1)}),
        ((4, 3, 2, 4), {"padding": "same"}),
        ((4, 3, 3, 3), {"padding": "valid", "stride": (2,), "dilation": 2}),
        ((6, 1, 3, 3), {"padding": (1, 2), "groups": 3, "stride": (1, 2)}),
    ],
)
def test_arguments_as_pytorch_takes_them(shape: Any, options: Any) -> None:
    x, weight, bias = random(2, 3, 6, 5), random(*shape, seed=1), random(shape[0], seed=2)
    wanted = torch.nn.functional.conv2d(x, weight, bias, **options)
    for each in (x, x.to(memory_format=LAST)):
        y = kernels.conv2d(each, weight, bias, activation="clamp:-1:1", residual=wanted, **options)
        torch.testing.assert_close(y, (2 * wanted).clamp(-1, 1), rtol=1e-4, atol=1e-4)
    empty = kernels.conv2d(x[:0], weight, bias, **options)
    assert empty.shape == (0, *wanted.shape[1:]) and empty.dtype is x.dtype


def test_autocast_casts_as_it_does_for_pytorch() -> None:
    x, weight, bias = random(2, 3, 6, 5), random(4, 3, 3, 3, seed=1), random(4, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wanted = kernels.conv2d(x, weight, bias), torch.nn.functional.conv2d(x, weight, bias)
        with torch.autocast("cpu", enabled=False):
            assert kernels.conv2d(x, weight, bias).dtype is torch.float32
    assert y.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=0.05, atol=0.05)


def test_scales_of_int8_are_rounded_to_float32() -> None:
    alpha = 0.1 / 3
    assert float(np.float32(alpha)) != alpha
    assert torch.equal(_int8(alpha), _int8(float(np.float32(alpha))))


def test_other_layouts() -> None:
    x, weight = random(3, 4, 6, 5), random(5, 4, 3, 2, seed=1)
    wanted = torch.nn.functional.conv2d(x, weight, None, (2, 1), (1, 0))
    # neither operand is contiguous after these permutations: it is copied
    y = kernels.conv2d_hwcn(x.permute(2, 3, 1, 0), weight.permute(2, 3, 1, 0), (2, 1), (1, 0))
    torch.testing.assert_close(y.permute(3, 2, 0, 1), wanted, rtol=1e-4, atol=1e-4)
    packed = torch.from_numpy(pack_filter(weight.numpy()))
    y = kernels.conv2d_nchw(x, packed, None, (2, 1), (1, 0), filter_layout="hwoi")
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("alpha", "beta", "gamma"), [("channel", "alpha", "tensor"), ("tensor", "channel", 0.7)])
def test_scales_at_run_time_share_a_build(
    alpha: str, beta: str, gamma: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one shape and other scales."""
    built: list[Any] = []
    true = convolution.kernel_for
    monkeypatch.setattr(convolution, "kernel_for", lambda *given: built.append(given) or true(*given))
    sizes = dict(n=2, h=5, w=4, ci=40, co=64, kh=3, kw=3, pad=(1, 1))
    problem = Nchw32Problem(**sizes, bias=True, residual=True, alpha=alpha, beta=beta, gamma=gamma)
    outputs = []
    for seed in range(3):
        data, weight, bias, residual, *scales = inputs(problem, np.random.default_rng(seed))
        tensors = [torch.from_numpy(array) for array in (data, weight, bias, residual)]
        given = dict(zip((name for name in ("alpha", "beta", "gamma") if name in names(problem)), scales, strict=True))
        words = {"alpha": alpha, "beta": None if beta == "alpha" else beta, "gamma": gamma}
        words |= {name: torch.from_numpy(array) for name, array in given.items()}
        y = kernels.conv2d_nchw32(*tensors, padding=1, **words)
        assert np.array_equal(y.numpy(), reference(problem, [data, weight, bias, residual, *scales])[0].values)
        outputs.append(y)
    assert len(built) == 1 and not torch.equal(outputs[0], outputs[1])


def names(problem: Nchw32Problem) -> list[str]:
    return [argument.name for argument in problem.arguments()]


def test_bad_scales_are_refused() -> None:
    def call(**scales: Any) -> Any:
        data, weight = torch.ones(1, 2, 4, 4, 32, dtype=torch.int8), torch.ones(2, 1, 1, 64, 32, dtype=torch.int8)
        return kernels.conv2d_nchw32(data, weight, **scales)

    good = torch.full((64,), 0.01)
    first = call(alpha=good)
    good[7] = -1.0  # seen before, and changed since
    for error, text, alpha in (
        (ProblemError, "alpha=0 is not a positive float32", 0.0),
        (ProblemError, "alpha=-0.5 is not a positive float32", -0.5),
        (ProblemError, "alpha=nan is not a positive float32", float("nan")),
        (ProblemError, "alpha=alpha is not a number, tensor or channel", None),
        (ArgumentError, "alpha has scales that are not positive and finite", good),
        (ArgumentError, "alpha has scales that are not positive and finite", torch.tensor([float("inf")])),
        (ArgumentError, "alpha has scales that are not positive and finite", torch.zeros(1)),
        (ArgumentError, r"alpha has shape \(0,\), needed \(64,\)", torch.ones(0)),
        (ArgumentError, r"alpha has shape \(40,\), needed \(64,\)", torch.ones(40)),
        (ArgumentError, r"alpha has shape \(\), needed \(1,\)", torch.tensor(1.0)),
        (ArgumentError, "alpha has dtype float64, needed float32", torch.ones(64).double()),
    ):
        with pytest.raises(error, match=text) as caught:
            call(alpha=alpha)
        assert "\n" not in str(caught.value)
    good[7] = 0.01
    assert torch.equal(call(alpha=good), first)
    with torch.inference_mode(), pytest.raises(ArgumentError, match="not positive"):
        call(alpha=torch.zeros(1))


@pytest.mark.parametrize(("out_dtype", "alpha"), [("int8", 2.0**-9), ("int32", 3.0), ("float32", 0.125)])
def test_int8_with_its_epilogue(out_dtype: str, alpha: float) -> None:
    problem = Nchw32Problem(
        n=2, h=5, w=4, ci=64, co=32, kh=3, kw=3, pad=(1, 1), bias=True, residual=True, activation="relu",
        out_dtype=out_dtype, alpha=alpha, beta=2.0, gamma=1.0,
    )  # fmt: skip
    arrays = inputs(problem, np.random.default_rng(0))
    y = kernels.conv2d_nchw32(
        *map(torch.from_numpy, arrays), padding=1, alpha=alpha, beta=2.0, activation="relu",
        out_dtype=getattr(torch, out_dtype),
    )  # fmt: skip
    assert np.array_equal(y.numpy(), reference(problem, arrays)[0].values)


def test_int8_of_an_image_reads_its_channels() -> None:
    problem = Nchw32Problem(n=2, h=5, w=4, ci=3, co=32, kh=3, kw=3, pad=(1, 1), alpha=0.125)
    arrays = inputs(problem, np.random.default_rng(0))
    y = kernels.conv2d_nchw32(*map(torch.from_numpy, arrays), padding=1, alpha=0.125, channels=3)
    assert np.array_equal(y.numpy(), reference(problem, arrays)[0].values)


def test_what_it_does_not_take() -> None:
    x, weight, bias = random(2, 3, 6, 5), random(4, 3, 3, 3), random(4)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ProblemError, "dtype=float64", lambda: kernels.conv2d(x.double(), weight.double())),
        (ArgumentError, "filter has dtype float16", lambda: kernels.conv2d(x, weight.half())),
        (ArgumentError, r"filter has shape \(4, 2, 3, 3\)", lambda: kernels.conv2d(x, weight[:, :2])),
        (ArgumentError, r"data has shape .*needed \(n, ci, h, w\)", lambda: kernels.conv2d_nchw(x[0], weight)),
        (ArgumentError, "bias has shape", lambda: kernels.conv2d(x, weight, bias[:3])),
        (ProblemError, "activation=swish", lambda: kernels.conv2d(x, weight, activation="swish")),
        (ArgumentError, "residual has shape", lambda: kernels.conv2d(x, weight, residual=x)),
        (ProblemError, "kh=3 reaches over", lambda: kernels.conv2d(x[:, :, :2], weight)),
        (ArgumentError, "neither a number nor one", lambda: kernels.conv2d(x, weight, stride=(1, 1, 1))),
        (ArgumentError, "padding='full' is not", lambda: kernels.conv2d(x, weight, padding="full")),
        (ArgumentError, 'padding="same" is for stride=1', lambda: kernels.conv2d(x, weight, stride=2, padding="same")),
        (ArgumentError, "filter has shape", lambda: _int8(1.0, lanes=16)),
        (ArgumentError, "channels=33 are not in 1 groups of 32", lambda: _int8(1.0, channels=33)),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()


def _int8(alpha: float, lanes: int = 32, channels: int | None = None) -> Any:
    data, weight = torch.ones(1, 1, 4, 4, lanes), torch.full((1, 1, 1, 32, 32), 3)
    return kernels.conv2d_nchw32(data.to(torch.int8), weight.to(torch.int8), alpha=alpha, channels=channels)


def test_forward_only() -> None:
    x, weight = random(2, 3, 6, 5), random(4, 3, 3, 3).requires_grad_()
    y = kernels.conv2d(x, weight)
    with pytest.raises(DerivativeError, match="conv2d_nchw computes no gradients"):
        y.sum().backward()


def test_operators_keep_pytorchs_contract() -> None:
    x, weight, bias = random(2, 3, 6, 5), random(4, 3, 3, 3), random(4)
    sizes = [1, 1], [1, 1], [1, 1]
    # its gradients are none
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    torch.library.opcheck(
        OPS.conv2d_nchw.default,
        (x, weight, bias, None, *sizes, "relu", "oihw"),
        test_utils=[*checks, "test_aot_dispatch_dynamic"],
    )
    data, filters = torch.zeros(1, 1, 4, 4, 32).to(torch.int8), torch.zeros(1, 1, 1, 32, 32).to(torch.int8)
    bias, scales = torch.ones(32, dtype=torch.int32), torch.full((32,), 0.5)
    for tensors, numbers in (((None,) * 4, (1.0,) * 3), ((bias, None, scales, None), (None, None, 1.0))):
        bias, residual, alpha, beta = tensors
        arguments = data, filters, bias, residual, alpha, beta, None, *sizes, *numbers, "none", "float32", None
        torch.library.opcheck(OPS.conv2d_nchw32.default, arguments, test_utils=checks)


def test_compiles_without_a_graph_break() -> None:
    x, weight, bias = random(2, 3, 6, 5).to(memory_format=LAST), random(4, 3, 3, 3), random(4)

    def block(x: Any) -> Any:
        return kernels.conv2d(x, weight, bias, padding=1).sigmoid()

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    assert compiled(x).stride() == block(x).stride()
