from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.peers import convolution, cudnn
from benchmarks.peers.convolution import PEERS, call_of, peers_of, placed, require_patterns
from schedules.check.verify import judge
from schedules.core.arch import Arch
from schedules.core.arithmetic import BF16X3, FLOAT32, TF32
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.problem import Conv2dProblem
from schedules.core.registry import operator_of
from tests.benchmarks.peers import fake_cudnn, fake_torch
from tests.conftest import problem_of

# nothing square, nothing a multiple of anything
ODD: dict[str, Any] = dict(n=3, h=7, w=6, ci=5, co=9, kh=3, kw=2, stride=(2, 1), pad=(1, 0), dilation=(1, 2))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = fake_torch.install(monkeypatch)
    fake_cudnn.install(monkeypatch)
    yield found
    cudnn._handle.cache_clear()


def error_of(name: str, problem: Conv2dProblem) -> float:
    """The error of a peer's output, in units of the tolerance."""
    inputs = operator_of(problem).inputs(problem, np.random.default_rng(0))
    tensors = {a.name: fake_torch.tensor(array) for a, array in zip(problem.arguments(), inputs, strict=False)}
    (output,) = call_of(PEERS[name], problem, tensors)()
    return judge(problem, inputs, [placed(problem, output).contiguous()]).error


