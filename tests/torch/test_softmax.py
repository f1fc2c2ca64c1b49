from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

import schedules.torch as kernels  # noqa: E402
from schedules.core import philox  # noqa: E402
from schedules.core.errors import ArgumentError, DerivativeError, ProblemError  # noqa: E402

PAIRS = [(kernels.softmax, torch.softmax), (kernels.log_softmax, torch.log_softmax)]
OPS = torch.ops.schedules


def random(*shape: int, grad: bool = False, seed: int = 0, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def drops(*shape: int, keep: float) -> Any:
    generator = torch.Generator().manual_seed(9)
    return (torch.rand(shape, generator=generator) < keep).to(torch.uint8)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dim=st.integers(-4, 3),
    cols=st.sampled_from((1, 7, 32)),
)
@settings(max_examples=6)
def test_any_shape_and_axis_with_gradients(ours: Any, theirs: Any, shape: list[int], dim: int, cols: int) -> None:
    dim %= len(shape)
    shape[dim] = cols
    x, dy = random(*shape, grad=True), random(*shape, seed=1)
    y, wanted = ours(x, dim), theirs(x, dim)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: Any) -> None:
    x, dy = random(6, 33, grad=True, dtype=dtype), random(6, 33, seed=1, dtype=dtype)
    y = kernels.softmax(x)
    assert y.dtype is dtype
    wanted = torch.softmax(x.float(), -1)
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-3)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx.float(), torch.autograd.grad(wanted, x, dy.float())[0].float(), rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [(6, 9), (2, 3, 4, 33), (3, 1), (2, 5, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_which_the_first_elements_take_part(
    ours: Any, theirs: Any, shape: tuple[int, ...], causal: bool
) -> None:
    """As PyTorch has it of what a mask fills with -inf; a row of nothing is NaN."""
    queries, cols = shape[-2:]
    if causal and queries > cols:
        return
    x, dy = random(*shape, grad=True), random(*shape, seed=1)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, cols + 1, shape[:-1], generator=generator, dtype=torch.int32)
    of_row = torch.arange(queries) + cols - queries + 1 if causal else lengths
    filled = x.masked_fill(torch.arange(cols) >= of_row[..., None], -torch.inf)
    y, wanted = ours(0.5 * x, causal=True) if causal else ours(x, lengths=lengths, scale=0.5), theirs(0.5 * filled, -1)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])
    lengths.view(-1)[0] = 0
    assert causal or ours(x, lengths=lengths).reshape(-1, cols)[0].isnan().all()


def test_what_takes_part_is_said_once() -> None:
    x, lengths = random(3, 5), torch.ones(3, dtype=torch.int32)
    for words, options in {
        "exclude one another": dict(lengths=lengths, causal=True),
        "are torch.int32, one for each row": dict(lengths=lengths.long()),
        "one for each row of x": dict(lengths=lengths[:2]),
        "not the last axis": dict(lengths=lengths, dim=0),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            kernels.softmax(x, **options)
    with pytest.raises(ArgumentError, match="causal is for"):
        kernels.softmax(x[0], causal=True)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 1), (3, 5, 7), (1, 1, 7), (3, 1, 1), ()])
def test_scale_and_mask_of_any_shape_that_broadcasts(shape: tuple[int, ...]) -> None:
    x, mask, dy = random(3, 5, 7, grad=True), random(*shape, grad=True, seed=1), random(3, 5, 7, seed=2)
    y, wanted = kernels.softmax(x, scale=0.3, mask=mask), torch.softmax(0.3 * x + mask, -1)
    torch.testing.assert_close(y, wanted)
    for got, expected in zip(*(torch.autograd.grad(out, (x, mask), dy) for out in (y, wanted)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7)])
