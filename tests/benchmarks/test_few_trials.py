from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import few_trials
from benchmarks.peers.few_trials import ratios, read_searches, searches_table
from schedules.core.errors import UsageError


def test_keeps_what_both_searches_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = tmp_path / "one.json"
    sets.write_text(json.dumps({"runs": {"conv2d_nchw float32": 1}, "sets": {"one": ["1x8x8 4->8 3x3"]}}))
    words = [str(sets), "--only", "*", "--target", "llvm", "--few", "2", "--many", "4", "--log", str(tmp_path / "logs")]
    assert few_trials.main(words) == 0
    (file,) = (tmp_path / "logs").glob("*/few_trials.json")
    (row,) = read_searches(file)["searches"]
    assert (row["few_trials"], row["many_trials"]) == (2, 4)
    assert row["layer"] == "1x8x8 4->8 3x3"
    assert min(row[name] for name in ("few_us", "many_us", "default_few_us", "default_many_us")) > 0
    assert "2 trials" in capsys.readouterr().out
    assert "| 1 | 2 and 4 |" in searches_table([read_searches(file)])


def test_joins_two_searches_by_the_default() -> None:
    row = {"default_few_us": 30.0, "few_us": 24.0, "default_many_us": 33.0, "many_us": 22.0}
    assert ratios(row) == (pytest.approx(1.5), pytest.approx(1.2))  # 24 of 30 us is 26.4 of 33, beside 22


def test_refuses_a_long_search_that_is_no_longer() -> None:
    with pytest.raises(UsageError, match="--few"):
        few_trials.main(["--few", "8", "--many", "8"])
