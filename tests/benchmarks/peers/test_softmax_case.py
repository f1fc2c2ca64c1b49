from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import bench, softmax_case
from benchmarks.peers.bench import our_function, write_build
from benchmarks.peers.comparison import GRAPH, STREAM, Entrant, compare
from benchmarks.peers.softmax_case import case_result, cases, distinct_rows, file_of, line_of, name_of, run_case
from schedules.core.arch import Arch
from schedules.core.errors import BundleError, ProblemError, UsageError
from schedules.measure.choice import default_choice
from schedules.operators.softmax.definition import FUNCTIONS, LOSSES, SoftmaxProblem
from tests.benchmarks.peers.fake_timer import FakeTimer

PROBLEM = SoftmaxProblem(1024, 64)


def case_of(problem: SoftmaxProblem = PROBLEM, us: float = 10.0) -> dict[str, Any]:
    timer = FakeTimer()
    found = compare(
        {
            "ours": Entrant(
                lambda: timer.function("ours", us), {"schedule": "warp", "config": {}, "chosen": "default"}
            ),
            "copy:torch": Entrant(lambda: timer.function("copy", 8.0), {}, judged=False),
            "peer:torch": Entrant(lambda: timer.function("torch", 20.0), {}),
            "peer:triton": Entrant(lambda: timer.function("triton", 16.0), {}),
        },
        timer,
        lambda outputs: 0.5,
        lambda: None,
        0.001,
    )
    return case_result(problem, found)


def test_rates_and_shares() -> None:
    case = case_of()
    nbytes = 2 * 1024 * 64 * 2
    assert case["bytes"] == case["copy_bytes"] == nbytes
    assert case["ours"]["gbytes_per_s"] == pytest.approx(nbytes / 10e3, abs=0.001)
    assert case["ours"]["of_copy"] == pytest.approx(0.8, abs=0.01)
    assert case["peers"]["triton"]["of_copy"] == pytest.approx(0.5, abs=0.01)
    gradient = case_of(SoftmaxProblem(1024, 64, "softmax_grad"))
    assert gradient["bytes"] == 3 * nbytes // 2 and gradient["copy_bytes"] == nbytes
    assert gradient["ours"]["of_copy"] == pytest.approx(1.2, abs=0.01)
    assert "warp (default)" in line_of(case)
    failed = case_result(PROBLEM, {"ours": (None, {"failed": "wrong"})})
    assert "FAILED: wrong" in line_of(failed)


def test_the_cases() -> None:
    assert len(cases(["widths"], softmax_case.WIDTHS, FUNCTIONS, "float16")) == 13 * 4
    both = cases(["odd", "widths"], softmax_case.WIDTHS, ["softmax"], "float16")
    assert [p.cols for p in both] == [*softmax_case.WIDTHS, 1023, 50257]  # each once
    few = cases(["few"], (), ["softmax"], "float32")
    assert {(p.rows, p.cols) for p in few} == {(r, c) for r in (1, 8, 132) for c in (65536, 262144, 1048576)}
    fused = cases(["fused"], (128,), FUNCTIONS, "float16")
    assert [p.function for p in fused] == ["softmax", "softmax_grad"]
    assert fused[0].mask == "full" and fused[0].has_dropout and fused[1].scale == fused[0].scale
    losses = cases(["losses", "fused"], (), SoftmaxProblem.functions, "bfloat16")
    assert {p.function for p in losses} == set(LOSSES) and {p.cols for p in losses} >= {32000, 128256}
    assert not cases(["widths", "few"], (128,), LOSSES, "bfloat16") and file_of(["losses"]) == "softmax_losses.json"
    found = (*both, *few, *fused, *losses)
    assert len({name_of(p) for p in found}) == len(found)
    for sets, functions, dtype, error in (
        (["all"], ["softmax"], "float16", "unknown set 'all'"),
        (["few"], ["softmin"], "float16", "unknown function 'softmin'"),
        (["few"], ["softmax"], "float64", "dtype=float64"),
    ):
        with pytest.raises(UsageError, match=error):
            cases(sets, (), functions, dtype)
    with pytest.raises(ProblemError):
        cases(["widths"], (0,), ["softmax"], "float16")


def test_grids_and_maps() -> None:
    quack = cases(["quack"], (), FUNCTIONS, "bfloat16")
    assert len(quack) == 22 and {p.function for p in quack} == {"softmax", "softmax_grad"}
    assert cases(["quack"], (), ["log_softmax"], "bfloat16") == cases(["sglang"], (), ["softmax"], "float16") == []
    shapes = cases(["map"], (), ["softmax"], "float16")
    assert len(shapes) >= 300 and max(p.rows * p.cols for p in shapes) <= 2**28
    assert file_of(["liger", "quack"]) == "softmax_grids.json" and file_of(["odd"]) == "softmax_compare.json"
    with pytest.raises(UsageError, match="softmax_compare.json and softmax_map.json; compare them one after"):
        file_of(["widths", "map"])


def test_data_repeats_by_an_odd_number_of_rows() -> None:
    assert distinct_rows(SoftmaxProblem(4, 1048576)) == 4
    assert distinct_rows(SoftmaxProblem(132, 1048576)) == 5
    assert distinct_rows(SoftmaxProblem(49152, 1024)) == 513
    assert distinct_rows(SoftmaxProblem(9152, 32)) == 9152


def test_ours_comes_from_the_bundle_of_the_same_choice(
    tmp_path: Path, host: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = default_choice(PROBLEM, host)
    folder = tmp_path / name_of(PROBLEM)
    bundle = write_build(choice, host, folder)
    assert bundle.path == folder.resolve()

    def refused(*_: object) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "kernel_of", refused)
        assert our_function(choice, host, folder)
        with pytest.raises(AssertionError):
            our_function(default_choice(SoftmaxProblem(1024, 65), host), host, folder)
    other = default_choice(PROBLEM, host, "cpu")
    different = replace(other, config=replace(other.config, unroll=1))
    assert different.config != choice.config and our_function(different, host, folder)
    damaged = bundle.path / "kernel.so"
    damaged.unlink()  # the old one is mapped
    damaged.write_bytes(b"")
    with pytest.raises(BundleError):
        our_function(choice, host, folder)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", [STREAM, GRAPH])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_case_on_the_device(gpu: Arch, function: str, launch: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    from benchmarks.peers.softmax import DEFAULT_PEERS
    from schedules.measure.timer import CudaTimer

    problem = SoftmaxProblem(3000, 1000, function)
    with CudaTimer() as timer:
        case = run_case(problem, gpu, default_choice(problem, gpu), DEFAULT_PEERS, timer, 0.1, launch=launch)
    assert case["ours"]["us"] > 0 and case["ours"]["error"] <= 1
    for name, words in {**case["peers"], **case["copies"]}.items():
        assert "failed" not in words, f"{name}: {words['failed']}"
        assert words["gbytes_per_s"] > 0, name
        if (name, function) != ("torch", "softmax_grad"):  # which rounds y * dy to float16 before it sums
            assert words.get("error", 0) <= 1, name
