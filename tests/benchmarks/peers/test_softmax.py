from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import softmax as peers
from schedules.check.verify import judge, poisoned
from schedules.core.arch import Arch
from schedules.core.errors import ToolchainError, UsageError
from schedules.operators.softmax.definition import FUNCTIONS, LOSSES, SoftmaxProblem
from schedules.operators.softmax.reference import inputs, reference
from tests.benchmarks.peers import fake_triton

FUSED = dict(scale=0.125, keep=0.9)


def test_without_pytorch_or_triton_the_remedy_is_named() -> None:
    problem = SoftmaxProblem(4, 8)
    if not importlib.util.find_spec("torch"):
        with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
            peers.eager(problem, {})
        with pytest.raises(ToolchainError, match="pip install 'te-schedules"):
            peers.cudnn_softmax(problem, {})
    if not importlib.util.find_spec("triton"):
        with pytest.raises(ToolchainError, match="Triton does not load"):
            peers.triton_softmax(problem, {})


@pytest.mark.parametrize("peer", [peers.cudnn_softmax, peers.triton_softmax])
def test_what_fuses_nothing_says_so(peer: peers.Peer) -> None:
    with pytest.raises(UsageError, match="fuses no scale"):
        peer(SoftmaxProblem(4, 8, scale=2.0), {})


@pytest.mark.parametrize("function", FUNCTIONS)
# one width for each kind of program: short rows that share one, rows of a block, rows that are read twice
@pytest.mark.parametrize("rows, cols", [(70, 33), (3, 2049), (2, 32769)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_triton_source_computes_the_function(
    monkeypatch: pytest.MonkeyPatch, function: str, rows: int, cols: int, dtype: str
) -> None:
    problem = SoftmaxProblem(rows, cols, function, dtype)
    given = list(inputs(problem, np.random.default_rng(1)))
    (output,) = poisoned(problem)
    tensors = dict(zip([argument.name for argument in problem.arguments()], [*given, output], strict=True))
    with fake_triton.installed(monkeypatch):
        (found,) = peers.triton_softmax(problem, tensors)()
    difference = judge(problem, given, [found], reference(problem, given))
    assert difference.passed, str(difference)


def test_a_masked_column_of_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SoftmaxProblem(1, 33000, "softmax", "float32")
    x = np.random.default_rng(0).standard_normal((1, 33000), dtype=np.float32)
    x[0, :10000] = -np.inf
    (y,) = poisoned(problem)
    with fake_triton.installed(monkeypatch):
        peers.triton_softmax(problem, {"x": x, "y": y})()
    assert judge(problem, [x], [y], reference(problem, [x])).passed


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("rows, cols", [(7, 33), (2, 32769)])
def test_the_triton_source_computes_losses(
    monkeypatch: pytest.MonkeyPatch, function: str, rows: int, cols: int
) -> None:
    problem, tensors, given, outputs = loss_case(function, rows, cols)
    with fake_triton.installed(monkeypatch):
        found = peers.triton_softmax(problem, tensors)()
    assert all(output is one for output, one in zip(outputs, found, strict=True))
    difference = judge(problem, given, outputs, reference(problem, given))
    assert difference.passed, str(difference)


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("peer", [peers.eager, lambda problem, tensors: expression(problem, tensors)])
def test_pytorch_computes_losses(function: str, peer: peers.Peer) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    problem, tensors, given, _ = loss_case(function, 7, 33)
    found = peer(problem, {name: torch.from_numpy(array) for name, array in tensors.items()})()
    difference = judge(problem, given, [output.numpy() for output in found], reference(problem, given))
    assert difference.passed, str(difference)


def expression(problem: SoftmaxProblem, tensors: peers.Tensors) -> Any:
    given = {argument.name: tensors[argument.name] for argument in problem.arguments() if not argument.output}
    return lambda: peers.composition(problem)(**given)


def loss_case(function: str, rows: int, cols: int) -> tuple[SoftmaxProblem, dict[str, Any], list[Any], list[Any]]:
    """With a row that is ignored."""
    problem = SoftmaxProblem(rows, cols, function, "float16", scale=0.5, ignore_index=5)
    given, outputs = list(inputs(problem, np.random.default_rng(1))), poisoned(problem)
    given[1][-1] = 5
    names = [argument.name for argument in problem.arguments()]
    return problem, dict(zip(names, [*given, *outputs], strict=True)), given, outputs


@pytest.mark.parametrize("peer", [peers.eager, peers.triton_softmax, peers.cudnn_softmax])
def test_what_a_loss_has_that_a_peer_has_not(peer: peers.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.cudnn, "torch_module", lambda: None)
    with fake_triton.installed(monkeypatch), pytest.raises(UsageError, match="has no"):
        peer(SoftmaxProblem(4, 8, "cross_entropy", smoothing=0.1), {})


def gpu_outputs(name: str, problem: SoftmaxProblem, arch: Arch) -> float:
    """The error of a peer, in units of the tolerance."""
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    from benchmarks.peers.bench import Bench

    bench = Bench(problem, arch, seed=3)
    call = peers.PEERS[name](problem, bench.tensors)
    bench.poison()
    return bench.judge(call())


@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.DEFAULT_PEERS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "rows, cols, dtype",
    [(1000, 100, "float16"), (77, 4096, "float32"), (3, 70000, "float16"), (500, 256, "bfloat16")],
)
def test_peers_compute_the_function(gpu: Arch, name: str, function: str, rows: int, cols: int, dtype: str) -> None:
    if dtype not in SoftmaxProblem.dtypes:
        pytest.skip(f"the softmax problem takes no {dtype}")
    if name == "torch" and function == "softmax_grad" and dtype != "float32":
        pytest.skip("PyTorch rounds y * dy to the tensors' dtype before it sums: 5 to 2000 times the tolerance")
    assert gpu_outputs(name, SoftmaxProblem(rows, cols, function, dtype), gpu) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "torch.compile"])
@pytest.mark.parametrize("fields", [dict(function="softmax", mask="full"), dict(function="softmax_grad")])
def test_fused_peers_compute_the_function(gpu: Arch, name: str, fields: dict[str, Any]) -> None:
    # float32: in float16 the composition rounds after each step, which the tolerance of one kernel does not allow
    assert gpu_outputs(name, SoftmaxProblem(333, 1000, dtype="float32", **FUSED, **fields), gpu) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.COPIES)
def test_copies_copy(gpu: Arch, name: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.randn(100, 77, device="cuda", dtype=torch.float16)
    y = torch.zeros_like(x)
    peers.COPIES[name](SoftmaxProblem(100, 77), {"x": x, "y": y})()
    torch.cuda.synchronize()
    assert torch.equal(x, y)
