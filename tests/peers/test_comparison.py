from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.arch import Arch
from schedules.dispatch import default_choice
from schedules.errors import BundleError, ProblemError, UsageError
from schedules.peers import bench, comparison
from schedules.peers.bench import distinct_rows, our_function, run_case, write_build
from schedules.peers.comparison import Entrant, Results, case_result, cases, compare, compare_all, name_of, time_in_turn
from schedules.softmax.definition import FUNCTIONS, SoftmaxProblem

PROBLEM = SoftmaxProblem(1024, 64)


class FakeTimer:
    """Reports for each call the microseconds that it is said to take, and who was called, in order."""

    flush_us, fewest, most = 10.0, 3, 100

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.current = ("", 0.0)

    def function(self, name: str, us: float) -> Callable[[], Sequence[Any]]:
        def call() -> Sequence[Any]:
            self.current = (name, us)
            return [name]

        return call

    def times(self, call: Callable[[], None], count: int) -> list[float]:
        call()
        self.turns.append(self.current[0])
        return [self.current[1]] * count

    def __enter__(self) -> FakeTimer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def entrant(call: Callable[[], Sequence[Any]], **about: Any) -> Entrant:
    return Entrant(lambda: call, about)


def case_of(problem: SoftmaxProblem = PROBLEM, us: float = 10.0) -> dict[str, Any]:
    timer = FakeTimer()
    found = compare(
        {
            "ours": Entrant(
                lambda: timer.function("ours", us), {"schedule": "warp", "config": {}, "chosen": "default"}
            ),
            "copy:torch": Entrant(lambda: timer.function("copy", 8.0), {}, judged=False),
            "peer:torch": entrant(timer.function("torch", 20.0)),
            "peer:triton": entrant(timer.function("triton", 16.0)),
        },
        timer,
        lambda outputs: 0.5,
        lambda: None,
        0.001,
    )
    return case_result(problem, found)


def test_every_function_has_its_turn_in_every_round() -> None:
    timer = FakeTimer()
    names = ["ours", "copy", "torch"]
    found = time_in_turn(timer, {name: timer.function(name, 10.0 + i) for i, name in enumerate(names)}, 0.01)
    rounds = len(timer.turns) // len(names)
    assert timer.turns == names * rounds and rounds == 1 + comparison.ROUNDS[0]  # the first finds how many calls
    assert [found[name].us for name in names] == [10.0, 11.0, 12.0]
    assert found["ours"].runs >= comparison.ROUNDS[0] * comparison.IN_A_ROUND[0]


def test_what_is_not_known_well_is_timed_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FakeTimer()
    monkeypatch.setattr(comparison, "uncertainty", lambda times: 1.0)
    time_in_turn(timer, {"ours": timer.function("ours", 10.0)}, 60.0)
    assert len(timer.turns) == 1 + comparison.ROUNDS[1]
    timer.turns.clear()
    time_in_turn(timer, {"ours": timer.function("ours", 10.0)}, 0.0)
    assert len(timer.turns) == 1 + comparison.ROUNDS[0]


def test_a_peer_that_fails_is_reported_and_the_rest_timed() -> None:
    timer, poisoned = FakeTimer(), []

    def broken() -> Sequence[Any]:
        raise RuntimeError("no such kernel\nand a long tail")

    def refused() -> Callable[[], Sequence[Any]]:
        raise UsageError("fuses nothing")

    found = compare(
        {"ours": entrant(timer.function("ours", 5.0)), "bad": entrant(broken), "cannot": Entrant(refused, {})},
        timer,
        lambda outputs: 0.25,
        lambda: poisoned.append(1),
        0.001,
    )
    times, about = found["ours"]
    assert times is not None and times.us == 5.0 and about["error"] == 0.25
    assert found["bad"] == (None, {"failed": "RuntimeError: no such kernel"})
    assert comparison.reason(ValueError("raised:\n  the cause\nmore")) == "ValueError: raised: the cause"
    assert found["cannot"] == (None, {"failed": "fuses nothing"})
    assert len(poisoned) == 2  # before each that got as far as running


@pytest.mark.parametrize("error", [1.5, float("inf"), float("nan")])
def test_ours_is_timed_only_if_it_is_right(error: float) -> None:
    timer = FakeTimer()
    call = timer.function("same", 5.0)
    found = compare(
        {"ours": Entrant(lambda: call, {}, must_match=True), "peer:torch": entrant(call)},
        timer,
        lambda outputs: error,
        lambda: None,
        0.001,
    )
    assert found["ours"][0] is None and found["ours"][1]["failed"].startswith("wrong:")
    assert found["peer:torch"][0] is not None
    json.dumps(found["ours"][1], allow_nan=False)


def test_rates_and_shares() -> None:
    case = case_of()
    nbytes = 2 * 1024 * 64 * 2
    assert case["bytes"] == case["copy_bytes"] == nbytes
    assert case["ours"]["gbytes_per_s"] == round(nbytes / 10e3, 1)
    assert case["ours"]["of_copy"] == pytest.approx(0.8, abs=0.01)
    assert case["peers"]["triton"]["of_copy"] == pytest.approx(0.5, abs=0.01)
    gradient = case_of(SoftmaxProblem(1024, 64, "softmax_grad"))
    assert gradient["bytes"] == 3 * nbytes // 2 and gradient["copy_bytes"] == nbytes
    assert gradient["ours"]["of_copy"] == pytest.approx(1.2, abs=0.01)
    assert "warp (default)" in comparison.line_of(case)
    failed = case_result(PROBLEM, {"ours": (None, {"failed": "wrong"})})
    assert "FAILED: wrong" in comparison.line_of(failed)