def test_temperatures_with_gradients(ours: Any, theirs: Any, shape: tuple[int, ...]) -> None:
    """A number, one tensor, one a row with and without the axis; with a mask that has a gradient."""
    x, dy, mask = random(*shape, grad=True), random(*shape, seed=1), random(7, grad=True, seed=2)
    of_rows = random(*shape[:-1], seed=3).abs().add(0.5)
    for temperature in (0.7, torch.tensor(0.7), torch.tensor([1.3]), of_rows, of_rows[..., None]):
        over = temperature[..., None] if temperature is of_rows else temperature
        if isinstance(temperature, torch.Tensor):
            temperature, over = (tensor.clone().requires_grad_() for tensor in (temperature, over))
        leaves = [x, mask]
        y, wanted = ours(x, temperature=temperature, mask=mask, scale=0.5), theirs(0.5 * x / over + mask, -1)
        torch.testing.assert_close(y, wanted)
        for got, expected in zip(*(torch.autograd.grad(each, leaves, dy) for each in (y, wanted)), strict=True):
            torch.testing.assert_close(got, expected)
        if isinstance(temperature, torch.Tensor):
            (got,) = torch.autograd.grad(ours(x, temperature=temperature), temperature, dy)
            (expected,) = torch.autograd.grad(theirs(x / over, -1), over, dy)
            torch.testing.assert_close(got.flatten(), expected.flatten())


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("dim", [-1, 0])
def test_log_sum_exp_beside_it(ours: Any, theirs: Any, dim: int) -> None:
    x, dy = random(4, 6, grad=True), random(4, 6, seed=1)
    (y, lse), wanted = ours(x, dim, return_lse=True, scale=0.5), (theirs(0.5 * x, dim), torch.logsumexp(0.5 * x, dim))
    torch.testing.assert_close((y, lse), wanted)
    dlse = random(*lse.shape, seed=2)
    for outputs, gradients in ((0, 1), (1, 2), (0, 2)):
        pairs = [(y, wanted[0], dy), (lse, wanted[1], dlse)][outputs:gradients]
        got, expected = (
            torch.autograd.grad([pair[k] for pair in pairs], x, [pair[2] for pair in pairs], retain_graph=True)
            for k in (0, 1)
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_of_16_bits(ours: Any, theirs: Any, dtype: Any) -> None:
    x, dy = random(6, 33, grad=True, dtype=dtype), random(6, 33, seed=1)
    y, wanted = ours(x, dtype=torch.float32), theirs(x, -1, dtype=torch.float32)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, wanted)
    got, expected = (torch.autograd.grad(each, x, dy)[0] for each in (y, wanted))
    assert got.dtype is dtype
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)
    assert ours(x.float(), dtype=torch.float32).dtype is torch.float32
    with pytest.raises(ArgumentError, match="is not torch.float32, nor x's"):
        ours(x.float(), dtype=torch.float16)


def test_in_place() -> None:
    for shape, log in (((4, 6), False), ((2, 3, 6), True)):
        x, mask = random(*shape), random(6, seed=1)
        wanted = (torch.log_softmax if log else torch.softmax)(x / 0.5 + mask, -1)
        assert kernels.softmax_(x, temperature=0.5, mask=mask, log=log) is x
        torch.testing.assert_close(x, wanted)
    for words, call in {
        "records no gradient": lambda: kernels.softmax_(random(4, 6, grad=True)),
        "wants a contiguous tensor": lambda: kernels.softmax_(random(4, 6).t()),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            call()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1, ignore_index=2)], ids=str)
def test_cross_entropy_with_its_gradient(reduction: str, inplace: bool, options: dict[str, Any]) -> None:
    logits, target = random(5, 9, grad=True), torch.tensor([0, 8, 2, 2, 5])
    wanted = torch.nn.functional.cross_entropy(logits / 0.7, target, reduction=reduction, **options)
    dloss = random(*wanted.shape, seed=1)
    (expected,) = torch.autograd.grad(wanted, logits, dloss)
    ours = logits.detach().clone().requires_grad_()
    loss = kernels.cross_entropy(ours, target, reduction=reduction, temperature=0.7, inplace=inplace, **options)
    torch.testing.assert_close(loss, wanted)
    (got,) = torch.autograd.grad(loss, ours, dloss)
    torch.testing.assert_close(got, expected)
    assert (got.data_ptr() == ours.data_ptr()) == inplace


def test_cross_entropy_and_gradient_in_one_kernel() -> None:
    logits, target = random(2, 5, 9, grad=True, dtype=torch.bfloat16), torch.randint(9, (2, 5))
    flat = torch.nn.functional.cross_entropy(logits.float().view(10, 9), target.view(10), reduction="none")
    squares = torch.logsumexp(logits.float(), -1) ** 2
    wanted = flat.view(2, 5) + 0.01 * squares
    (expected,) = torch.autograd.grad(wanted.sum() / 10, logits)
    logits = logits.detach()
    for inplace in (False, True):
        loss, got = kernels.cross_entropy_with_grad(logits, target, 0.1, z_loss=0.01, inplace=inplace)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-3)
    assert got is logits


def test_what_cross_entropy_does_not_take() -> None:
    x, target = random(4, 6), torch.zeros(4, dtype=torch.int64)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ArgumentError, "reduction=max is not", lambda: kernels.cross_entropy(x, target, reduction="max")),
        (ArgumentError, "target are torch.int64", lambda: kernels.cross_entropy(x, target.int())),
        (ArgumentError, "one for each row", lambda: kernels.cross_entropy(x, target[:2])),
        (ArgumentError, "temperature is a number", lambda: kernels.softmax(x, temperature=torch.ones(3))),
        (ProblemError, "smoothing=2.0", lambda: kernels.cross_entropy(x, target, label_smoothing=2.0)),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    assert kernels.cross_entropy(x[:0], target[:0], reduction="sum") == 0


