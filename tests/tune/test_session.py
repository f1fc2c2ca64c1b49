"""Searches for real: on this machine's CPU, with processes that build and measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.core.operator import ScheduleSpec
from schedules.core.problem import Config
from schedules.core.registry import operator
from schedules.tune.crew import LocalCrew
from schedules.tune.session import Work, first_candidates, tune
from schedules.tune.strategy import Candidate
from schedules.tune.tuner import Limits
from tests.conftest import problem_of
from tests.tune.fakes import Memory, record_of


@pytest.fixture(scope="module")
def crew(host: Arch) -> Iterator[LocalCrew]:
    crew = LocalCrew(host)
    yield crew
    crew.close()


@pytest.fixture
def default_of() -> Iterator[Callable[[ScheduleSpec, Config], None]]:
    """Gives a schedule another default; workers, which are told each config, do not see it."""
    changed: list[tuple[ScheduleSpec, Any]] = []

    def give(spec: ScheduleSpec, config: Config) -> None:
        changed.append((spec, spec.default))
        object.__setattr__(spec, "default", lambda problem, arch: config)

    yield give
    for spec, default in reversed(changed):
        object.__setattr__(spec, "default", default)


def test_a_search_beats_a_poor_default(
    crew: LocalCrew, host: Arch, tmp_path: Path, default_of: Callable[[ScheduleSpec, Config], None]
) -> None:
    memory, problem = Memory(), problem_of("conv2d_hwcn", n=4, h=14, w=14, ci=8, co=64, kh=3, kw=3, pad=1)
    spec = operator("conv2d_hwcn").schedule("cpu")
    default_of(spec, spec.config_for(problem, host, dict(vector=2)))  # two lanes of a register
    result = tune(Work(problem, host, Limits(trials=8)), crew, folder=tmp_path, watcher=memory)
    assert result.finished and len(memory.records) == 8
    assert all(record.correct for record in memory.records)
    assert result.best and result.best.more["winner"] and result.best.config != result.status.default
    # the default was a finalist too, timed in turn with the winner, which beat it in all rounds but one at most
    assert result.speedup and result.speedup > 1.5
    assert {"seed 0", "seed 1"} <= set(result.best.verified)
    (file,) = tmp_path.rglob("*.jsonl")
    assert file.name == "conv2d_hwcn.jsonl"


def test_what_is_measured_first(host: Arch) -> None:
    """The rule's default, the best known of this problem, the best of near ones; what is illegal here is left out."""
    problem = problem_of("conv2d_hwcn", n=64, h=7, w=7, ci=8, co=32, kh=3, kw=3, pad=1)
    near = problem_of("conv2d_hwcn", n=32, h=7, w=7, ci=8, co=32, kh=3, kw=3, pad=1)
    far = problem_of("conv2d_hwcn", n=1, h=7, w=7, ci=8, co=512, kh=3, kw=3, pad=1)
    work = Work(problem, host, Limits(trials=1))
    default = first_candidates(work, None, [])[0]
    configs = [type(default.config).parse({**default.config.to_json(), "chunk": chunk}) for chunk in (1, 2, 16)]
    known = [
        record_of(where, "conv2d_hwcn", Candidate("cpu", config), us)
        for where, config, us in ((problem, configs[0], 10.0), (near, configs[1], 5.0), (far, configs[2], 1.0))
    ]
    found = first_candidates(work, known[0], known)
    assert found == [default, Candidate("cpu", configs[0]), Candidate("cpu", configs[1])]


def test_a_search_that_does_not_exist(host: Arch) -> None:
    with pytest.raises(UsageError, match="search 'luck' is not one of template, random, auto"):
        Work(problem_of("softmax", rows=4, cols=64), host, Limits(), search="luck")
