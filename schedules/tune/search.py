"""A plain search over a schedule's config space: the default, then random legal configs, each verified before its time
counts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules.arch import Arch
from schedules.build import Built, build, operator_of
from schedules.errors import BuildError, ToolchainError, UsageError
from schedules.measure import Measurement, device_name, measure, to_device
from schedules.operator import Array, Expected
from schedules.problem import Config, Problem
from schedules.verify import judge, outputs_of, poisoned

ABANDON = 2.0  # a candidate this many times slower than the best in a short run is not measured longer
SHORT = 0.05  # seconds of that run


@dataclass(frozen=True)
class Trial:
    """One candidate.  `outcome` is Kernel Tuner's word: correct, compile, correctness."""

    config: Config
    outcome: str
    detail: str
    measured: Measurement | None
    error: float  # worst element in units of the tolerance


@dataclass(frozen=True)
class SearchResult:
    """What a search found: the fastest verified build, and every trial in order."""

    best: Built
    measured: Measurement
    error: float
    trials: tuple[Trial, ...]

    @property
    def default(self) -> Trial:
        return self.trials[0]


def search(
    problem: Problem,
    arch: Arch,
    schedule: str | None = None,
    *,
    trials: int = 32,
    seconds: float = 120.0,
    seed: int = 0,
    progress: Callable[[Trial, Trial | None], None] | None = None,
) -> SearchResult:
    """Try the schedule's default config and up to `trials` - 1 others within about `seconds`, on the device of `arch`.

    `progress` is called with each trial and the best so far.  Raises UsageError if the device is not here, or if no
    candidate was correct.
    """
    if device_name(arch) is None:
        raise UsageError(f"no device for {arch} here to search on; use --target llvm, or a machine that has one")
    op = operator_of(problem)
    spec = op.schedule_for(problem, arch, schedule)
    start = time.monotonic()
    inputs = op.inputs(problem, np.random.default_rng(seed))
    expected = op.reference(problem, inputs)
    done: list[Trial] = []
    best: tuple[Trial, Built] | None = None
    for config in _candidates(list(spec.legal_space(problem, arch)), spec.default(problem, arch), trials, seed):
        if done and time.monotonic() - start > seconds:
            break
        limit = best[0].measured.median_us if best and best[0].measured else None
        trial, built = _try(problem, arch, spec.name, config, inputs, expected, limit)
        done.append(trial)
        if built is not None and trial.measured and (limit is None or trial.measured.median_us < limit):
            best = (trial, built)
        if progress:
            progress(trial, best[0] if best else None)
    if best is None or best[0].measured is None:
        raise UsageError(
            f"none of {len(done)} configs of {spec.name} was correct; the first failed with: {done[0].detail}"
        )
    return SearchResult(best[1], best[0].measured, best[0].error, tuple(done))


def _candidates(space: Sequence[Config], default: Config, count: int, seed: int) -> Iterator[Config]:
    yield default
    others = [config for config in space if config != default]
    random.Random(seed).shuffle(others)
    yield from others[: count - 1]


def _try(
    problem: Problem,
    arch: Arch,
    schedule: str,
    config: Config,
    inputs: Sequence[Array],
    expected: Sequence[Expected],
    limit_us: float | None,
) -> tuple[Trial, Built | None]:
    try:
        built = build(problem, arch, schedule, config)
    except ToolchainError:
        raise  # the same for every candidate
    except BuildError as error:
        return Trial(config, "compile", str(error), None, float("inf")), None
    tensors: list[Any] = [to_device(array, arch) for array in (*inputs, *poisoned(problem))]
    built(*tensors)
    outputs = [tensor.numpy() for tensor in tensors[-len(outputs_of(problem)) :]]
    difference = judge(problem, inputs, outputs, expected)
    if not difference.passed:
        return Trial(config, "correctness", str(difference), None, difference.error), None
    measured = measure(built, seconds=SHORT, tensors=tensors)
    if limit_us is None or measured.median_us < ABANDON * limit_us:
        measured = measure(built, seconds=10 * SHORT, tensors=tensors)
    return Trial(config, "correct", str(difference), measured, difference.error), built