def test_a_mask_of_one_row_for_one_row() -> None:
    x, mask = random(7), random(7, seed=1)
    torch.testing.assert_close(kernels.softmax(x, mask=mask), torch.softmax(x + mask, -1))


def test_masked_columns_are_zero_along_another_axis() -> None:
    x, mask = (
        random(4, 5, 3),
        torch.zeros(4, 5, 1).masked_fill_(torch.tensor([0, 1, 0, 1, 0]).bool()[:, None], -torch.inf),
    )
    torch.testing.assert_close(kernels.softmax(x, 1, mask=mask), torch.softmax(x + mask, 1))
    torch.testing.assert_close(kernels.softmax(x, 1, mask=mask == 0), torch.softmax(x + mask, 1))


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("shape", [None, (6,), (4, 6)])
def test_dropout_is_the_same_forward_and_backward(dim: int, shape: tuple[int, ...] | None) -> None:
    p, x, dy, drop = 0.3, random(4, 6, grad=True), random(4, 6, seed=1), drops(4, 6, keep=0.7)
    mask = random(*shape, seed=2) if shape else None
    y = kernels.dropout_softmax(x, p, dim, scale=2.0, mask=mask, drop=drop)
    wanted = torch.softmax(2.0 * x + (0 if mask is None else mask), dim) * drop / (1 - p)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])


def test_dropout_draws_from_pytorchs_generator() -> None:
    x = random(64, 32, grad=True)
    torch.manual_seed(5)
    first = kernels.dropout_softmax(x, 0.25)
    torch.manual_seed(5)
    assert torch.equal(first, kernels.dropout_softmax(x, 0.25))
    assert not torch.equal(first, kernels.dropout_softmax(x, 0.25))
    assert 0.2 < (first == 0).double().mean() < 0.3
    # what was dropped takes no part in the gradient of the sum of what was kept
    (dx,) = torch.autograd.grad(first.sum(), x)
    y = torch.softmax(x, -1)
    (wanted,) = torch.autograd.grad((y * (first != 0) / 0.75).sum(), x)
    torch.testing.assert_close(dx, wanted, rtol=1e-4, atol=1e-6)
    assert torch.equal(kernels.dropout_softmax(x, 0.25, training=False), kernels.softmax(x))


@pytest.mark.parametrize(("dim", "shape"), [(-1, (3, 4, 7)), (1, (5, 6)), (0, (9, 8))])
def test_dropout_of_a_seed_and_an_offset(dim: int, shape: tuple[int, ...]) -> None:
    """By an element's number in rows along `dim`; forward and backward."""
    x, dy, state = random(*shape, grad=True), random(*shape, seed=1), torch.tensor([-(2**62) + 3, 2**40 + 8])
    count = x.numel()
    kept = philox.words(*state.tolist(), np.arange(-(-count // 4) * 4))[:count] < philox.threshold(0.7)
    drop = torch.from_numpy(kept).view(x.movedim(dim, -1).shape).movedim(-1, dim)
    y = kernels.dropout_softmax(x, 0.3, dim, drop=state)
    wanted = torch.softmax(x, dim) * drop / 0.7
    assert torch.equal(y != 0, drop)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])
    state[1] += 4
    assert not torch.equal(kernels.dropout_softmax(x, 0.3, dim, drop=state) != 0, drop)


def test_both_outputs_of_the_operator_are_differentiable() -> None:
    x, drop = random(4, 6, grad=True), drops(4, 6, keep=0.5)
    weights = random(4, 6, seed=1), random(4, 6, seed=2)
    plain = torch.softmax(x, -1)
    for total in (lambda y, out: (y * weights[0]).sum(), lambda y, out: (y * weights[0] + out * weights[1]).sum()):
        got = total(*OPS.dropout_softmax(x, None, drop, "softmax", 1.0, 0.5))
        wanted = total(plain, plain * drop / 0.5)
        torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.autograd.grad(wanted, x, retain_graph=True)[0])


def test_tensors_as_views_and_without_elements() -> None:
    x = random(6, 10)
    for view in (x.t(), x[:, ::2], x[1:, 3:], x[:, :1].expand(6, 4)):
        torch.testing.assert_close(kernels.softmax(view), torch.softmax(view, -1))
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        empty = torch.empty(shape, requires_grad=True)
        y = kernels.softmax(empty)
        assert y.shape == shape and torch.autograd.grad(y.sum(), empty)[0].shape == shape


