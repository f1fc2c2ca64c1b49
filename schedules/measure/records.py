"""Measured results as data: one self-contained JSON object each.

A record says what was measured, where, when, with what and how it ended.  Words for the outcome are Kernel Tuner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from schedules.build.builder import Built
from schedules.build.toolchain.devices import driver_version
from schedules.core.arch import Arch
from schedules.core.errors import UsageError
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator
from schedules.core.versions import versions
from schedules.measure.timer import Measurement

SCHEMA = 1
OUTCOMES = ("correct", "compile", "runtime", "timeout", "correctness", "constraints")
# trial: one candidate of a search; final: a finalist timed again beside the others; bench: asked for by a person
STAGES = ("trial", "final", "bench")
Interval = tuple[float, float, float]  # a value, and the two that it lies between
# What must agree for two times to be comparable, of `versions`: a record of others is kept apart
ENVIRONMENT = ("apache-tvm", "apache-tvm-ffi", "compiler", "driver")


@dataclass(frozen=True)
class Search:
    """Which search a trial belongs to, and how it was asked for, so that it can be gone on with.

    `campaign` counts the searches that were started over; `schedules` are those it was narrowed to, `space` the
    auto-scheduler's; `trials`, `minutes` and `patience` its limits; `offered` the schedules it could draw from, where
    it was not narrowed.
    """

    strategy: str
    campaign: int
    seed: int
    schedules: tuple[str, ...] = ()
    space: str = ""
    trials: int | None = None
    minutes: float | None = None
    patience: int | None = None
    offered: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, "", ())}

    @classmethod
    def from_json(cls, words: Mapping[str, Any]) -> Search:
        return cls(**{**words, **{name: tuple(words.get(name, ())) for name in ("schedules", "offered")}})


@dataclass(frozen=True)
class Record:
    """One trial.  Times in microseconds: `median_us` with the 10th and 90th percentile over `runs` calls.

    `error` is the worst element's, in units of the tolerance.  `verified` lists what the output was compared on: seeds
    of the random data, and problems as text.  `program` is the SHA-256 of the lowered program.  `more` holds what only
    some records have: `peers` (name to microseconds), `copy_gbytes_per_s`, `busy` (what other processes ran or
    wanted to run meanwhile, in threads for each core); of finals `winner`, `verdict` (a line), `rounds`, and
    `over_default`: how many times as fast as the default, and what that lies between.
    """

    operator: str
    problem: Problem
    schedule: str
    config: Config
    target: str
    device: str
    date: str
    versions: Mapping[str, str]
    stage: str
    outcome: str
    reason: str = ""
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    runs: int = 0
    error: float | None = None
    verified: tuple[str, ...] = ()
    program: str | None = None
    search: Search | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES or self.stage not in STAGES:
            raise UsageError(f"a record cannot have outcome {self.outcome!r} and stage {self.stage!r}")

    @property
    def correct(self) -> bool:
        return self.outcome == "correct" and self.median_us is not None

    @property
    def us(self) -> float:
        """The time it is judged by; infinite unless the outcome is correct."""
        if not self.correct or self.median_us is None:
            return float("inf")
        return judged_us(self.target, self.median_us, self.p10_us)

    @property
    def key(self) -> tuple[str, str]:
        """What was tried: schedule and config."""
        return self.schedule, str(self.config)

    @property
    def tflops(self) -> float:
        return self.problem.flops / self.us / 1e6

    @property
    def gbytes_per_s(self) -> float:
        return self.problem.min_bytes / self.us / 1e3

    @property
    def environment(self) -> tuple[str | None, ...]:
        """What must agree for times to be comparable: device, target, and the versions of ENVIRONMENT."""
        return (self.device, self.target, *(self.versions.get(name) for name in ENVIRONMENT))

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is empty is left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["problem"], values["config"] = self.problem.to_json(), self.config.to_json()
        values["search"] = self.search and self.search.to_json()
        kept = {name: value for name, value in values.items() if value not in (None, "", (), {}) and name != "more"}
        return {"schema": SCHEMA, **kept, **self.more}

    @classmethod
    def from_json(cls, words: Mapping[str, Any]) -> Record:
        """The record of a line.  Raises UsageError if this version does not know what it is of."""
        if words.get("schema") != SCHEMA:
            raise UsageError(f"schema {words.get('schema')!r}, this version reads {SCHEMA}")
        names = {f.name for f in dataclasses.fields(cls)} - {"more"}
        values = {name: value for name, value in words.items() if name in names}
        try:
            owner = operator(values["operator"])
            values["problem"] = owner.problem.parse(values["problem"])
            values["config"] = owner.schedule(values["schedule"]).config.parse(values["config"])
            values["search"] = Search.from_json(values["search"]) if values.get("search") else None
            values["verified"] = tuple(values.get("verified", ()))
            more = {name: value for name, value in words.items() if name not in names and name != "schema"}
            return cls(**values, more=more)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a record: {type(error).__name__} {error}") from None


def judged_us(target: str, median_us: float, p10_us: float | None) -> float:
    """The time that a kernel for `target` is judged by: its median; on a CPU, where other work only ever adds to it,
    the 10th percentile."""
    return p10_us if p10_us is not None and target.partition(":")[0] == "llvm" else median_us


def over_default(best: Record, default: Record) -> Interval | None:
    """How many times as fast as the default `best` is, and what that lies between, if finals timed both in turn."""
    if best.stage != "final" or (best.stage, best.date) != (default.stage, default.date):
        return None
    found = best.more.get("over_default")
    if not isinstance(found, (list, tuple)) or len(found) != 3 or not all(type(each) is float for each in found):
        return None
    value, low, high = found
    return (value, low, high) if 0 < low <= value <= high < float("inf") else None


def speedup(best: Record | None, default: Record | None) -> float | None:
    """How many times as fast `best` is as the default; 1.0 if finals that timed both in turn found no difference."""
    if not best or not default or not best.correct or not default.correct:
        return None
    found = over_default(best, default)
    if found is None:
        return default.us / best.us
    value, low, high = found
    return 1.0 if low <= 1 <= high else value


def environment(arch: Arch, compiler: str) -> dict[str, str]:
    """The versions that a result of `arch` depends on: packages, device compiler, and CUDA's driver."""
    driver = driver_version() if arch.kind == "cuda" else None
    return {**versions(), "compiler": compiler, **({"driver": driver} if driver else {})}


def now() -> str:
    """The time, UTC, to the second, as records have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def record(
    built: Built, measured: Measurement, error: float, *, stage: str = "bench", more: Mapping[str, Any] | None = None
) -> Record:
    """The record of a build that was verified and measured here."""
    return Record(
        operator=built.operator.name,
        problem=built.problem,
        schedule=built.schedule.name,
        config=built.config,
        target=str(built.arch),
        device=measured.device,
        date=now(),
        versions=environment(built.arch, built.compiler),
        stage=stage,
        outcome="correct",
        median_us=measured.median_us,
        p10_us=measured.p10_us,
        p90_us=measured.p90_us,
        runs=measured.runs,
        error=error,
        program=built.program,
        more=more or {},
    )
