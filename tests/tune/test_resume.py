"""What a search takes over from the journal: a crew that is asked for nothing is enough."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedules.core.arch import Arch
from schedules.measure.journal import Journal
from schedules.measure.lookup import campaigns, located
from schedules.measure.records import Record, Search
from schedules.tune.strategy import Candidate
from schedules.tune.tuner import Limits, Result, Tuner
from tests.conftest import problem_of
from tests.fake import record_of

PROBLEM = problem_of("conv2d_hwcn", n=32, h=6, w=6, ci=16, co=32, kh=3, kw=3, pad=1)
CONFIGS = [{"chunk": chunk} for chunk in (4, 1, 2, 8, 16)]


class NoCrew:
    """Knows its device, and fails if it is asked to do anything."""

    slots, builders, exclusive = 1, 1, True

    def __init__(self, record: Record) -> None:
        self.device, self.versions = record.device, dict(record.versions)


class NoStrategy:
    name, size = "template", 540

    def tell(self, records: Sequence[Record]) -> None: ...

    def learn(self, records: Sequence[Record]) -> None: ...

    def ask(self, count: int) -> list[Candidate]:
        pytest.fail("it was asked for candidates")


def trials(search: Search, count: int = len(CONFIGS)) -> list[Record]:
    """Trials, each slower than the one before, a minute apart; and the finals that ended them."""
    found = [
        record_of(PROBLEM, 10.0 + i, config, search=search, more={"elapsed": 60.0 * (i + 1)})
        for i, config in enumerate(CONFIGS[:count])
    ]
    return [*found, replace(found[0], stage="final", more={"winner": True, "trials": count})]


def resumed(folder: Path, host: Arch, records: Sequence[Record], limits: Limits, **options: Any) -> Result:
    with Journal(folder / "a.jsonl") as journal:
        for record in records:
            journal.append(record)
        first = [Candidate(record.schedule, record.config) for record in records[:2]]
        crew: Any = NoCrew(records[0])
        return Tuner(PROBLEM, host, NoStrategy(), crew, journal, limits, first=first, **options).run()


def test_minutes_of_earlier_runs_count(host: Arch, tmp_path: Path) -> None:
    result = resumed(tmp_path, host, trials(Search("template", 1, 0)), Limits(minutes=5.0))
    assert result.finished and result.why == "5 minutes" and result.status.resumed == 5
    assert result.status.spent >= 300 > result.status.seconds


def test_patience_that_is_over_stays_over(host: Arch, tmp_path: Path) -> None:
    result = resumed(tmp_path, host, trials(Search("template", 1, 0)), Limits(patience=4))
    assert result.finished and result.why == "no new best in 4 trials"


def test_a_share_of_the_time_that_is_over(host: Arch, tmp_path: Path) -> None:
    result = resumed(tmp_path, host, trials(Search("template", 1, 0)), Limits(until=time.monotonic()))
    assert result.finished and result.why == "its share of the time is over"


def test_the_finals_are_taken_over(host: Arch, tmp_path: Path) -> None:
    result = resumed(tmp_path, host, trials(Search("template", 1, 0)), Limits(trials=5))
    assert result.best and result.best.stage == "final" and result.default == result.best and result.speedup == 1.0


def test_what_it_is_narrowed_to_makes_another_search(host: Arch, tmp_path: Path) -> None:
    wide, narrow = Search("template", 1, 0), Search("template", 1, 0, schedules=("cpu",))
    records = [*trials(wide), *trials(narrow, 3)]
    result = resumed(tmp_path, host, records, Limits(trials=3), schedules=("cpu",))
    assert result.status.resumed == 3
    (tmp_path / "other").mkdir()
    assert resumed(tmp_path / "other", host, records, Limits(trials=5)).status.resumed == 5
    known = campaigns(located([tmp_path / "a.jsonl"]))
    assert sorted((found.search.schedules, found.trials, found.ended) for found in known) == [
        ((), 5, True),
        (("cpu",), 3, True),
    ]


def test_only_the_last_campaign_goes_on(host: Arch, tmp_path: Path) -> None:
    records = [*trials(Search("template", 1, 0)), *trials(Search("template", 2, 0), 2)]
    assert resumed(tmp_path, host, records, Limits(trials=2)).status.resumed == 2
    (found,) = campaigns(located([tmp_path / "a.jsonl"]))
    assert found.search.campaign == 2 and found.trials == 2 and found.seconds == 120.0


def test_a_schedule_that_is_new_starts_it_over(host: Arch, tmp_path: Path) -> None:
    records = trials(Search("template", 1, 0, offered=("cpu", "other")))
    fewer = resumed(tmp_path, host, records, Limits(trials=5), offered=("cpu",))
    assert fewer.status.resumed == 5
    (tmp_path / "more").mkdir()
    more = resumed(tmp_path / "more", host, records, Limits(until=time.monotonic()), offered=("cpu", "new"))
    assert more.status.resumed == 0 and more.best is None
    unsaid = trials(Search("template", 1, 0))
    (tmp_path / "unsaid").mkdir()
    assert resumed(tmp_path / "unsaid", host, unsaid, Limits(trials=5), offered=("cpu", "new")).status.resumed == 5


def test_how_it_was_asked_for_is_read_back() -> None:
    asked = Search("auto", 2, 3, ("a", "b"), "cuda", 100, 2.5, 7, ("c",))
    assert Search.from_json(asked.to_json()) == asked
    assert Search("template", 1, 0).to_json() == {"strategy": "template", "campaign": 1, "seed": 0}
