from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedules.core.registry import EXTRA
from tests.tune.searches import Searches


@pytest.fixture
def searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Searches]:
    monkeypatch.setenv(EXTRA, "faulty=tests.tune.faulty")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    searches = Searches(tmp_path / "journal.jsonl", temporary)
    yield searches
    for pid in searches.processes():
        os.kill(pid, signal.SIGKILL)
