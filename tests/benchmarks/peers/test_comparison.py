from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import comparison
from benchmarks.peers.comparison import GRAPH, Entrant, Results, compare, compare_all, head_of, time_in_turn
from schedules.core.arithmetic import TF32
from schedules.core.errors import UsageError
from schedules.operators.softmax.definition import SoftmaxProblem
from tests.benchmarks.peers.fake_timer import FakeTimer
from tests.conftest import problem_of

PROBLEM = SoftmaxProblem(1024, 64)


def entrant(call: Callable[[], Sequence[Any]], **about: Any) -> Entrant:
    return Entrant(lambda: call, about)


def case_of(problem: SoftmaxProblem = PROBLEM, us: float = 10.0) -> dict[str, Any]:
    return {**head_of(problem, "stream"), "ours": {"us": us}}


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
        {"ours": Entrant(lambda: call, {}, most=1.0), "peer:torch": entrant(call)},
        timer,
        lambda outputs: error,
        lambda: None,
        0.001,
    )
    assert found["ours"][0] is None and found["ours"][1]["failed"].startswith("wrong:")
    assert found["peer:torch"][0] is not None
    json.dumps(found["ours"][1], allow_nan=False)


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


def test_what_is_wrong_only_when_it_was_timed_is_no_result() -> None:
    timer, errors = FakeTimer(), {"ours": iter([0.5, 3.0]), "peer": iter([0.5])}

    def judge(outputs: Sequence[Any]) -> float:
        return next(errors[outputs[0]])

    ours, peer = timer.function("ours", 5.0), timer.function("peer", 6.0)
    entrants = {"ours": Entrant(lambda: ours, {}, most=1.0), "peer": Entrant(lambda: peer, {})}
    found = compare(entrants, timer, judge, lambda: None, 0.001)
    assert found["ours"] == (None, {"error": 3.0, "failed": "wrong: 3 times the tolerance, after it was timed"})
    assert found["peer"][0] is not None and found["peer"][1] == {"error": 0.5}


def test_another_launch_or_operator_is_another_case(tmp_path: Path) -> None:
    file = tmp_path / "conv.json"
    fields = dict(n=2, h=4, w=4, ci=8, co=8, kh=3, kw=3, pad=1, dtype="float16")
    one, other = problem_of("conv2d_nhwc", **fields), problem_of("conv2d_nchw", **fields)
    results = Results(file, "H200", {}, kind="convolution")
    results.put({**head_of(one, "stream"), "ours": {"us": 1.0}})
    assert one in results and other not in results and "a text" not in results
    again = Results(file, "H200", {}, kind="convolution", launch=GRAPH)
    assert one not in again
    again.put({**head_of(one, GRAPH), "ours": {"failed": "why"}})
    again.put({**head_of(other, GRAPH), "ours": {"us": 1.0}})
    assert one not in again and other in again and len(again.cases) == 3
    assert not again.has(other, TF32)
    again.put({**head_of(other, GRAPH, TF32), "ours": {"us": 3.0}})
    assert again.has(other, TF32) and len(again.cases) == 4
    again.cases.pop()
    # what was read back from JSON (lists for tuples) is replaced, not doubled
    again.put({**head_of(one, "stream"), "ours": {"us": 2.0}})
    assert [case["ours"] for case in comparison.read_results(file)["cases"]] == [
        {"failed": "why"},
        {"us": 1.0},
        {"us": 2.0},
    ]


def test_facts_of_the_device_are_kept_with_the_cases(tmp_path: Path) -> None:
    file = tmp_path / "conv.json"
    Results(file, "H200", {}, kind="convolution").note(ceilings={"float16": {"tflops": 686.0}})
    Results(file, "H200", {}, kind="convolution").put({**head_of(PROBLEM, "stream"), "ours": {"us": 2.0}})
    kept = comparison.read_results(file)
    assert kept["ceilings"] == {"float16": {"tflops": 686.0}} and len(kept["cases"]) == 1
    with pytest.raises(UsageError, match="other kind"):
        Results(file, "H200", {})


def test_outputs_are_judged_in_the_problems_layout() -> None:
    timer, judged = FakeTimer(), []

    def judge(outputs: Sequence[Any]) -> float:
        judged.extend(outputs)
        return 0.0

    call = timer.function("peer", 1.0)
    compare(
        {"peer": Entrant(lambda: call, {}, adapt=lambda outputs: [f"{outputs[0]} turned"])},
        timer,
        judge,
        lambda: None,
        0.001,
    )
    assert judged == ["peer turned"]
