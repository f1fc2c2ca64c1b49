"""Measured results as data: one self-contained JSON object each.

A record says what was measured, where, when, with what and how it ended.  Words for the outcome are Kernel Tuner's.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from schedules.build.toolchain.devices import driver_version
from schedules.core.arch import Arch, parse_arch
from schedules.core.errors import UnknownNameError, UsageError
from schedules.core.fields import required_fields
from schedules.core.problem import Config, Problem
from schedules.core.registry import operator
from schedules.core.versions import versions

if TYPE_CHECKING:
    from schedules.build.builder import Built
    from schedules.measure.timer import Measurement

SCHEMA = 1
Made = TypeVar("Made")
STRATEGIES = ("template", "random", "auto")  # of searches
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
        """Raises UsageError if one is missing, unknown, of another type, or of a strategy that is not known."""
        given = _checked(words, cls, _SEARCH_FIELDS, "search")
        for name in given:
            if name not in _SEARCH_FIELDS:
                raise UnknownNameError("search field", name, _SEARCH_FIELDS)
        if given["strategy"] not in STRATEGIES:
            raise UnknownNameError("search", given["strategy"], STRATEGIES)
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
        return cls(**values)


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
        """The record of a line.

        Raises UsageError if something is missing, of another type, out of its range, or of a name that this version
        does not know.  What is null counts as missing; `more` may hold names that this version does not know.
        """
        if words.get("schema") != SCHEMA:
            raise UsageError(f"schema {reprlib.repr(words.get('schema'))}, this version reads {SCHEMA}")
        try:
            given = _checked(words, cls, _FIELDS, "record")
            owner = operator(given["operator"])
            schedule = owner.schedule(given["schedule"])
            schedule.require_kind(_arch(given["target"]))
            given["problem"] = _once(owner.problem.parse, given["problem"])
            given["schedule"] = schedule.name
            given["config"] = schedule.config.parse(given["config"])
            given["versions"] = _once(_versions, given["versions"])
            if "search" in given:
                given["search"] = _once(Search.from_json, given["search"])
                for name in given["search"].schedules:
                    owner.schedule(name)
        except RecursionError:
            raise UsageError(f"not a record: {_TOO_DEEP}") from None
        given["verified"] = tuple(given.get("verified", ()))
        times = [given[name] for name in ("p10_us", "median_us", "p90_us") if name in given]
        if times != sorted(times) or (given["outcome"] == "correct" and "median_us" not in given):
            raise UsageError(f"not a record: {given['outcome']} with p10, median and p90 of {times} us")
        more = given.keys() - _values() - {"schema"}
        values = {name: given[name] for name in given.keys() & _values()}
        return cls(**values, more={name: given[name] for name in given if name in more})


@dataclass(frozen=True)
class _Kind:
    """What a value of a line may be, in words: its types, and a test of those."""

    words: str
    types: tuple[type, ...]
    fits: Callable[[Any], bool] = lambda value: True


MOST_ONCE = 4096  # problems, versions and searches that are kept
LEVELS = 8  # of objects and lists within each other
LETTERS = 2**20  # of a text
_TOO_DEEP = f"more than {LEVELS} objects or lists within each other"
_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def _is_text(value: Any) -> bool:
    return type(value) is str and _is_plain(value)


def _is_plain(value: Any, levels: int = LEVELS) -> bool:
    """True.  Raises UsageError for what no JSON but Python's holds, or is too deep, long or large to be meant."""
    kind = type(value)
    if kind is str:
        if len(value) > LETTERS:
            raise UsageError(f"not a record: a text of {len(value)} letters")
        if not value.isascii() and _SURROGATE.search(value):
            raise UsageError("not a record: a text with half of a character")
    elif kind is int:
        if not -(2**63) < value < 2**63:
            raise UsageError("not a record: a number of more than 63 bits")
    elif kind is float:
        if not -math.inf < value < math.inf:
            raise UsageError(f"not a record: the number {value}")
    elif kind in (dict, list, tuple):
        if not levels:
            raise UsageError(f"not a record: {_TOO_DEEP}")
        for item in value:
            _is_plain(item, levels - 1)
        if kind is dict:
            for item in value.values():
                _is_plain(item, levels - 1)
    return True


_NUMBER = (int, float)
_TEXT = _Kind("a text", (str,), _is_plain)
_NAME = _Kind("a name", (str,), lambda text: _is_plain(text) and bool(text.strip()))
_TEXTS = _Kind("a list of texts", (list, tuple), lambda texts: all(map(_is_text, texts)))
_TRUTH = _Kind("true or false", (bool,))
_COUNT = _Kind("a count", (int,), lambda number: 0 <= number < 2**63)
_ONE_OR_MORE = _Kind("a whole number over 0", (int,), lambda number: 0 < number < 2**63)
_AMOUNT = _Kind("a finite number of 0 or more", _NUMBER, lambda number: 0 <= number <= 1e15)
_TIME = _Kind("a finite number over 0", _NUMBER, lambda number: 1e-6 <= number <= 1e15)