def test_what_was_finished_is_kept_when_a_run_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "h200" / "softmax_compare.json"
    problems = [SoftmaxProblem(1024, cols) for cols in (32, 64, 128)]

    def run(problem: SoftmaxProblem) -> dict[str, Any]:
        if problem.cols == 128:
            raise KeyboardInterrupt
        return case_of(problem)

    told: list[dict[str, Any]] = []
    with pytest.raises(KeyboardInterrupt):
        compare_all(problems, run, Results(file, "H200", {"torch": "2"}), told.append)
    kept = comparison.read_results(file)
    assert [case["problem"]["cols"] for case in kept["cases"]] == [32, 64] and len(told) == 2
    assert all(case["seconds"] >= 0 for case in kept["cases"])
    again = Results(file, "H200", {"torch": "2"})
    assert [problem in again for problem in problems] == [True, True, False]
    again.put(case_of(problems[0], us=5.0))
    assert len(again.cases) == 2
    assert comparison.read_results(file)["cases"][-1]["ours"]["us"] == 5.0
    assert not list(file.parent.glob("*.new"))


def test_results_of_others_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "softmax_compare.json"
    Results(file, "H200", {"torch": "2"}).put(case_of())
    with pytest.raises(UsageError, match="other versions; pass --fresh"):
        Results(file, "H200", {"torch": "3"})
    with pytest.raises(UsageError, match="other device"):
        Results(file, "H100", {"torch": "2"})
    assert Results(file, "H100", {"torch": "2"}, fresh=True).cases == []


def test_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(UsageError, match="cannot read"):
        comparison.read_results(file)
    for text, message in (("{", "not JSON"), ("[]", "not a comparison"), ('{"schema": 1}', "not a comparison")):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            comparison.read_results(file)
    with pytest.raises(UsageError, match="cannot write"):
        Results(file / "below", "H200", {}, fresh=True).put(case_of())


def test_the_cases() -> None:
    assert len(cases(["widths"], comparison.WIDTHS, FUNCTIONS, "float16")) == 13 * 4
    both = cases(["odd", "widths"], comparison.WIDTHS, ["softmax"], "float16")
    assert [p.cols for p in both] == [*comparison.WIDTHS, 1023, 50257]  # each once
    few = cases(["few"], (), ["softmax"], "float32")
    assert {(p.rows, p.cols) for p in few} == {(r, c) for r in (1, 8, 132) for c in (65536, 262144, 1048576)}
    fused = cases(["fused"], (128,), FUNCTIONS, "float16")
    assert [p.function for p in fused] == ["softmax", "softmax_grad"]
    assert fused[0].mask == "full" and fused[0].has_dropout and fused[1].scale == fused[0].scale
    assert len({name_of(p) for p in (*both, *few, *fused)}) == len(both) + len(few) + len(fused)
    for sets, functions, dtype, error in (
        (["all"], ["softmax"], "float16", "unknown set 'all'"),
        (["few"], ["softmin"], "float16", "unknown function 'softmin'"),
        (["few"], ["softmax"], "float64", "dtype=float64"),
    ):
        with pytest.raises(UsageError, match=error):
            cases(sets, (), functions, dtype)
    with pytest.raises(ProblemError):
        cases(["widths"], (0,), ["softmax"], "float16")


def test_data_repeats_by_an_odd_number_of_rows() -> None:
    assert distinct_rows(SoftmaxProblem(8, 1048576)) == 8
    assert distinct_rows(SoftmaxProblem(132, 1048576)) == 13
    assert distinct_rows(SoftmaxProblem(49152, 1024)) == 2049
    assert distinct_rows(SoftmaxProblem(49152, 32)) == 49152


def test_ours_comes_from_the_bundle_of_the_same_choice(
    tmp_path: Path, host: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = default_choice(PROBLEM, host)
    bundle = write_build(choice, host, tmp_path)
    assert bundle.path == (tmp_path / name_of(PROBLEM)).resolve()

    def refused(*_: object) -> None:
        raise AssertionError("built again")

    with monkeypatch.context() as patch:
        patch.setattr(bench, "build", refused)
        assert our_function(PROBLEM, host, choice, tmp_path)
        with pytest.raises(AssertionError):
            our_function(SoftmaxProblem(1024, 65), host, default_choice(PROBLEM, host), tmp_path)
    other = default_choice(PROBLEM, host, "cpu")
    different = replace(other, config=replace(other.config, unroll=1))
    assert different.config != choice.config and our_function(PROBLEM, host, different, tmp_path)
    (bundle.path / "kernel.so").write_bytes(b"")
    with pytest.raises(BundleError):
        our_function(PROBLEM, host, choice, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_case_on_the_device(gpu: Arch, function: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    from schedules.measure import CudaTimer
    from schedules.peers.softmax import DEFAULT_PEERS

    problem = SoftmaxProblem(3000, 1000, function)
    with CudaTimer() as timer:
        case = run_case(problem, gpu, default_choice(problem, gpu), DEFAULT_PEERS, timer, 0.1)
    assert case["ours"]["us"] > 0 and case["ours"]["error"] <= 1
    for name, words in {**case["peers"], **case["copies"]}.items():
        assert "failed" not in words, f"{name}: {words['failed']}"
        assert words["gbytes_per_s"] > 0 and words.get("error", 0) <= 1, name
