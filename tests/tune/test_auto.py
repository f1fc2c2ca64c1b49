from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest

from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import ConfigError, ToolchainError
from schedules.core.problem import Problem
from schedules.core.registry import operator_of
from schedules.measure.records import Record
from schedules.operators.auto import AutoConfig
from schedules.tune.auto import AutoSearch
from schedules.tune.strategy import Candidate
from tests.conftest import problem_of

pytest.importorskip("xgboost")

CONV = dict(n=16, h=8, w=8, ci=16, co=32, kh=3, kw=3, pad=1)


@pytest.fixture(scope="module")
def conv() -> Problem:
    return problem_of("conv2d_hwcn", **CONV)


def told(candidate: Candidate, problem: Problem, us: float = math.inf, outcome: str = "compile") -> Record:
    """The record of a trial that took `us`, or failed."""
    return Record(
        operator=operator_of(problem).name,
        problem=problem,
        schedule=candidate.schedule,
        config=candidate.config,
        target="llvm",
        device="a CPU",
        date="2026-11-21",
        versions={},
        stage="trial",
        outcome="correct" if math.isfinite(us) else outcome,
        median_us=us if math.isfinite(us) else None,
    )


def steps(candidate: Candidate) -> Any:
    assert isinstance(candidate.config, AutoConfig)
    return candidate.config.steps.to_json()


def innermost(candidate: Candidate) -> int:
    """A stand-in for speed: how much of the batch is innermost."""
    tiles = [d for at, d in steps(candidate)[1] if steps(candidate)[0][at][0] == "SamplePerfectTile"]
    return int(tiles[3][-1])


def time_of(candidate: Candidate) -> float:
    return 100.0 / innermost(candidate)


def test_none_is_asked_twice(conv: Problem, host: Arch) -> None:
    search = AutoSearch(conv, host, 3)
    asked = search.ask(6)
    records = [told(candidate, conv, time_of(candidate)) for candidate in asked]
    search.tell(records[:3])
    asked += search.ask(6)  # before the rest of the first batch is told
    search.tell(records[3:])
    asked += search.ask(6)
    assert len({candidate.key for candidate in asked}) == 18
    structures = [program.structure for program in search._open.values()]
    assert len(set(structures)) == len(structures) == 12  # what was not told

    resumed = AutoSearch(conv, host, 3)
    resumed.tell([told(candidate, conv, time_of(candidate)) for candidate in asked])
    assert resumed.lost == 0 and resumed._structures >= set(structures)
    assert not {candidate.key for candidate in resumed.ask(6)} & {candidate.key for candidate in asked}


def test_the_same_seed_and_tells_ask_the_same(conv: Problem, host: Arch) -> None:
    def run() -> list[tuple[str, str]]:
        search, keys = AutoSearch(conv, host, 1), []
        for _ in range(2):
            batch = search.ask(8)
            keys += [candidate.key for candidate in batch]
            search.tell([told(candidate, conv, time_of(candidate)) for candidate in batch])
        return keys

    first = run()
    assert run() == first


def test_it_finds_what_is_fast_and_leaves_what_fails(conv: Problem, host: Arch) -> None:
    """Of candidates that are fast by a rule the later ones are faster; those that fail by another rule get fewer."""
    search = AutoSearch(conv, host, 5)
    speeds: list[list[float]] = []
    failures: list[int] = []
    for _ in range(6):
        batch = search.ask(8)
        fails = [innermost(candidate) == 1 for candidate in batch]
        records = [
            told(candidate, conv, math.inf if fail else time_of(candidate), "runtime")
            for candidate, fail in zip(batch, fails, strict=True)
        ]
        search.tell(records)
        failures.append(sum(fails))
        speeds.append([0.0 if fail else innermost(candidate) for candidate, fail in zip(batch, fails, strict=True)])
    assert sum(sum(batch) for batch in speeds[3:]) > 1.5 * sum(sum(batch) for batch in speeds[:3])
    assert sum(failures[3:]) < sum(failures[:3])


def test_other_records_are_passed_over(conv: Problem, host: Arch) -> None:
    search = AutoSearch(conv, host, 1)
    (candidate,) = search.ask(1)
    other = problem_of("conv2d_hwcn", **dict(CONV, co=16))
    search.tell(
        [
            told(candidate, other, 1.0),
            told(Candidate("cpu", operator_of(conv).schedule("cpu").default(conv, host)), conv, 1.0),
        ]
    )
    assert search._model.size == 0
    search.learn([told(candidate, other, 1.0)])
    assert search._model.size == 1


def test_a_record_that_no_longer_replays_is_counted(conv: Problem, host: Arch) -> None:
    search = AutoSearch(conv, host, 1)
    config = AutoConfig("llvm", "damaged")
    search.tell([told(Candidate("auto", config), conv, 1.0)])
    assert search.lost == 1 and search._model.size == 0


def test_a_space_is_exhausted(host: Arch) -> None:
    point = problem_of("conv2d_hwcn", n=1, h=1, w=1, ci=1, co=1, kh=1, kw=1)
    search = AutoSearch(point, host, 1, effort=50)
    first = search.ask(64)
    assert 0 < len(first) < 64
    assert search.ask(64) == []


@pytest.mark.parametrize("name", ["conv2d_hwcn", "conv2d_nchw"])
def test_large_problems_have_candidates_on_a_gpu(name: str) -> None:
    """Most points of such a space are impossible: they are to be passed over cheaply."""
    problem = problem_of(name, n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)
    arch = parse_arch("sm_90a")
    search = AutoSearch(problem, arch, 1, "cuda")
    assert len(search.ask(4)) == 4
    assert search.space.rejected["VerifyGPUCode"] <= 2


def test_spaces_are_of_a_target(conv: Problem, host: Arch) -> None:
    with pytest.raises(ConfigError, match="space=cuda is not one for llvm; use llvm"):
        AutoSearch(conv, host, 1, "cuda")


def test_without_xgboost_it_says_what_to_install(conv: Problem, host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "xgboost" else find(name, *rest)
    )
    with pytest.raises(ToolchainError, match=r"pip install 'te-schedules\[tune\]'"):
        AutoSearch(conv, host, 1)


def test_learning_from_another_problem_warms_the_model(conv: Problem, host: Arch) -> None:
    other = replace(conv, co=64)  # type: ignore[call-arg]
    donor = AutoSearch(other, host, 1)
    records = [told(candidate, other, time_of(candidate)) for candidate in donor.ask(16)]
    search = AutoSearch(conv, host, 1)
    search.learn(records)
    programs = [search._open[candidate.key[1]].features for candidate in search.ask(2)]
    assert search._model.scores(programs) is not None
    assert AutoSearch(conv, host, 1)._model.scores(programs) is None


def test_a_program_that_the_rules_fail_on_is_refused_in_one_line() -> None:
    problem = problem_of("softmax", rows=3, cols=554, function="log_softmax", dtype="float16", mask="cols", keep=0.8)
    with pytest.raises(ConfigError, match="make no space of softmax|make no space of rows") as caught:
        AutoSearch(problem, parse_arch("llvm"), 1)
    assert "\n" not in str(caught.value)