def _is_time(value: Any) -> bool:
    return type(value) in _TIME.types and _TIME.fits(value)


def _is_interval(value: Any) -> bool:
    return len(value) == 3 and all(map(_is_time, value)) and bool(value[1] <= value[0] <= value[2])


# of a line's names; others, which later versions may have, may hold whatever `_is_plain` lets through
_FIELDS = {
    **dict.fromkeys(("operator", "schedule", "target", "device", "stage", "outcome"), _NAME),
    **dict.fromkeys(("problem", "search", "versions"), _Kind("an object", (dict,))),  # `_once` made of them
    "config": _Kind("an object", (dict,), _is_plain),
    **dict.fromkeys(("median_us", "p10_us", "p90_us", "default_us", "copy_gbytes_per_s"), _TIME),
    **dict.fromkeys(("error", "elapsed", "build_s", "run_s", "busy"), _AMOUNT),
    **dict.fromkeys(("runs", "trials", "registers", "spilled", "rounds"), _COUNT),
    **dict.fromkeys(("reason", "program", "preset", "replay_of", "verdict"), _TEXT),
    "date": _Kind("a time in UTC, as 2026-01-31T12:00:00+00:00", (str,), _is_utc),
    "peers": _Kind("times by name", (dict,), lambda times: _is_plain(times) and all(map(_is_time, times.values()))),
    "over_default": _Kind("a ratio and the two that it lies between", (list, tuple), _is_interval),
    "verified": _TEXTS,
    "winner": _TRUTH,
}
_SEARCH_FIELDS = {
    "strategy": _NAME,
    "campaign": _ONE_OR_MORE,
    "seed": _COUNT,
    "schedules": _TEXTS,
    "space": _TEXT,
    "trials": _ONE_OR_MORE,
    "minutes": _TIME,
    "patience": _ONE_OR_MORE,
    "offered": _TEXTS,
}


_once_made: dict[tuple[Callable[[Any], Any], str], Any] = {}


def _once(make: Callable[[Any], Made], words: Mapping[str, Any]) -> Made:
    """What `make` makes of `words`: a journal's lines repeat their problem, versions and search."""
    key = make, repr(words)
    if key not in _once_made:
        _is_plain(words)
        if len(_once_made) == MOST_ONCE:
            _once_made.clear()
        _once_made[key] = make(words)
    made: Made = _once_made[key]
    return made


def _versions(words: Mapping[str, Any]) -> Mapping[str, str]:
    if not words or not all(map(_is_text, words.values())):
        raise UsageError(f"not a record: versions={reprlib.repr(words)} is not texts by name")
    return words


@cache
def _values() -> frozenset[str]:
    """The names of a line that are fields of a record."""
    return frozenset(f.name for f in dataclasses.fields(Record)) - {"more"}


def _checked(words: Mapping[str, Any], cls: Any, kinds: Mapping[str, _Kind], noun: str) -> dict[str, Any]:
    """What of `words` is not null, for a `cls`.  Raises UsageError if one is missing or not of its kind."""
    given = {name: value for name, value in words.items() if value is not None}
    for name in required_fields(cls):
        if name not in given:
            raise UsageError(f"not a {noun}: it has no {name}")
    for name, value in given.items():
        kind = kinds.get(name)
        if kind is None:
            _is_plain((name, value))
        elif not (type(value) in kind.types and kind.fits(value)):
            raise UsageError(f"not a {noun}: {name}={reprlib.repr(value)} is not {kind.words}")
    return given


@lru_cache
def _arch(target: str) -> Arch:
    """The arch of a record's target.  Raises UnknownNameError."""
    arch = parse_arch(target)
    if str(arch) != target:
        raise UnknownNameError("target", target, [str(arch)])
    return arch


def judged_us(target: str, median_us: float, p10_us: float | None) -> float:
    """The time that a kernel for `target` is judged by: its median; on a CPU, where other work only ever adds to it,
    the 10th percentile."""
    return p10_us if p10_us is not None and target.partition(":")[0] == "llvm" else median_us


def over_default(best: Record, default: Record) -> Interval | None:
    """How many times as fast as the default `best` is, and what that lies between, if finals timed both in turn."""
    if best.stage != "final" or (best.stage, best.date) != (default.stage, default.date):
        return None
    if found := best.more.get("over_default"):
        value, low, high = found
        return value, low, high
    return None


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
