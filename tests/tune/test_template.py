from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import ConfigError, UsageError
from schedules.core.problem import Problem
from schedules.measure.records import Record
from schedules.tune.strategy import Candidate
from schedules.tune.template import TemplateSearch, candidates
from tests.conftest import problem_of
from tests.tune.fakes import record_of


@pytest.fixture
def problem() -> Problem:
    return problem_of("conv2d_hwcn", n=256, h=14, w=14, ci=256, co=512, kh=3, kw=3, pad=1)


def us_of(candidate: Candidate) -> float:
    """A landscape of hills: best at 64 outputs and 128 threads a step of 8, where virtual threads are used."""
    words = candidate.config.to_json()
    outputs, threads = math.prod(words["tile"]), math.prod(words["num_thread"])
    hills = (
        0.3 * abs(math.log2(outputs / 64))
        + 0.25 * abs(math.log2(threads / 128))
        + 0.2 * abs(math.log2(words["step"] / 8))
    )
    penalty = 1.3 if tuple(words["vthread"]) == (1, 1) else 1.0
    return 1000 * (1 + hills) * penalty + 20 * abs(words["unroll"] - 64) / 512 + 10 * words["store"]


def told(problem: Problem, found: list[Candidate]) -> list[Record]:
    return [record_of(problem, "conv2d_hwcn", c, us_of(c), target="cuda:sm_90a") for c in found]


def searched(
    problem: Problem, arch: Arch, rounds: int, model: bool, seed: int = 0, others: list[Record] | None = None
) -> list[Record]:
    search = TemplateSearch(problem, arch, schedules=["tutorial"], seed=seed, model=model)
    if others:
        search.learn(others)
    records: list[Record] = []
    for _ in range(rounds):
        new = told(problem, search.ask(12))
        search.tell(new)
        records += new
    return records


def test_the_model_finds_better_ones_than_chance(problem: Problem, sm_90a: Arch) -> None:
    guided, drawn = (searched(problem, sm_90a, 8, model) for model in (True, False))

    def late(records: list[Record]) -> float:
        return sorted(record.us for record in records[48:])[24]  # the median, once the model has learned

    assert late(guided) < 0.85 * late(drawn)
    best = min(us_of(candidate) for candidate in candidates(problem, sm_90a, ["tutorial"]))
    assert min(record.us for record in guided) < 1.01 * best
    # and it goes on exploring: not all late ones are near the best
    assert max(record.us for record in guided[48:]) > 1.5 * best


def test_another_problem_teaches_it(problem: Problem, sm_90a: Arch) -> None:
    other = replace(problem, n=128)
    records = searched(other, sm_90a, 8, model=True)
    warm = searched(problem, sm_90a, 1, model=True, others=records)
    cold = searched(problem, sm_90a, 1, model=True)
    assert sum(record.us for record in warm) < 0.9 * sum(record.us for record in cold)


def test_the_same_seed_asks_the_same(problem: Problem, sm_90a: Arch) -> None:
    keys = [[r.key for r in searched(problem, sm_90a, 4, model=True, seed=seed)] for seed in (1, 1, 2)]
    assert keys[0] == keys[1] != keys[2]


def test_none_is_asked_twice_and_none_is_left_out(sm_90a: Arch) -> None:
    small = problem_of("softmax", rows=64, cols=1000)
    named = ("block_streaming", "split", "cluster")
    space = candidates(small, sm_90a, named)
    search = TemplateSearch(small, sm_90a, schedules=named)
    assert search.size == len(space)
    # what was told before, by an earlier run, is not asked at all
    search.tell([record_of(small, "softmax", candidate, 5.0, target="cuda:sm_90a") for candidate in space[:7]])
    asked: list[Candidate] = []
    while new := search.ask(50):
        asked += new
        search.tell([record_of(small, "softmax", c, 10.0, target="cuda:sm_90a") for c in new])
    assert Counter(c.key for c in asked) == Counter(c.key for c in space[7:])


def test_a_hopeless_schedule_is_seldom_drawn(sm_90a: Arch) -> None:
    """Of two schedules with spaces of any size, the slower is tried the less the slower it is."""
    problem = problem_of("conv2d_nchw", n=1, ci=6, h=64, w=64, co=6, kh=3, kw=3)
    search = TemplateSearch(problem, sm_90a, schedules=["direct", "simt"], model=False)
    first = search.ask(40)
    assert 10 < sum(c.schedule == "simt" for c in first) < 30  # nothing known: each alike, whatever its space's size
    times = {"direct": 10.0, "simt": 100.0}
    search.tell([record_of(problem, "conv2d_nchw", c, times[c.schedule], target="cuda:sm_90a") for c in first])
    assert sum(c.schedule == "simt" for c in search.ask(60)) <= 6


def test_failures_are_learned_too(problem: Problem, sm_90a: Arch) -> None:
    """All configs of 16 threads a side fail; the model stops asking for them."""
    search = TemplateSearch(problem, sm_90a, schedules=["tutorial"])

    def outcome(candidate: Candidate) -> Record:
        fails = candidate.config.to_json()["num_thread"][0] == 16
        return record_of(problem, "conv2d_hwcn", candidate, None if fails else us_of(candidate), target="cuda:sm_90a")

    shares = []
    for _ in range(8):
        records = [outcome(candidate) for candidate in search.ask(12)]
        shares.append(sum(not record.correct for record in records))
        search.tell(records)
    assert sum(shares[4:]) / 4 < 0.5 * sum(shares[:2]) / 2


def test_what_cannot_be_searched(problem: Problem, sm_90a: Arch, host: Arch) -> None:
    with pytest.raises(ConfigError, match="runs on cuda"):
        candidates(problem, host, ["simt"])
    with pytest.raises(UsageError, match="no config of schedule mma is legal .* choose another --schedule"):
        TemplateSearch(problem, sm_90a, schedules=["mma"])
