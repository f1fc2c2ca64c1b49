from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.core.device import slug
from schedules.core.errors import UsageError
from schedules.measure.records import Record, Search, record
from schedules.measure.timer import Measurement
from tests.conftest import problem_of


@pytest.fixture(scope="module")
def made(host: Arch) -> Record:
    built = build(problem_of("softmax", rows=4, cols=64), host)
    return record(built, Measurement(10.0, 9.0, 12.0, 7, "Some CPU"), 0.5, more={"peers": {"torch": 20.0}})


def test_device_folders() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("AMD EPYC 9B14 x2") == "amd-epyc-9b14-x2"


def test_a_record_comes_back_from_its_line(made: Record) -> None:
    again = Record.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.key == made.key and again.environment == made.environment
    assert made.us == made.p10_us  # on a CPU
    assert made.gbytes_per_s == pytest.approx(2 * 4 * 64 * 2 / 9e-6 / 1e9)
    assert replace(made, target="cuda:sm_90a").us == made.median_us
    assert {"apache-tvm", "apache-tvm-ffi", "python", "compiler"} <= set(made.versions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99, this version reads 1"),
        ({"operator": "softmin"}, "unknown operator"),
        ({"schedule": "warped"}, "unknown schedule"),
        ({"config": {"volume": 11}}, "unknown config field"),
        ({"outcome": "lucky"}, "cannot have outcome 'lucky'"),
        ({"target": "cuda:sm_100"}, "unknown target 'cuda:sm_100'"),
        ({"target": "sm_80"}, "unknown target 'sm_80'"),
        ({"target": "cuda:sm_80"}, "schedule cpu runs on llvm"),
        ({"median_us": 0}, "median_us=0 is not a finite number over 0"),
        ({"median_us": -1.0}, "median_us=-1.0 is not"),
        ({"median_us": True}, "median_us=True is not"),
        ({"p90_us": 9.5}, "correct with p10, median and p90 of"),
        ({"median_us": None}, "correct with p10, median and p90 of"),
        ({"error": float("inf")}, "error=inf is not a finite number"),
        ({"date": "2026-11-20"}, "is not a time in UTC"),
        ({"versions": {"python": 3}}, "is not texts by name"),
        ({"peers": {"torch": "fast"}}, "is not times by name"),
        ({"problem": {"rows": 4, "cols": True}}, "problem cols=True is not a whole number"),
        ({"problem": {"rows": 4, "cols": 10**30}}, "a number of more than 63 bits"),
        ({"search": {"strategy": "lucky", "campaign": 1, "seed": 0}}, "unknown search 'lucky'"),
        ({"search": {"strategy": "random", "campaign": 1, "seed": 0, "schedules": ["warped"]}}, "unknown schedule"),
        ({"search": {"strategy": "random", "campaign": 1, "seed": 0, "of": 3}}, "unknown search field 'of'"),
        ({"later": [[[[[[[[[[]]]]]]]]]]}, "more than 8 objects or lists"),
        ({"later": "\ud800"}, "half of a character"),
        ({"later": "x" * 2**21}, "a text of 2097152 letters"),
        ({"problem": None}, "not a record"),
    ],
)
def test_what_this_version_does_not_know(made: Record, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Record.from_json({**made.to_json(), **change})


def test_a_schedule_that_had_another_name(made: Record) -> None:
    """Its records are those of what it is called now."""
    words = {**made.to_json(), "operator": "conv2d_nhwc", "target": "rocm:gfx942", "schedule": "mfma"}
    problem = dict(n=1, h=4, w=4, ci=16, co=16, kh=1, kw=1, dtype="float16")
    found = Record.from_json({**words, "problem": problem, "config": {"block_m": 64}})
    assert found.schedule == found.to_json()["schedule"] == "mma"


def test_a_line_that_lacks_something(made: Record) -> None:
    words = made.to_json()
    del words["target"]
    with pytest.raises(UsageError, match="not a record"):
        Record.from_json(words)


HOSTILE: list[Any] = [
    *(None, "", [], {}, -1, 0, 0.5, math.inf, math.nan, 10**30, 2**62, 1e300, 5e-324, True, False),
    *("\x1b[31m", "\ud800", "a\nb\0", "x" * 2**21, "../..", {"a": {"b": []}}, ["a", 1], "9999-12-31T23:59:59+00:00"),
    functools.reduce(lambda inner, _: [inner], range(900), []),
]


def places(words: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within `words`."""
    inner = words.items() if isinstance(words, dict) else enumerate(words) if isinstance(words, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from places(value, (*at, key))


def test_any_value_in_place_of_any_other(made: Record) -> None:
    """A line is a record that can be used and written again, or one line says why it is none."""
    search = Search("template", 1, 0, ("cpu",), "", 40, 2.0, 9, ("cpu",))
    more = {"peers": {"a": 1.0}, "winner": True, "elapsed": 1.0, "registers": 8, "trials": 4, "later": [1]}
    line = json.dumps(replace(made, search=search, verified=("seed 0",), more=more).to_json())
    refused = 0
    for at in places(json.loads(line)):
        for value in HOSTILE:
            words = json.loads(line)
            functools.reduce(operator.getitem, at[:-1], words)[at[-1]] = value
            try:
                found = Record.from_json(words)
            except UsageError as error:
                refused += 1
                assert 0 < len(str(error)) < 400, at
                continue
            assert Record.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))).key == found.key
            assert found.us > 0 and found.tflops >= 0 and datetime.fromisoformat(found.date) and found.versions
    assert refused > 800


def test_only_a_correct_record_has_a_time(made: Record) -> None:
    assert replace(made, outcome="correctness").us == float("inf")
