from __future__ import annotations

import json
from dataclasses import replace

import pytest

from schedules.build.builder import build
from schedules.core.arch import Arch
from schedules.core.device import slug
from schedules.core.errors import UsageError
from schedules.measure.records import Record, record
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
        ({"problem": None}, "not a record"),
    ],
)
def test_what_this_version_does_not_know(made: Record, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Record.from_json({**made.to_json(), **change})


def test_a_line_that_lacks_something(made: Record) -> None:
    words = made.to_json()
    del words["target"]
    with pytest.raises(UsageError, match="not a record"):
        Record.from_json(words)


def test_only_a_correct_record_has_a_time(made: Record) -> None:
    from dataclasses import replace

    assert replace(made, outcome="correctness").us == float("inf")
