"""Code that inductor wrote: it calls our operators as functions of tensors alone, made when it was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="no PyTorch here; make test-torch installs it and runs these tests")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import schedules.torch as kernels  # noqa: E402
from schedules.torch import inductor, operators  # noqa: E402
from schedules.torch.network import has_compiler  # noqa: E402

OP = torch.ops.schedules.softmax.default
CALL = "straight(torch.ops.schedules.{}.default, lambda"


@pytest.fixture(autouse=True)
def anew(fresh: None) -> Iterator[None]:
    """What inductor kept on disk may be from before."""
    if not has_compiler({"cpu"}):
        pytest.skip("no compiler of C++")
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def codes(function: Any, *arguments: Any) -> tuple[Any, list[str]]:
    """The result, and what inductor wrote for it."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(function, *arguments)  # type: ignore[no-any-return]


def block(x: Any, weight: Any) -> Any:
    y = kernels.conv2d(x.sin(), weight, padding=1, activation="relu")
    return kernels.softmax(y * 2, scale=0.5) + 1


def test_code_calls_functions_of_tensors() -> None:
    x, weight = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    y, (code,) = codes(compiled, x, weight)
    for name in ("conv2d_nchw", "softmax"):
        assert CALL.format(name) in code
    assert code.count("torch.ops.schedules") == 2
    for _ in range(3):
        torch.testing.assert_close(y, block(x, weight))
        x = torch.randn_like(x)
        y = compiled(x, weight)


def test_gradients() -> None:
    """Of several results too, with options that are no numbers, and one tensor given twice."""

    def loss(x: Any, target: Any) -> Any:
        y, lse = kernels.softmax(x.sin(), return_lse=True)
        z = kernels.softmax(x, mask=x)
        return (y * lse[:, None] + z).sum() + kernels.cross_entropy(x.cos(), target).sum()

    x, target = torch.randn(4, 6, requires_grad=True), torch.tensor([0, 5, 2, -100])
    compiled = torch.compile(loss, fullgraph=True, dynamic=False)
    (found,), written = codes(lambda: torch.autograd.grad(compiled(x, target), x))
    for name, code in zip(("softmax_lse", "softmax_grad"), written, strict=True):
        assert CALL.format(name) in code
    for _ in range(3):
        torch.testing.assert_close(found, torch.autograd.grad(loss(x, target), x)[0])
        (found,) = torch.autograd.grad(compiled(x, target), x)


def test_sizes_that_are_symbols_are_called_by_name() -> None:
    compiled = torch.compile(lambda x: kernels.softmax(x.sin()), fullgraph=True)
    for rows in (4, 5, 6, 9):
        x = torch.randn(rows, 6)
        torch._dynamo.mark_dynamic(x, 0)
        y, written = codes(compiled, x)
        assert not any("straight" in code for code in written)
        torch.testing.assert_close(y, torch.softmax(x.sin(), -1))


@pytest.mark.parametrize("missing", ["tag_to_layout_constraint", "make_fallback"])
def test_names_that_inductor_has_not(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """It then calls the operator as it does others."""
    from torch._inductor import lowering

    monkeypatch.delitem(lowering.lowerings, OP, raising=False)
    inductor._tell.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(lowering, missing)
        inductor.tell(OP)
    x = torch.randn(2, 3)
    y, (code,) = codes(torch.compile(kernels.softmax, dynamic=False), x)
    assert "straight" not in code
    torch.testing.assert_close(y, torch.softmax(x, -1))
    lowering.lowerings.pop(OP)
    inductor._tell.cache_clear()


def test_calls_that_cannot_be_written_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def straighten(node: Any, wrapper: Any) -> None:
        raise AttributeError

    monkeypatch.setattr(inductor, "_straighten", straighten)
    x = torch.randn(2, 3)
    y, (code,) = codes(torch.compile(kernels.softmax, dynamic=False), x)
    assert "straight" not in code and "torch.ops.schedules.softmax.default(" in code
    torch.testing.assert_close(y, torch.softmax(x, -1))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(function)
        return function(*args, **(kwargs or {}))


found: list[Any] = []


def test_what_is_known_is_no_longer_asked() -> None:
    """Until other bundles are used; by profilers and modes the operator is still seen."""
    asked: list[Any] = []

    def arguments(x: Any) -> Any:
        asked.append(x)
        return x, None, None, "softmax", 1.0, 0, False

    x = torch.randn(5, 3)
    call = operators.straight(OP, arguments)

    def check(count: int) -> None:
        torch.testing.assert_close(call(x), torch.softmax(x, -1))
        assert len(asked) == count

    for _ in range(3):
        check(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        check(2)
    assert "schedules::softmax" in [event.key for event in profile.key_averages()]
    found.clear()
    with Seen():
        check(3)
    assert OP in found
    check(4)
    check(4)
    kernels.use_bundles()
    check(5)
    check(5)