@pytest.mark.parametrize("operator", ["conv2d_nchw", "conv2d_nchw, packed", "conv2d_nhwc", "conv2d_hwcn"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("kernel", [{}, dict(kh=1, kw=1)])  # PyTorch may take a 1x1 filter for either layout
def test_every_layout_is_brought_to_the_peer_and_back(
    machine: Any, operator: str, layout: str, kernel: dict[str, int]
) -> None:
    operator, _, packed = operator.partition(", ")
    layouts = dict(filter_layout="hwoi") if packed else {}
    problem = problem_of(operator, **{**ODD, **kernel, **layouts}, dtype="float16")
    assert error_of(f"cudnn {layout} fp16", problem) <= 1
    wanted = {"nhwc": fake_torch.CHANNELS_LAST, "nchw": fake_torch.CONTIGUOUS}[layout]
    assert machine.convolutions == [{"format": wanted, "tf32": False, "benchmark": True}]


@pytest.mark.parametrize("ci, co", [(5, 9), (64, 32), (33, 70)])
def test_int8_in_groups_of_32(machine: Any, ci: int, co: int) -> None:
    problem = problem_of("conv2d_nchw32", **{**ODD, "ci": ci, "co": co})
    assert error_of("cudnn nhwc int8 algo 0", problem) <= 1
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_NOT_SUPPORTED"):
        error_of("cudnn nhwc int8 algo 1", problem)
    # float16 has data of its own: that of int8 would overflow it
    (output,) = call_of(PEERS["cudnn nhwc fp16"], problem, {})()
    assert output.shape == (3, co, problem.out_h, problem.out_w) and np.isfinite(output).all()


@pytest.mark.parametrize("operator", ["conv2d_nchw", "conv2d_nhwc"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_direct_float32_by_its_algorithm(machine: Any, operator: str, layout: str) -> None:
    assert error_of(f"cudnn {layout} fp32 algo 0", problem_of(operator, **ODD)) <= 1


def test_tf32_is_set_when_it_is_called(machine: Any) -> None:
    problem = problem_of("conv2d_nhwc", **ODD)
    tensors = {a.name: fake_torch.tensor(np.ones(a.shape, a.dtype)) for a in problem.arguments()}
    calls = [call_of(PEERS[name], problem, tensors) for name in ("cudnn nhwc tf32", "cudnn nhwc fp32")]
    for call in [*calls, *calls]:
        call()
    assert [seen["tf32"] for seen in machine.convolutions] == [True, False, True, False]


def test_which_peers_a_problem_has() -> None:
    def names(dtype: str, *patterns: str) -> list[str]:
        operator = "conv2d_nchw32" if dtype == "int8" else "conv2d_nhwc"
        return [peer.name for peer in peers_of(problem_of(operator, **ODD, dtype=dtype), patterns or ("*",))]

    assert names("float16") == ["cudnn nhwc fp16", "cudnn nchw fp16"]
    assert names("bfloat16") == ["cudnn nhwc bf16", "cudnn nchw bf16"]
    assert names("int8") == ["cudnn nhwc int8 algo 0", "cudnn nhwc int8 algo 1", "cudnn nhwc fp16"]
    direct = [f"cudnn {layout} fp32 algo {number}" for layout in ("nhwc", "nchw") for number in (0, 1)]
    assert names("float32") == [
        *direct,
        *(f"cudnn {how}" for how in ("nhwc fp32", "nchw fp32", "nhwc tf32", "nchw tf32")),
    ]
    assert names("float32", "*nhwc fp32", "*tf32") == ["cudnn nhwc fp32", "cudnn nhwc tf32", "cudnn nchw tf32"]
    tf32 = ["cudnn nhwc tf32", "cudnn nchw tf32"]
    for ours, left_out in ((FLOAT32, tf32), (BF16X3, tf32), (TF32, [])):
        assert [name for name, peer in PEERS.items() if not peer.counts(ours)] == left_out
    require_patterns(["*nhwc*"])
    with pytest.raises(UnknownNameError, match="did you mean 'cudnn nhwc fp16'"):
        require_patterns(["cudnn nhwc fp61"])


@pytest.mark.parametrize(
    "operator, fields, message",
    [
        ("conv2d_nhwc", dict(bias=True), "fuses nothing"),
        ("conv2d_nhwc", dict(activation="relu"), "fuses nothing"),
        ("conv2d_nchw32", dict(residual=True), "fuses nothing"),
        ("conv2d_nchw32", dict(out_dtype="int32", alpha=1.0), "gives int8, not int32"),
    ],
)
def test_what_is_not_the_same_work_is_refused(
    machine: Any, operator: str, fields: dict[str, Any], message: str
) -> None:
    problem = problem_of(operator, **ODD, **fields)
    with pytest.raises(UsageError, match=message):
        call_of(peers_of(problem)[0], problem, {})


def test_a_layout_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("conv2d_nhwc", **ODD)
    monkeypatch.setattr(convolution, "_AXES", {})
    with pytest.raises(UsageError, match="layout of conv2d_nhwc is not known"):
        placed(problem, np.zeros(1))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["stream", "graph"])
@pytest.mark.parametrize(
    "operator, fields",
    [
        ("conv2d_nhwc", dict(dtype="float16")),
        ("conv2d_nchw", dict(dtype="bfloat16", stride=2)),
        ("conv2d_hwcn", dict(dtype="float32")),
        ("conv2d_nchw32", dict()),
    ],
)
def test_a_case_on_the_device(gpu: Arch, operator: str, fields: dict[str, Any], launch: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    from benchmarks.peers.convolution_case import run_case
    from schedules.measure.choice import default_choice
    from schedules.measure.timer import CudaTimer

    problem = problem_of(operator, n=8, h=14, w=14, ci=64, co=96, kh=3, kw=3, pad=1, **fields)
    with CudaTimer() as timer:
        case = run_case(problem, gpu, default_choice(problem, gpu), ["*"], timer, 0.1, launch=launch)
    assert case["ours"]["us"] > 0 and case["ours"]["error"] <= 1, case["ours"]
    assert case["ratio"] > 0 and case["best"] in case["peers"]
    for name, words in case["peers"].items():
        assert words["us"] > 0 if "us" in words else "NOT_SUPPORTED" in words["failed"], f"{name}: {words}"
    # a tie of int8 may be rounded the other way; algorithms that multiply less are less exact in float32
    most = {"float32": 50, "int8": 2}.get(case["problem"]["dtype"], 1.5)
    assert all(words.get("error", 0) <= most for words in case["peers"].values() if words["counts"])
