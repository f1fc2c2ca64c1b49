from __future__ import annotations

from dataclasses import replace

import pytest

from schedules.arch import Arch
from schedules.errors import BuildError, UsageError
from schedules.tune import search as module
from schedules.tune.search import search
from tests.conftest import problem_of

PROBLEM = dict(n=32, h=6, w=6, ci=8, co=16, kh=3, kw=3, pad=1)


def test_the_default_comes_first_and_the_best_is_the_fastest(host: Arch) -> None:
    seen = []
    found = search(
        problem_of("conv2d_hwcn", **PROBLEM), host, trials=5, progress=lambda trial, best: seen.append(trial)
    )
    assert len(found.trials) == 5
    assert seen == list(found.trials)
    assert found.default.config == found.best.schedule.default(found.best.problem, host)
    times = [trial.measured.median_us for trial in found.trials if trial.measured]
    assert found.measured.median_us == min(times)
    assert len({trial.config for trial in found.trials}) == 5
    assert all(trial.outcome == "correct" and trial.error <= 1 for trial in found.trials)


def test_the_same_seed_tries_the_same_configs(host: Arch) -> None:
    problem = problem_of("conv2d_hwcn", **PROBLEM)
    first, second, other = (
        [trial.config for trial in search(problem, host, trials=4, seed=seed).trials] for seed in (3, 3, 4)
    )
    assert first == second != other


def test_failures_are_recorded_and_passed_over(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = module.build, 0

    def build(*arguments: object, **options: object) -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise BuildError("the compiler is out of sorts")
        built = real(*arguments, **options)  # type: ignore[arg-type]
        if count == 3:  # one that computes nothing
            return _Silent(built)
        return built

    monkeypatch.setattr(module, "build", build)
    found = search(problem_of("conv2d_hwcn", **PROBLEM), host, trials=4)
    assert [trial.outcome for trial in found.trials] == ["correct", "compile", "correctness", "correct"]
    assert found.trials[1].detail == "the compiler is out of sorts"
    assert "got nan" in found.trials[2].detail


class _Silent:
    def __init__(self, built: object) -> None:
        self.built = built

    def __call__(self, *tensors: object) -> None:
        pass


def test_nothing_correct_is_an_error(host: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.build
    monkeypatch.setattr(module, "build", lambda *a, **k: _Silent(real(*a, **k)))
    with pytest.raises(UsageError, match="none of 2 configs of cpu was correct"):
        search(problem_of("conv2d_hwcn", **PROBLEM), host, trials=2)


def test_no_device(host: Arch) -> None:
    with pytest.raises(UsageError, match="no device"):
        search(problem_of("conv2d_hwcn", **PROBLEM), replace(host, name="pentium"))