def test_what_it_does_not_take() -> None:
    x = random(4, 6)
    refused: list[tuple[type[Exception], str, Any]] = [
        (ProblemError, "dtype=float64", lambda: kernels.softmax(x.double())),
        (ArgumentError, "dim=2 is no axis", lambda: kernels.softmax(x, 2)),
        (ArgumentError, "dim=-1 is no axis", lambda: kernels.softmax(torch.tensor(1.0))),
        (ArgumentError, "does not broadcast", lambda: kernels.softmax(x, mask=random(5))),
        (ArgumentError, "mask has dtype float16", lambda: kernels.softmax(x, mask=x.half())),
        (ArgumentError, "p=1.0 is not", lambda: kernels.dropout_softmax(x, 1.0)),
        (ArgumentError, "a tensor of shape", lambda: kernels.dropout_softmax(x, 0.5, drop=drops(4, 3, keep=0.5))),
        (ArgumentError, r"shape \(3,\)", lambda: kernels.dropout_softmax(x, 0.5, drop=torch.tensor([1, 2, 3]))),
        (ArgumentError, "drop has dtype bool", lambda: kernels.dropout_softmax(x, 0.5, drop=x > 0)),
        (ProblemError, "scale=0", lambda: kernels.softmax(x, scale=0.0)),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()


def test_no_second_derivative() -> None:
    x = random(4, 6, grad=True)
    (dx,) = torch.autograd.grad(kernels.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(DerivativeError, match="second derivative"):
        dx.sum().backward()


def test_operators_keep_pytorchs_contract() -> None:
    """Schemas, fake tensors, registered gradients and tracing, by PyTorch's own checks."""
    x, mask, drop = random(4, 6, grad=True), random(6, grad=True), drops(4, 6, keep=0.5)
    torch.library.opcheck(OPS.softmax.default, (x, mask, None, "softmax", 0.5, 0, False))
    turned = random(3, 4, 6).transpose(0, 1)
    torch.library.opcheck(OPS.softmax.default, (turned, None, None, "log_softmax", 1.0, 0, False))
    for dropped in (drop, torch.tensor([7, 8])):
        torch.library.opcheck(OPS.dropout_softmax.default, (x, None, dropped, "softmax", 1.0, 0.5))
        gradient = random(4, 6), random(4, 6), dropped, None, None, "softmax", 1.0, 0.5, None
        torch.library.opcheck(OPS.softmax_grad.default, gradient)


def test_operators_of_losses_keep_pytorchs_contract() -> None:
    logits, target, ones = random(4, 6, grad=True), torch.tensor([0, 5, 2, 2]), torch.ones(4)
    options = 1.0, 0.1, 0.0, 2
    torch.library.opcheck(OPS.softmax_lse.default, (logits, None, ones, "softmax", 0.5, 0, False))
    torch.library.opcheck(OPS.cross_entropy.default, (logits, target, None, *options, False))
    torch.library.opcheck(OPS.cross_entropy_grad.default, (random(4, 6), target, ones, ones, *options))
    for call, arguments in (
        (OPS.cross_entropy_grad_.default, (random(4, 6), target, ones, None, *options)),
        (OPS.softmax_.default, (random(4, 6), None, None, "softmax", 1.0)),
    ):
        torch.library.opcheck(call, arguments, test_utils=("test_schema", "test_faketensor"))


def loss_of(x: Any, target: Any) -> Any:
    y, lse = kernels.softmax(x, temperature=0.5, return_lse=True)
    return kernels.cross_entropy(x, target, label_smoothing=0.1) + (y * lse[:, None]).sum()


def test_losses_compile_without_a_graph_break() -> None:
    x, target = random(4, 6, grad=True), torch.tensor([0, 5, 2, -100])
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True, dynamic=False)
    for function in (compiled, loss_of):
        loss = function(x, target)
        (dx,) = torch.autograd.grad(loss, x)
        if function is compiled:
            found = loss, dx
    torch.testing.assert_close(found, (loss, dx))


def block(x: Any, mask: Any) -> Any:
    y = kernels.softmax(x * 2, scale=0.5, mask=mask) + kernels.log_softmax(x, 0)
    return y * kernels.dropout_softmax(x, 0.5).sum()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(backend: str) -> None:
    x, mask = random(4, 6, grad=True), random(6)
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)

    def results(function: Any) -> tuple[Any, Any]:
        torch.manual_seed(3)
        y = function(x, mask)
        return y, torch.autograd.grad(y.sum(), x)[0]

    # by default inductor draws other numbers than PyTorch's generator
    with torch._inductor.config.patch(fallback_random=True):
        found = results(compiled)
    for got, wanted in zip(found, results(block), strict=True):
        torch.testing.assert_close(got, wanted)


def test_compiles_once_for_all_numbers_of_rows() -> None:
    torch.compiler.reset()
    compiled = torch.compile(kernels.softmax, backend="aot_eager", fullgraph=True)
    count = 0
    for rows in (4, 5, 6, 9):
        x = random(rows, 6)
        torch._dynamo.mark_dynamic(x, 0)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch.testing.assert_close(compiled(x), torch.softmax(x, -1))
        count += torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert count == 1
